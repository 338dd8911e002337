"""Explicit pipelines: the order in which a stage runs its forwards and backwards.

Rank r is stage r. Activations go to the next stage, and gradients to the one before.

Source: Y. Huang et al., "GPipe" (2019), figure 2; D. Narayanan et al., "PipeDream"
(2019), section 3.2, for 1F1B.
Symbols: p stages, m microbatches; a forward takes t_f seconds and a backward t_b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from distlab.comm import Comm, Work
from distlab.sim.plans.schedules import room_for


class PipelineStage(Protocol):
    """The computation of one stage; `number` is the microbatch."""

    def forward(self, number: int, x: Tensor) -> Tensor:
        """Return the activation for the next stage, with the same shape as `x`."""

    def backward(self, number: int, grad: Tensor | None) -> Tensor:
        """Return the gradient for the stage before.

        The last stage gets None, because its gradient comes from the loss.
        """


@dataclass(frozen=True, kw_only=True)
class TimedStage:
    """A stage that computes nothing, takes its time for that, and passes on `like`.

    `sleep` moves the rank's clock forward by this many seconds.
    """

    forward_s: float
    backward_s: float
    like: Tensor
    sleep: Callable[[float], object]

    def forward(self, number: int, x: Tensor) -> Tensor:
        """Implement `Stage.forward`."""
        self.sleep(self.forward_s)
        return self.like

    def backward(self, number: int, grad: Tensor | None) -> Tensor:
        """Implement `Stage.backward`."""
        self.sleep(self.backward_s)
        return self.like


def gpipe(comm: Comm, stage: PipelineStage, microbatches: Sequence[Tensor]) -> None:
    """Run all forwards, then all backwards; all ranks pass equally many microbatches.

        stage 0   F0 F1 F2 F3 ·  ·  ·  ·  B0 B1 B2 B3        p = 3, m = 4
        stage 1   ·  F0 F1 F2 F3 ·  ·  B0 B1 B2 B3 ·
        stage 2   ·  ·  F0 F1 F2 F3 B0 B1 B2 B3 ·  ·

    Each stage keeps the activations of all m microbatches. Stage 0 uses the values, and
    the others only the shape.
    """
    pipe = _Pipe(comm, stage, microbatches)
    for number in range(len(microbatches)):
        pipe.forward(number)
    for number in range(len(microbatches)):
        pipe.backward(number)
    pipe.finish()


def one_f_one_b(
    comm: Comm, stage: PipelineStage, microbatches: Sequence[Tensor]
) -> None:
    """Alternate forwards and backwards, as soon as the first backward can run.

        stage 0   F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3        p = 3, m = 4
        stage 1   ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3 ·
        stage 2   ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 ·  ·

    This is no faster than GPipe, but stage r keeps the activations of only p - r
    microbatches.
    """
    m = len(microbatches)
    warmup = min(comm.world_size - 1 - comm.rank, m)
    pipe = _Pipe(comm, stage, microbatches)
    for number in range(warmup):
        pipe.forward(number)
    for number in range(warmup, m):
        pipe.forward(number)
        pipe.backward(number - warmup)
    for number in range(m - warmup, m):
        pipe.backward(number)
    pipe.finish()


class _Pipe:
    """A stage and its neighbors; messages travel while the stage computes."""

    def __init__(
        self, comm: Comm, stage: PipelineStage, microbatches: Sequence[Tensor]
    ) -> None:
        self._comm, self._stage, self._inputs = comm, stage, microbatches
        rank, last = comm.rank, comm.world_size - 1
        self._next = rank + 1 if rank < last else None
        self._before = rank - 1 if rank else None
        self._activations = _Inbox(comm, self._before, microbatches)
        self._grads = _Inbox(comm, self._next, microbatches)
        self._sent: list[Work] = []

    def forward(self, number: int) -> None:
        """Receive an activation or take an input, compute, and send the result."""
        arrived = self._activations.take()
        x = self._inputs[number] if arrived is None else arrived
        self._give(self._next, self._stage.forward(number, x))

    def backward(self, number: int) -> None:
        """Receive a gradient, compute, and send one to the stage before."""
        grad = self._stage.backward(number, self._grads.take())
        self._give(self._before, grad)

    def finish(self) -> None:
        """Wait until the neighbors have everything."""
        for work in self._sent:
            work.wait()

    def _give(self, dst: int | None, tensor: Tensor) -> None:
        if dst is not None:
            self._sent.append(self._comm.isend(tensor, dst))


class _Inbox:
    """Tensors from one neighbor, in order; the next receive is posted in advance."""

    def __init__(self, comm: Comm, src: int | None, shapes: Sequence[Tensor]) -> None:
        self._comm, self._src = comm, src
        self._shapes = iter(shapes)
        self._posted: tuple[Work, Tensor] | None = None
        self._post()

    def take(self) -> Tensor | None:
        """Return the next tensor, or None if there is no such neighbor."""
        if self._posted is None:
            return None
        work, box = self._posted
        work.wait()
        self._post()
        return box

    def _post(self) -> None:
        shape = next(self._shapes, None)
        if shape is None or self._src is None:
            self._posted = None
            return
        box = room_for(shape)
        self._posted = self._comm.irecv(box, self._src), box
