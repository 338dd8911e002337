"""Activations over time; `python -m figures.phase2_memory` writes both pictures.

Heights and times are computed here: what each forward keeps and each backward frees,
and how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from figures.draw import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    SKY,
    Canvas,
    write,
)

FOLDER = Path(__file__).resolve().parent.parent / "phase2_advanced" / "figures"
INSIDE = 5  # activations inside one block
BLOCKS = 5
FORWARD, BACKWARD = 1.0, 2.0  # units of time for a block, or a full microbatch
SIZES = (1.0, 1.0, 0.4)  # microbatches: the last one is short


class Part(NamedTuple):
    """A part of the work: how long it takes, and what it adds to the live memory."""

    time: float
    change: float


def microbatches() -> str:
    """Live activations of three microbatches, in two orders; one message at the end."""
    c = Canvas(
        "microbatches",
        760,
        340,
        title="Gradient accumulation: one microbatch at a time, one message",
        desc=(
            "Two curves of activation memory over time. Above, forward and backward of "
            "each of three microbatches in turn: the memory rises during a forward and "
            "falls to zero during the backward. There are three hills; the third "
            "microbatch has fewer samples, so its hill is lower and shorter. Below, "
            "all three forwards run first: the memory rises to "
            f"{sum(SIZES):.1f} times the activations of one microbatch. Both orders "
            "take the same time and end with one all_reduce and one optimizer step."
        ),
    )
    one_by_one: list[Part] = []
    for size in SIZES:
        one_by_one += _there_and_back(size, size)
    forwards = [step for size in SIZES for step in _part(FORWARD * size, size)]
    backwards = [
        step for size in reversed(SIZES) for step in _part(BACKWARD * size, -size)
    ]
    rows = (
        (110, one_by_one, SKY, "forward, backward, forward, backward, …"),
        (290, [*forwards, *backwards], ORANGE, "all forwards, then all backwards"),
    )
    wide, tall = 74.0, 45.0  # pixels for a unit of time, and for a microbatch
    for bottom, parts, color, words in rows:
        _hills(c, 40, bottom, wide, tall, parts, color)
        c.text(
            40,
            bottom - tall * _peak(parts) - 16,
            words,
            size=13,
            bold=True,
            anchor="start",
        )
        end = 40 + wide * sum(part.time for part in parts)
        c.rect(end + 10, bottom - 26, 74, 26, fill=GREEN, round_=4)
        c.text(end + 47, bottom - 9, "all_reduce", size=11.5, color="#FFFFFF")
        c.rect(end + 92, bottom - 26, 44, 26, fill=PALE, round_=4)
        c.text(end + 114, bottom - 9, "step", size=11.5)
        high = _peak(parts)
        y = bottom - tall * high
        c.line(40, y, 710, y, color=GREY, dash="5 4", thick=1)
        words = f"{high:g} × activations of one microbatch"
        c.text(710, y - 5, words, size=11.5, anchor="end")
    words = "time →   (a backward takes twice as long as its forward)"
    c.text(40, 322, words, size=11.5, color=GREY, anchor="start")
    return c.svg()


def recompute() -> str:
    """The blocks with what is kept, above the live memory without and with it."""
    plain = [*_part(FORWARD, 1 + INSIDE)] * BLOCKS + [*_part(BACKWARD, -1 - INSIDE)] * (
        BLOCKS
    )
    # The input of a block is kept from its forward to the end of its backward.
    again = [Part(FORWARD, 1.0)] * BLOCKS
    for _ in range(BLOCKS):
        again += [*_there_and_back(1.0, INSIDE)]
        again += [Part(0.0, -1.0)]
    c = Canvas(
        "recompute",
        760,
        430,
        title="Activation checkpointing: inputs are kept, the inside is recomputed",
        desc=(
            f"At the top a chain of {BLOCKS} blocks. A filled circle before each block "
            f"is its input: {BLOCKS} inputs are kept. {INSIDE} open circles in each "
            "block are activations that are recomputed. Below, live activations over "
            f"work time, where a block's forward takes {FORWARD:g} unit and its "
            f"backward {BACKWARD:g}. Without checkpointing one hill that peaks at "
            f"{_peak(plain):.0f} activations and takes {_time(plain):.0f} units. With "
            f"checkpointing a low staircase during the {BLOCKS} forwards, then a tooth "
            "for each block: its forward runs again, then its backward. The peak is "
            f"{_peak(again):.0f} activations and the time {_time(again):.0f} units."
        ),
    )
    for block in range(BLOCKS):
        x = 60 + 128 * block
        c.arrow(x - 30, 60, x + 14, 60, color=INK)
        c.rect(x + 16, 36, 86, 48, round_=6, fill=PALE)
        c.circle(x - 8, 60, 7, fill=BLUE)
        for number in range(INSIDE):
            c.circle(x + 29 + 15 * number, 60, 5, fill="#FFFFFF", stroke=GREY)
    words = "● input of a block: kept      ○ activation inside: recomputed"
    c.text(40, 112, words, size=12.5, anchor="start")
    c.text(742, 419, "time →", size=11.5, color=GREY, anchor="end")
    wide, tall = 27.0, 4.2  # pixels for a unit of time, and for an activation
    for bottom, parts, color, words in (
        (270, plain, ORANGE, "block(x)"),
        (404, again, SKY, "checkpoint(block, x)"),
    ):
        _hills(c, 40, bottom, wide, tall, parts, color)
        c.text(742, bottom - 96, words, size=13, bold=True, anchor="end", mono=True)
        figures = (
            f"peak {_peak(parts):.0f} activations, {_time(parts):.0f} units of time"
        )
        c.text(742, bottom - 78, figures, size=12, anchor="end")
        middle = 40 + wide * FORWARD * BLOCKS
        c.line(middle, bottom - 30, middle, bottom + 18, color=GREY, dash="3 3")
        c.text(middle - 6, bottom + 15, "forward", size=11.5, anchor="end")
        after = "backward" if parts is plain else "each block: forward again, backward"
        c.text(middle + 8, bottom + 15, after, size=11.5, anchor="start")
    return c.svg()


def _part(time: float, change: float) -> list[Part]:
    """A forward or backward: the memory changes in equal steps."""
    return [Part(time / INSIDE, change / INSIDE)] * INSIDE


def _there_and_back(work: float, kept: float) -> list[Part]:
    """A forward that keeps activations, and the backward that frees them."""
    return [*_part(FORWARD * work, kept), *_part(BACKWARD * work, -kept)]


def _live(parts: Sequence[Part]) -> list[float]:
    return list(accumulate(part.change for part in parts))


def _peak(parts: Sequence[Part]) -> float:
    return round(max(_live(parts)), 6)


def _time(parts: Sequence[Part]) -> float:
    return sum(part.time for part in parts)


def _hills(
    c: Canvas,
    left: float,
    bottom: float,
    wide: float,
    tall: float,
    parts: Sequence[Part],
    color: str,
) -> None:
    """Live memory as bars, `wide` pixels for a unit of time; freed at a part's end."""
    x, before = left, 0.0
    for part, live in zip(parts, _live(parts), strict=True):
        height = tall * max(before, live)
        if part.time and height > 1e-6:
            width = wide * part.time
            c.rect(x, bottom - height, width, height, fill=color, thick=0.5)
        x, before = x + wide * part.time, live
    c.line(left, bottom, x, bottom, color=INK)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"microbatches.svg": microbatches(), "recompute.svg": recompute()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
