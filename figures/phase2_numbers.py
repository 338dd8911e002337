"""What 16 bits can represent; `python -m figures.phase2_numbers` writes both pictures.

The numbers come from torch. The staircase comes from the reference's LossScaler, on
float16 gradients that are multiplied and overflow.
"""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.trace.palette import (
    COMPLETE,
    FAILURE,
    GRID,
    HIGHLIGHT,
    INK,
    MUTED,
    NEUTRAL,
    SURFACE,
)
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER

TYPES = (
    (torch.float32, "float32"),
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
)
END = 1 + 2**-6  # the lines go from 1 to here
SOUGHT = 1.001
RANKS = 4
STEPS = 44
INTERVAL = 4  # growth_interval: small, so that there is something to see
SEED = 5


def places(dtype: torch.dtype) -> list[float]:
    """Every number of this type from 1 to END, in order."""
    gap = torch.finfo(dtype).eps  # from 1 to the next number
    return [1 + gap * k for k in range(round((END - 1) / gap) + 1)]


def numbers() -> str:
    """Three number lines from 1 on: where 1.001 is rounded to in each dtype."""
    held = {dtype: torch.tensor(SOUGHT, dtype=dtype).item() for dtype, _ in TYPES}
    c = Canvas(
        "numbers",
        760,
        390,
        title="The numbers just above 1 in float32, bfloat16 and float16",
        desc=(
            f"Three number lines from 1 to {END:.4f}. "
            + " ".join(
                f"{name}: {len(places(dtype)) - 1:,} steps, the next number after 1 "
                f"is {places(dtype)[1]:.8g}, and {SOUGHT} becomes {held[dtype]:.8g}."
                for dtype, name in TYPES
            )
            + " A dashed line marks 1.001; an arrow shows where it is rounded to."
        ),
    )

    def at(value: float) -> float:
        return 50 + 660 * (value - 1) / (END - 1)

    c.text(380, 28, f"which number represents {SOUGHT}?", size=15, bold=True)
    c.line(at(SOUGHT), 62, at(SOUGHT), 372, color=HIGHLIGHT, dash="5 4", thick=1.5)
    c.text(at(SOUGHT), 54, str(SOUGHT), size=13, bold=True)
    for row, (dtype, name) in enumerate(TYPES):
        y = 120 + 112 * row
        points = places(dtype)
        c.text(710, y - 36, name, size=14, bold=True, mono=True, anchor="end")
        c.line(50, y, 710, y, thick=2)
        if len(points) > 1000:
            c.rect(50, y - 10, 660, 20, fill=NEUTRAL)
            c.text(
                380,
                y + 32,
                f"{len(points) - 1:,} steps, closer than the line is wide",
                size=12,
            )
        else:
            for point in points:
                c.circle(at(point), y, 5, fill=NEUTRAL)
            for point in {points[0], points[1], points[-1]}:
                if point == points[0] or at(point) - at(points[0]) > 60:
                    c.text(at(point), y + 24, f"{point:.8g}", size=11.5, color=MUTED)
        _rounding(c, at(SOUGHT), at(held[dtype]), y, held[dtype])
    return c.svg()


def _rounding(c: Canvas, start: float, end: float, y: float, value: float) -> None:
    """The nearest number, and its distance."""
    if abs(end - start) > 20:
        c.arrow(start, y - 22, end + 4, y - 8, color=HIGHLIGHT, thick=2)
    c.circle(end, y, 7, fill=HIGHLIGHT)
    c.text(start + 14, y - 18, f"becomes {value:.8g}", size=12.5, anchor="start")


class Taken(NamedTuple):
    """What one step of the scaler was like."""

    scale: float  # in this step
    overflows: list[bool]  # by rank
    stepped: bool


