"""What runs in the ranks for task 1.12: unequal counts, and ranks without samples."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.trainer.average_gradients import Alike
from distlab.grading.kit.by_name import State
from distlab.runner import RankContext

COUNTS = (1, 4, 2, 5, 4, 1, 6)  # samples on each rank; no two neighbors alike
# In the third clause: who has no samples, and whose gradients are of an old step then.
EMPTY = {1: (), 2: (1,), 3: (1,), 4: (0, 2), 7: (1, 5, 6)}
STALE = {2: (1,), 4: (2,), 7: (1, 6)}
OVERFLOWN = ((4, 2), (7, 6))  # (ranks, rank): the old step's gradients are infinite
FROZEN = "left.0.weight"
UNUSED = ("nobody.weight", "nobody.bias")


class Branches(nn.Module):
    """Not every parameter is used by every sample; one is frozen, one never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.right, self.nobody = nn.Linear(4, 2), nn.Linear(2, 2)
        self.last = nn.ParameterDict({"gain": torch.ones(())})
        self.double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            numbers = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            parameter.data.copy_(numbers)
        dict(self.named_parameters())[FROZEN].requires_grad_(False)

    def forward(self, inputs: Tensor, *, with_right: bool) -> Tensor:
        """Two numbers for each row of `inputs` (B, 4)."""
        left: Tensor = self.left(inputs) * self.last["gain"]
        return left * self.right(inputs) if with_right else left


def counts_of(world_size: int, *, empty: bool = False) -> list[int]:
    """How many samples each rank has."""
    counts = [COUNTS[rank % len(COUNTS)] for rank in range(world_size)]
    none = EMPTY.get(world_size, (world_size - 1,)) if empty else ()
    return [0 if rank in none else count for rank, count in enumerate(counts)]


def many(world_size: int) -> list[int]:
    """Counts whose sum, and most of which, float32 rounds."""
    return [(1 << 24) + 1 + 2 * rank for rank in range(world_size)]


def weigh(context: RankContext, unit: ModuleType, seed: int, **_: Any) -> list[Any]:
    """The weights of three steps: uneven, with empty ranks, and nobody with samples."""
    n, rank = context.world_size, context.rank
    steps = counts_of(n), counts_of(n, empty=True), [0] * n, many(n)
    return [_number(unit.gradient_weight(context.comm, step[rank])) for step in steps]


def average_uneven(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, State]:
    """Every rank has samples, but not equally many; all parameters look alike."""
    # Real processes have their tensors at different addresses, forked ones do not.
    shifted = [torch.empty(16 * (1 + i)) for i in range(17 * context.rank)]
    device, count = context.comm.device, counts_of(context.world_size)[context.rank]
    model = Alike(seed).to(device)
    generator = torch.Generator().manual_seed(seed * 7919 + context.rank)
    inputs = torch.randn(count, 12, generator=generator, dtype=torch.float64).to(device)
    model(inputs * (1.0 + context.rank)).square().mean().backward()
    own = _gradients(model)
    unit.average_weighted(context.comm, model, count)
    del shifted
    return {"own": own, "after": _gradients(model)}


def average_with_gaps(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, State]:
    """Some ranks have no samples, or gradients of an old step, or none for a part."""
    n, rank = context.world_size, context.rank
    device, count = context.comm.device, counts_of(n, empty=True)[rank]
    model = Branches(seed).to(device)
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    inputs = torch.randn(count or 4, 4, generator=generator, dtype=torch.float64)
    inputs = inputs.to(device)
    if count or rank in STALE.get(n, ()):
        with_right = uses_right(n, rank)
        model(inputs, with_right=with_right).square().mean().backward()
    if (n, rank) in OVERFLOWN:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
    there = _gradients(model)
    own, old = (there, {}) if count else ({}, there)
    unit.average_weighted(context.comm, model, count)
    return {"own": own, "old": old, "after": _gradients(model)}


def uses_right(world_size: int, rank: int) -> bool:
    """Whether the samples of a rank need the second branch: not on the first one."""
    return world_size == 1 or rank != 0


def _gradients(model: nn.Module) -> State:
    return {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None
