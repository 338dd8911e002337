"""Time the steps of one rank: waiting for data, computation, communication.

Between two records, nothing here waits for the device. Losses and sums of gradients
stay where they are, and we read them once for every n steps, because a `.item()` in
each step would stop the GPU each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from distlab.dtensors import gathered, is_sharded
from distlab.monitor.memory import peak_resident_bytes
from distlab.monitor.records import StepRecord

LOG_EVERY_N_STEPS = 10
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: each bit changes the upper half


class StepMeter:
    """Makes a `StepRecord` for every `log_every_n_steps` steps of one rank.

    `in_communication_s` returns how many seconds this rank has spent in calls of its
    communicator so far. We compute the norm of the gradient when the optimizer begins
    the last of these steps, which is after the gradients have been averaged. We look
    for inf and nan in every step and before that point, because afterwards all ranks
    have them. You therefore have to call `before_call` before each call of the
    communicator.

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
        self._unseen: list[Tensor]  # parameters whose .grad has been written
        self._sums: list[Tensor]  # of one gradient each
        self._sums_of: list[int]  # the step of each
        self._parameters = _parameters(optimizer)
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
        for parameter in self._parameters:
            if is_sharded(parameter):
                continue  # its gradient is that of all ranks
            parameter.register_post_accumulate_grad_hook(
                lambda written: self._unseen.append(written)
            )
        self._reset()

    def begin_epoch(self) -> None:
        """Note that the next step is the first of an epoch."""
        self.epoch += 1
        self._reset()

    def end_epoch(self) -> None:
        """Make a record of the steps that have none, because evaluation comes next."""
        self._flush()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time the block in which you get the next batch."""
        asked = time.perf_counter()
        try:
            yield
        finally:
            self._data_wait_s += time.perf_counter() - asked

    def end_step(self, loss: Tensor | float, *, samples: int) -> None:
        """End a step; `loss` is a scalar, the mean over this rank's `samples`.

        A rank without samples in this batch passes 0, and then we don't read its loss.
        """
        self.before_call()  # where nothing was communicated
        self.step += 1
        self._num_steps += 1
        if samples:
            self._samples += samples
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
            self._counts.append(samples)
        if self.step % self._every == 0:
            self._flush()

    def _flush(self) -> None:
        if self._num_steps:
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
                    loss=self._mean_loss(),
                    data_wait_s=self._data_wait_s,
                    communication_s=self._in_communication_s() - self._communicated_s,
                    learning_rate=float(groups[0]["lr"]) if groups else None,
                    grad_norm=None if norm is None else float(gathered(norm)),
                    memory_bytes=peak_memory_bytes(self._device),
                    gpu_utilization=gpu_utilization(self._device),
                    nonfinite_step=self._first_nonfinite(),
                    checksum=checksum(self._parameters),
                )
            )
        self._reset()

    def _mean_loss(self) -> float | None:
        """Return the mean over samples, in float64 like a sum of Python's floats."""
        if not self._samples:
            return None
        losses = torch.stack([torch.as_tensor(loss) for loss in self._losses]).tolist()
        counted = zip(losses, self._counts, strict=True)
        return float(sum(loss * count for loss, count in counted)) / self._samples

    def before_call(self) -> None:
        """Check the gradients now, since a call of the communicator may change them."""
        if self._unseen:
            # What holds an inf or nan has a sum that is one: one pass, and no memory.
            sums = [_sum(p.grad) for p in self._unseen if p.grad is not None]
            self._unseen.clear()
            self._sums += sums
            self._sums_of += [self.step + 1] * len(sums)

    def _first_nonfinite(self) -> int | None:
        if not self._sums:
            return None
        sums = zip(self._sums_of, torch.stack(self._sums).tolist(), strict=True)
        return next((step for step, total in sums if not math.isfinite(total)), None)

    def _before_step(self, *_: object) -> None:
        if (self.step + 1) % self._every == 0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self._grad_norm = torch.nn.utils.get_total_norm(gradients)

    def _reset(self) -> None:
        self._num_steps = self._samples = 0
        self._grad_norm = None
        self._unseen, self._sums, self._sums_of = [], [], []
        self._data_wait_s = 0.0
        self._losses: list[Tensor | float] = []
        self._counts: list[int] = []  # of samples, for each loss
        self._started = time.perf_counter()
        self._communicated_s = self._in_communication_s()


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number below 2^32 that almost certainly changes if any bit changes.

    We add up the bits as integers on the device, so that only the sum has to leave it.
    We skip sharded tensors, because they differ between ranks anyway.
    """
    tensors = [one for one in tensors if not is_sharded(one)]
    sums = [_as_integers(one.detach()).sum(dtype=torch.int64) for one in tensors]
    values = torch.stack(sums).tolist() if sums else []
    weighted = sum((2 * place + 1) * value for place, value in enumerate(values))
    return (int(weighted) * _MIX % (1 << 64)) >> 32


def _sum(gradient: Tensor) -> Tensor:
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)  # its sum may overflow
    return gradient.sum(dtype=torch.float32) if is_half else gradient.sum()


def _as_integers(tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds.get(size, torch.int64))


def _parameters(optimizer: Optimizer | None) -> list[Tensor]:
    groups = optimizer.param_groups if optimizer else []
    return [parameter for group in groups for parameter in group["params"]]


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of the last sampling period in which a kernel ran, if known."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # it needs NVIDIA's Python bindings
        return None
