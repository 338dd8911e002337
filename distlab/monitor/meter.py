"""Times the steps of one rank: how long it waited for data, computed, communicated.

Nothing here waits for the device between two records: the loss is summed where it is,
and read once for every n steps. A `.item()` in each step would stop the GPU each time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from distlab.monitor.records import StepRecord

LOG_EVERY_N_STEPS = 10


class StepMeter:
    """Makes a `StepRecord` for every `log_every_n_steps` steps of one rank.

    `in_communication_s` says how many seconds this rank has spent in calls of its
    communicator so far. The gradient's norm is taken where the optimizer begins the
    last of these steps, so after the gradients were averaged.

        meter.begin_epoch()
        while True:
            with meter.waiting_for_data():
                batch = next(batches)
            ...                                   # forward, backward, optimizer.step()
            meter.end_step(loss, samples=len(batch))
        meter.end_epoch()
    """

    def __init__(
        self,
        rank: int,
        on_record: Callable[[StepRecord], None],
        *,
        log_every_n_steps: int = LOG_EVERY_N_STEPS,
        in_communication_s: Callable[[], float] = float,
        optimizer: Optimizer | None = None,
        device: torch.device | None = None,
    ) -> None:
        if log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps {log_every_n_steps}: at least 1")
        self.rank, self.step, self.epoch = rank, 0, 0
        self._on_record, self._every = on_record, log_every_n_steps
        self._in_communication_s = in_communication_s
        self._optimizer = optimizer
        self._device = device or torch.device("cpu")
        self._grad_norm: Tensor | None
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
        self._reset()

    def begin_epoch(self) -> None:
        """The next step is the first of an epoch."""
        self.epoch += 1
        self._reset()

    def end_epoch(self) -> None:
        """Make a record of the steps that have none; evaluation comes now, no step."""
        self._flush()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Round the call that gets the next batch."""
        asked = time.perf_counter()
        try:
            yield
        finally:
            self._data_wait_s += time.perf_counter() - asked

    def end_step(self, loss: Tensor | float, *, samples: int) -> None:
        """A step is done. `loss` is the mean over this rank's `samples`, no dimensions.

        A rank that had none of the batch says 0 samples; its loss is not read.
        """
        self.step += 1
        self._num_steps += 1
        if samples:
            self._samples += samples
            self._loss_sum += (
                loss.detach() if isinstance(loss, Tensor) else loss
            ) * samples
        if self.step % self._every == 0:
            self._flush()

    def _flush(self) -> None:
        if self._num_steps:
            loss = float(self._loss_sum) / self._samples if self._samples else None
            norm = self._grad_norm
            groups = self._optimizer.param_groups if self._optimizer else []
            self._on_record(
                StepRecord(
                    rank=self.rank,
                    step=self.step,
                    epoch=self.epoch,
                    time_s=time.time(),
                    num_steps=self._num_steps,
                    seconds=time.perf_counter() - self._started,
                    samples=self._samples,
                    loss=loss,
                    data_wait_s=self._data_wait_s,
                    communication_s=self._in_communication_s() - self._communicated_s,
                    learning_rate=float(groups[0]["lr"]) if groups else None,
                    grad_norm=None if norm is None else float(norm),
                    memory_bytes=peak_memory_bytes(self._device),
                    gpu_utilization=gpu_utilization(self._device),
                )
            )
        self._reset()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if (self.step + 1) % self._every == 0:
            gradients = [
                parameter.grad
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            self._grad_norm = torch.nn.utils.get_total_norm(gradients)

    def _reset(self) -> None:
        self._num_steps = self._samples = 0
        self._grad_norm = None
        self._data_wait_s = 0.0
        self._loss_sum: Tensor | float = 0.0
        self._started = time.perf_counter()
        self._communicated_s = self._in_communication_s()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def gpu_utilization(device: torch.device) -> float | None:
    """Share of the last sampling period in which a kernel ran, if it can be read."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # it needs NVIDIA's Python bindings
        return None
