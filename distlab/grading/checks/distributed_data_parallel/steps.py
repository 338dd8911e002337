"""What ranks do for task 3.11: steps of a model with buffers, each in another state.

The weights stay as they are, so that a gradient depends on its batch only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.checks.distributed_data_parallel.halves import in_float16
from distlab.grading.checks.distributed_data_parallel.hooks import LAYERS_MIB
from distlab.grading.checks.distributed_data_parallel.watch import (
    Chain,
    EventComm,
    Happened,
    gradients,
    loss_of,
    make_inputs,
)
from distlab.grading.kit.flat import flat
from distlab.runner import RankContext

STEPS = 3
STALE = 1e8
LARGE = 2**60  # plus a few: too many digits for any floating-point number


class Tracked(nn.Module):
    """A chain with buffers that each forward changes, on each rank otherwise.

    `mean` is non-contiguous.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chain = Chain(seed)
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(3, 2, dtype=torch.float64).t())
        self.register_buffer("count", torch.tensor(LARGE, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """The chain's outputs."""
        self.mean += x.detach().mean() + torch.arange(3, device=x.device)
        self.count += int(x.detach().abs().sum())
        return self.chain(x)  # type: ignore[no-any-return]


def copied(buffer: Tensor) -> Tensor:
    """A copy; of a large integer, what is beyond LARGE."""
    return buffer.clone() if buffer.is_floating_point() else buffer - LARGE


class InTwoHalves:
    """A comm_hook's Work: reduce_scatter in backward(), all_gather in wait().

    The bucket has no values in between, as while any message is in flight.
    """

    def __init__(self, comm: Comm, bucket: Any) -> None:
        self._comm, self._flat = comm, bucket.flat
        size = -(-self._flat.numel() // comm.world_size)
        self._whole = self._flat.new_zeros(size * comm.world_size)
        self._whole[: self._flat.numel()] = self._flat
        self._chunk = self._flat.new_empty(size)
        self._work = comm.reduce_scatter(self._chunk, self._whole, async_op=True)
        self._flat.fill_(torch.nan)

    def wait(self, timeout_s: float | None = None) -> None:
        """The sum is in the bucket then; once more changes nothing."""
        if self._work is not None:
            self._work.wait(timeout_s)
            self._comm.all_gather(self._whole, self._chunk, timeout_s=timeout_s)
            self._flat.copy_(self._whole[: self._flat.numel()])
            self._work = None


class Steps:
    """A wrapped model on one rank, and a step after another."""

    def __init__(
        self, context: RankContext, unit: ModuleType, seed: int, hook: Any = None
    ) -> None:
        self.context, self.seed, self.events = context, seed, list[Happened]()
        self.model = Tracked(seed).to(context.comm.device)
        comm = EventComm(context.comm, self.events)
        self.ddp = unit.DistributedDataParallel(
            self.model, comm, bucket_size_mib=LAYERS_MIB, comm_hook=hook
        )

    def backward(self, step: int) -> None:
        """Of batch number `step` of this rank."""
        inputs = make_inputs(self.seed, step, self.context.rank)
        loss_of(self.ddp(inputs.to(self.context.comm.device))).backward()

    def num_started(self) -> int:
        """How many buckets' messages this backward() has started."""
        ops = ("all_reduce", "reduce_scatter")
        return sum(event[0] == "call" and event[1] in ops for event in self.events)

    def gradients(self) -> Tensor | None:
        """All of them; nothing if one is None."""
        found = gradients(self.model.chain)
        if any(gradient is None for gradient in found.values()):
            return None
        return flat(found)  # type: ignore[arg-type]

    def buffers(self) -> list[Tensor]:
        """Copies of them: see `copied`."""
        return [copied(buffer) for buffer in self.model.buffers()]


def take_steps(
    context: RankContext, unit: ModuleType, seed: int, to_none: bool = False
) -> list[dict[str, Any]]:
    """What .grad and the buffers are after each backward().

    STEPS of them; one with the gradients of the step before; one without rank 0. With
    `to_none` by a comm_hook whose wait() does the second half. "unsent" is the end: a
    step after the first broke off, and not all buckets had been started in it.
    """
    hook, n = (InTwoHalves if to_none else None), context.world_size
    steps = Steps(context, unit, seed, hook)
    frozen = steps.model.chain.frozen.weight
    found: list[dict[str, Any]] = []
    for step in range(STEPS + 2):
        if step != STEPS:
            steps.model.zero_grad(set_to_none=to_none)
        if step == STEPS + 1:
            steps.ddp.active = active_in(step, n)
        frozen.grad = torch.full_like(frozen, STALE)
        steps.events.clear()
        try:
            steps.backward(step)
        except (AssertionError, AttributeError):  # as of a work that is None
            counts = steps.num_started(), len(steps.ddp.buckets)
            if step == 0 or counts[0] >= counts[1]:
                raise
            return [*found, {"unsent": counts}]
        told = {"gradients": steps.gradients(), "buffers": steps.buffers()}
        stale = frozen.grad is not None and bool((frozen.grad == STALE).all())
        found.append({**told, "stale": stale, "events": list(steps.events)})
    found[0]["half"] = in_float16(context.comm, unit)
    return found


def active_in(step: int, n: int) -> list[int]:
    """The ranks that have a batch in a step."""
    return list(range(1 if step > STEPS and n > 1 else 0, n))
