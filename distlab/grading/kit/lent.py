"""Tensors that a scenario hands over, with the caller's memory around them.

What is read afterwards is that memory. A function that gives the tensor other memory
(`tensor.data = …`) leaves the caller's as it was, and so do the judges see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.grading.verdict import NotYetError
from distlab.runner import Run


@dataclass(frozen=True)
class Lent:
    """A tensor under judgement; `memory` is what it is a view of."""

    tensor: Tensor
    memory: Tensor
    view: Tensor  # stays on the caller's memory
    before: Tensor
    memory_before: Tensor

    def left(self) -> dict[str, Any]:
        """What the caller has now: `before`, `after`, and two facts of the memory."""
        around = self.memory.clone()
        place = self.view.size(), self.view.stride(), self.view.storage_offset()
        around.as_strided(*place).copy_(self.before)
        return {
            "before": self.before.cpu(),
            "after": self.view.cpu(),
            "moved": self.tensor.data_ptr() != self.view.data_ptr(),
            "beside": torch.equal(around.nan_to_num(), self.memory_before.nan_to_num()),
        }


def lend(tensor: Tensor, memory: Tensor | None = None) -> Lent:
    """Hand over `tensor`, a view of `memory`, which begins where its storage does."""
    memory = tensor if memory is None else memory
    return Lent(tensor, memory, tensor.detach(), tensor.clone(), memory.clone())


def expect_own_memory(run: Run, values: list[dict[str, Any]], name: str) -> None:
    """`values` are what `left` told, by rank: each tensor is where it was.

    Raises:
        NotYetError: one has other memory, or something beside one was written.
    """
    moved = [rank for rank, value in enumerate(values) if value["moved"]]
    if moved:
        raise NotYetError(
            f"after {name}, rank {moved[0]}'s tensor has other memory; the memory that "
            "the caller gave it keeps the old values",
            slug="not-in-place",
            evidence=[
                (rank, "moved", "tensor.data_ptr() has changed") for rank in moved
            ],
            rule="write the values into the caller's tensor: tensor.copy_(…)",
        )
    written = [rank for rank, value in enumerate(values) if not value["beside"]]
    if written:
        raise NotYetError(
            f"{name} writes beside the elements of rank {written[0]}'s tensor, which "
            "is a part of a larger one",
            evidence=[
                (rank, "written", "memory of other elements") for rank in written
            ],
            rule="write only to the elements of the caller's tensor",
        )