@cache
def staircase_of() -> list[Taken]:
    """The reference's LossScaler on rank 0 of four, whose gradients vary in size.

    The other ranks' gradients are tensors too; all_reduce adds their flags.
    """
    dice = random.Random(SEED)
    sizes = [[dice.lognormvariate(2, 0.8) for _ in range(RANKS)] for _ in range(STEPS)]
    taken = []
    flags: list[bool] = []

    def all_reduce(tensor: Tensor) -> None:
        tensor += sum(flags[1:])

    comm = SimpleNamespace(
        rank=0, world_size=RANKS, device=torch.device("cpu"), all_reduce=all_reduce
    )
    scaler = load("mixed_precision").LossScaler(
        comm, init_scale=2.0**5, growth_interval=INTERVAL
    )
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for row in sizes:
        scale = scaler.loss_scale
        gradients = [(size * scaler.scale(torch.ones(1))).half() for size in row]
        flags[:] = [not bool(g.isfinite().all()) for g in gradients]
        weight.grad = gradients[0].float()
        stepped = scaler.step(optimizer)
        scaler.update()
        taken.append(Taken(scale, list(flags), stepped))
    return taken


def staircase() -> str:
    """The scale over the steps; below it, on which rank something overflowed."""
    steps = staircase_of()
    skipped = [number for number, step in enumerate(steps) if not step.stepped]
    top = max(step.scale for step in steps)
    low = min(step.scale for step in steps)
    c = Canvas(
        "staircase",
        760,
        424,
        title="The loss scale over the training steps, the same on every rank",
        desc=(
            f"The loss scale over {len(steps)} steps starts at {steps[0].scale:.0f}, "
            f"doubles after {INTERVAL} good steps in a row and is halved after a "
            f"skipped one; it stays between {low:.0f} and {top:.0f}. Below it a row "
            f"for each of {RANKS} ranks: a cross marks an overflow on that rank. In "
            f"{len(skipped)} steps a rank overflows, and all ranks skip these steps."
        ),
    )

    def across(step: int) -> float:
        return 100 + 14.4 * step

    def up(scale: float) -> float:
        return 36 + 30 * (torch.tensor(top / scale).log2().item())

    scale = top
    while scale >= low:
        c.line(100, up(scale), across(len(steps)), up(scale), color=GRID, thick=1)
        c.text(90, up(scale) + 4, f"{scale:,.0f}", size=11.5, anchor="end")
        scale /= 2
    c.text(24, 20, "loss scale", size=12.5, bold=True, anchor="start")
    floor = up(low) + 40
    for number in skipped:
        c.rect(
            across(number),
            30,
            14.4,
            floor + 26 * RANKS - 36,
            fill=NEUTRAL,
            stroke="none",
        )
    for number, step in enumerate(steps):
        x, y = across(number), up(step.scale)
        c.line(x - 0.7, y, x + 15.1, y, color=INK, thick=3.5)
        if number + 1 < len(steps) and steps[number + 1].scale != step.scale:
            c.line(x + 14.4, y, x + 14.4, up(steps[number + 1].scale), color=INK)
    for rank in range(RANKS):
        y = floor + 26 * rank
        c.text(90, y + 4, f"rank {rank}", size=12, anchor="end")
        c.line(100, y, across(len(steps)), y, color=GRID, thick=1)
        for number, step in enumerate(steps):
            _mark(c, across(number) + 7.2, y, step, rank)
    y = floor + 26 * RANKS + 6
    _legend(c, y)
    return c.svg()


def _mark(c: Canvas, x: float, y: float, step: Taken, rank: int) -> None:
    """A dot for a step, a ring for a skipped one, a cross for an overflow."""
    if step.overflows[rank]:
        for sign in (-1, 1):
            c.line(x - 5, y - 5 * sign, x + 5, y + 5 * sign, color=FAILURE, thick=2.5)
    elif step.stepped:
        c.circle(x, y, 3, fill=COMPLETE, stroke=COMPLETE)
    else:
        c.circle(x, y, 3, fill=SURFACE, stroke=MUTED)


def _legend(c: Canvas, y: float) -> None:
    done = Taken(1, [False], True)
    skip = Taken(1, [False], False)
    bad = Taken(1, [True], False)
    words = ((bad, "overflow here"), (skip, "skips too"), (done, "steps"))
    for place, (step, text) in enumerate(words):
        x = 110 + 150 * place
        _mark(c, x, y, step, 0)
        c.text(x + 14, y + 4, text, size=12, anchor="start")
    c.text(730, y + 4, "training steps →", size=12, color=MUTED, anchor="end")


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"numbers.svg": numbers(), "staircase.svg": staircase()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
