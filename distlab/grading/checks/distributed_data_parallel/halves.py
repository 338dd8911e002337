"""A step with float16 gradients that have a mean in float16, but no sum: 3.10, 3.11."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.kit.values import SINGLE, close
from distlab.grading.verdict import NotYetError

HALF = 40_000.0  # float16 holds it, but not the sum of two


class _Half(nn.Module):
    """One parameter in float16, and a gradient of HALF on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of `x` (3,), weighed."""
        return (self.weight.float() * x).sum()


def in_float16(comm: Comm, unit: ModuleType) -> Tensor | None:
    """The gradient of `_Half` after a step."""
    model = _Half().to(comm.device)
    ddp = unit.DistributedDataParallel(model, comm)
    ddp(torch.full((3,), HALF, device=comm.device)).backward()
    gradient = model.weight.grad
    return None if gradient is None else gradient.float().cpu()


def expect_half(found: list[Tensor | None], what_to_do: str) -> None:
    """The mean of float16 gradients that have no sum in float16.

    Raises:
        NotYetError: it is another value; and `what_to_do` about it.
    """
    for rank, gradient in enumerate(found):
        if not close(gradient, torch.full((3,), HALF), SINGLE):
            got = "None" if gradient is None else f"{float(gradient[0]):g}"
            raise NotYetError(
                f"with float16 gradients of {HALF:g} on every rank, .grad is {got} on "
                f"rank {rank}, expected their mean, {HALF:g}",
                rule=f"float16 ends at 65504: {what_to_do}",
            )
