"""Times the steps of one rank: how long it waited for data, computed, communicated.

Nothing here waits for the device between two records: the loss and the inf and nan of
the gradients are counted where they are, and read once for every n steps. A `.item()`
in each step would stop the GPU each time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
    last of these steps, so after the gradients were averaged. What is inf or nan is
    looked for in every step and before that, when backward() has written a `.grad`:
    afterwards all ranks have it. Make the meter before other hooks that change `.grad`.

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
        self._sums: list[Tensor]  # of each gradient of this step
        self._nonfinite: list[Tensor]  # how many of them are not finite, by step
        self._parameters = _parameters(optimizer)
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
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
        self._nonfinite.append(_num_nonfinite(self._sums, self._device))
        self._sums = []
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
            nonfinite_step, num_nonfinite = self._first_nonfinite()
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
                    nonfinite_step=nonfinite_step,
                    num_nonfinite=num_nonfinite,
                    checksum=checksum(self._parameters),
                )
            )
        self._reset()

    def _first_nonfinite(self) -> tuple[int | None, int]:
        counts = torch.stack(self._nonfinite).tolist()
        first = self.step - len(counts) + 1
        found = ((step, num) for step, num in enumerate(counts, start=first) if num)
        return next(found, (None, 0))

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            # What holds an inf or nan has a sum that is one: one pass, and no memory.
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._sums.append(parameter.grad.sum(dtype=dtype))

    def _before_step(self, *_: object) -> None:
        if (self.step + 1) % self._every == 0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self._grad_norm = torch.nn.utils.get_total_norm(gradients)

    def _reset(self) -> None:
        self._num_steps = self._samples = 0
        self._grad_norm, self._sums, self._nonfinite = None, [], []
        self._data_wait_s = 0.0
        self._loss_sum: Tensor | float = 0.0
        self._started = time.perf_counter()
        self._communicated_s = self._in_communication_s()


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number below 2^32 that differs, in all likelihood, if any bit differs.

    The bits are added up as integers where they are: only the sum leaves the device.
    """
    sums = [
        _as_integers(tensor.detach()).sum(dtype=torch.int64) * (2 * place + 1)
        for place, tensor in enumerate(tensors)
    ]
    return int(torch.stack(sums).sum()) % (1 << 32) if sums else 0


def _as_integers(tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds.get(size, torch.int64))


def _num_nonfinite(sums: list[Tensor], device: torch.device) -> Tensor:
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (~torch.isfinite(torch.stack(sums))).sum()


def _parameters(optimizer: Optimizer | None) -> list[Tensor]:
    groups = optimizer.param_groups if optimizer else []
    return [parameter for group in groups for parameter in group["params"]]


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
