"""The losses of the microbatches, and what still holds their graphs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from distlab.grading.checks.pipeline_parallel.clock import Schedules, peak
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence, place

Holder = tuple[str, str, int] | None
"""A variable's name, its file and a line of it."""


class Scheduled(Protocol):
    """What a case of the executor's checks tells about its schedules."""

    @property
    def name(self) -> str:
        """What the verdict calls it."""

    @property
    def schedules(self) -> Schedules:
        """Of each rank."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each microbatch."""

    @property
    def num_chunks(self) -> int:
        """Model chunks of a rank."""


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WatchedLosses:
    """A loss function that looks which variable of `file` holds earlier losses.

    `holder` is the variable's name, its file and its line: where it is added to. To
    look is to hold: a frame remembers the variables that were read.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], file: str) -> None:
        self._loss_fn, self._file = loss_fn, file
        self.holder: Holder = None

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss; its graph has a mark."""
        frame: FrameType | None = sys._getframe(1)
        while frame and not self.holder:
            if frame.f_code.co_filename == self._file:
                self.holder = _holder(frame)
            frame = frame.f_back
        marked: Tensor = _Marked.apply(  # type: ignore[no-untyped-call]
            self._loss_fn(output, targets)
        )
        return marked


def _holder(frame: FrameType) -> Holder:
    """A variable that is, or directly contains, the losses of several microbatches."""
    for name, value in frame.f_locals.items():
        items = value.values() if isinstance(value, dict) else value
        tensors = [value] if isinstance(value, Tensor) else []
        if isinstance(value, list | tuple | dict):
            tensors = [item for item in items if isinstance(item, Tensor)]
        if sum(_marks(tensor) for tensor in tensors) > 1:
            return name, frame.f_code.co_filename, _line(frame.f_code, name)
    return None


def _marks(tensor: Tensor) -> int:
    """Of how many microbatches the losses are in a tensor's graph."""
    seen, to_do, count = set(), [tensor.grad_fn], 0
    while to_do:
        node = to_do.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "_MarkedBackward":
            count += 1
        else:
            to_do += [before for before, _ in node.next_functions]
    return count


def _line(code: CodeType, name: str) -> int:
    """The first line that names the variable after the line that makes it."""
    lines = list(dict.fromkeys(_lines(code, name)))
    makes = [line for line, made in lines if made][:1]
    later = [line for line, _ in lines if line not in makes]
    return (later or makes or [code.co_firstlineno])[0]


def _lines(code: CodeType, name: str) -> Iterator[tuple[int, bool]]:
    """Each line of the code that names the variable, and whether it assigns to it."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        if step.positions and step.positions.lineno:
            line = step.positions.lineno
        if step.argval == name and step.opname.endswith(("_FAST", "_DEREF")):
            yield line, step.opname.startswith("STORE")


def expect_no_graph_in_the_loss(
    case: Scheduled, report: list[dict[str, Any]], look: Callable[[], Holder]
) -> None:
    """Where only the last rank keeps graphs, its losses hold them: `look` tells which.

    Judged where any rank could keep more than the schedule has in flight.

    Raises:
        NotYetError: it keeps more than are in flight.
    """
    flights = [peak(schedule) for schedule in case.schedules]
    graphs = [value["kept"][1] for value in report]
    over = [g > w + 1 for g, w in zip(graphs, flights, strict=True)]
    total = len(case.sizes) * case.num_chunks
    full = any(total <= w + 1 for w in flights)
    if len(over) == 1 or full or not over[-1] or any(over[:-1]):
        return
    holder = look()
    name, file, line = holder or ("the sum or list of losses", "", 0)
    name = f"`{name}`" if holder else name
    raise NotYetError(
        f"with {case.name}, rank {len(over) - 1} keeps the graphs of microbatches that "
        f"are done: {name} holds them, expected values without a graph",
        slug="loss-holds-graph",
        evidence=tuple(
            Evidence(
                rank=rank,
                state="kept" if over[rank] else "right",
                text=f"{g} graphs at once, {w} in flight",
                where=place((file, line)) if over[rank] else "",
            )
            for rank, (g, w) in enumerate(zip(graphs, flights, strict=True))
        ),
        rule="add up the loss's value: output.detach(), or float(output)",
    )


def wrong_losses(losses: Sequence[Tensor]) -> list[tuple[str, float]]:
    """What else may come of the microbatches' losses, in words."""
    values = [float(loss) for loss in losses]
    wanted = "expected the mean over all samples"
    return [
        (f"the last microbatch's alone, {wanted}", values[-1]),
        (f"the sum over the microbatches, {wanted}", sum(values)),
        (f"the mean over the microbatches, {wanted}", sum(values) / len(values)),
    ]
