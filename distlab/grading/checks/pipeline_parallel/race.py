"""Stages that are watched: how many graphs they keep, and what a schedule takes."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.pipeline_parallel.clock import all_then_all, in_turns
from distlab.grading.runs import Runs, RunSpec, in_virtual_time
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

FORWARD_MS, BACKWARD_MS = 1, 2
INPUT_MS = 1  # of BACKWARD_MS; the rest is for the gradient of the weight


class Meter:
    """Which forwards' graphs are alive, by number; and how many were at most."""

    def __init__(self) -> None:
        self.made = self.peak = 0
        self.alive: set[int] = set()
        self.left: list[tuple[int, list[int]]] = []
        """By backward that begins: its forward, and those whose graphs are used up."""

    def count(self, part: object, number: int) -> None:
        """From now until `part` is no more."""
        self.alive.add(number)
        self.peak = max(self.peak, len(self.alive))
        weakref.finalize(part, self.alive.discard, number)


class _Part:
    """Lives as long as the graph of one forward, or what that has saved."""


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, meter: Meter, full: Meter) -> Any:
        ctx.part, ctx.meters, ctx.number = _Part(), (meter, full), meter.made
        meter.made += 1
        meter.count(ctx.part, ctx.number)
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        meter, full = ctx.meters
        used_up = meter.alive - full.alive - {ctx.number}
        meter.left.append((ctx.number, sorted(used_up)))
        return gradient, None, None, None


class CountedStage(nn.Module):
    """A stage whose graphs are counted.

    `full` counts those that still have what they saved for backward(). That is gone
    after a backward(), unless it was told to retain it, even where a variable still
    has the output's name.
    """

    def __init__(
        self, stage: nn.Module, meter: Meter, full: Meter | None = None
    ) -> None:
        super().__init__()
        self.stage, self._meter, self._full = stage, meter, full or Meter()

    def forward(self, x: Tensor) -> Tensor:
        """What the stage makes of it."""

        def pack(_saved: Tensor) -> _Part:
            part = _Part()
            self._full.count(part, number)
            return part

        made, number = self.stage(x), self._meter.made
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: torch.empty(0)):
            counted: Tensor = _Counted.apply(  # type: ignore[no-untyped-call]
                made, torch.empty(0), self._meter, self._full
            )
        return counted


# ── in virtual time ─────────────────────────────────────────────────────────────────


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, sleep: Any, back_ms: int) -> Tensor:
        ctx.sleep, ctx.back_ms = sleep, back_ms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.sleep(ctx.back_ms / 1000)
        return gradient, None, None, None


class Timed(nn.Module):
    """A stage that takes its time: forward, and backward to its input and its weight.

    Who goes backward to the two one after the other takes no longer.
    """

    def __init__(self, sleep: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        # The first stage's input needs no gradient, and its backward is as long.
        self._anchor = torch.zeros((), requires_grad=True)
        self._sleep = sleep
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Times a weight, so that there is something to go backward from."""
        self.runs += 1
        self._sleep(FORWARD_MS / 1000)
        rest_ms = BACKWARD_MS - INPUT_MS
        return self._timed(x, INPUT_MS) * self._timed(self.weight, rest_ms)

    def _timed(self, x: Tensor, back_ms: int) -> Tensor:
        made: Tensor = _Timed.apply(x, self._anchor, self._sleep, back_ms)  # type: ignore[no-untyped-call]
        return made


RACED = {"GPipe": all_then_all, "1F1B": in_turns}


def race(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    m: int,
    names: tuple[str, ...] = tuple(RACED),
) -> list[dict[str, Any]]:
    """How long these schedules take, and how much is kept of them at most."""
    found = []
    n, comm = context.world_size, context.comm
    x = torch.ones(1, 1, dtype=torch.float64)
    for schedules in [RACED[name](n, m) for name in names]:
        meter = Meter()
        stage = Timed(context.clock.sleep)
        chunk = unit.ModelChunk(CountedStage(stage, meter), x[0])
        schedule = [unit.Action(*entry) for entry in schedules[context.rank]]
        comm.barrier()
        start_s = comm.time()
        unit.execute(
            comm,
            [chunk],
            schedule,
            lambda output, target: (output - target).square().mean(),
            [(x, x)] * m,
        )
        took_s = comm.time() - start_s
        found.append({"time_s": took_s, "peak": meter.peak, "runs": stage.runs})
    return found


def races(stages: int, m: int) -> list[RunSpec]:
    """All schedules in one race, and each by itself."""
    entries = (tuple(RACED), *((name,) for name in RACED))
    return [in_virtual_time(race, stages, m=m, names=names) for names in entries]


def raced(runs: Runs, stages: int, m: int) -> list[list[dict[str, Any]]]:
    """By simulated rank, what `race` tells of each schedule.

    Raises:
        NotYetError: the ranks did not come to their end; in which schedule.
    """

    def told(*names: str) -> list[list[dict[str, Any]]]:
        run = runs.simulated(in_virtual_time(race, stages, m=m, names=names))
        values: list[list[dict[str, Any]]] = run["values"]
        return values

    def stops(name: str) -> bool:
        try:
            told(name)
        except NotYetError:
            return True
        return False

    try:
        return told(*RACED)
    except NotYetError as error:
        name = next(filter(stops, RACED), "")
        message = f"with {name}, {error.message}" if name else error.message
        raise error.but(message=message) from error
