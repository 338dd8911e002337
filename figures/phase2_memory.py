"""Activations over time; `python -m figures.phase2_memory` writes both pictures.

Heights and times are computed here: what each forward keeps and each backward frees,
and how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

from distlab.trace.palette import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    SURFACE,
    text_on,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase2_advanced" / "figures"
INSIDE = 5  # activations inside one block
BLOCKS = 5
FORWARD_TIME, BACKWARD_TIME = (
    1.0,
    2.0,
)  # units of time for a block, or a full microbatch
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
    forwards = [step for size in SIZES for step in _part(FORWARD_TIME * size, size)]
    backwards = [
        step for size in reversed(SIZES) for step in _part(BACKWARD_TIME * size, -size)
    ]
    rows = (
        (110, one_by_one, "forward, backward, forward, backward, …"),
        (290, [*forwards, *backwards], "all forwards, then all backwards"),
    )
    wide, tall = 74.0, 45.0  # pixels for a unit of time, and for a microbatch
    for bottom, parts, words in rows:
        _hills(c, 40, bottom, wide, tall, parts)
        c.text(
            40,
            bottom - tall * _peak(parts) - 16,
            words,
            size=13,
            bold=True,
            anchor="start",
        )
        end = 40 + wide * sum(part.time for part in parts)
        c.rect(end + 10, bottom - 26, 74, 26, fill=LINK_BUSY, round_=4)
        c.text(end + 47, bottom - 9, "all_reduce", size=11.5, color=text_on(LINK_BUSY))
        c.rect(end + 92, bottom - 26, 44, 26, fill=NEUTRAL, round_=4)
        c.text(end + 114, bottom - 9, "step", size=11.5)
        high = _peak(parts)
        y = bottom - tall * high
        c.line(40, y, 710, y, color=MUTED, dash="5 4", thick=1)
        words = f"{high:g} × activations of one microbatch"
        c.text(710, y - 5, words, size=11.5, anchor="end")
    _legend(c, 40, 324)
    words = "a backward takes twice as long as its forward"
    c.text(338, 324, words, size=11.5, color=MUTED, anchor="start")
    c.text(710, 324, "time →", size=11.5, color=MUTED, anchor="end")
    return c.svg()


def recompute() -> str:
    """The blocks with what is kept, above the live memory without and with it."""
    plain = _part(FORWARD_TIME, 1 + INSIDE) * BLOCKS
    plain += _part(BACKWARD_TIME, -1 - INSIDE) * BLOCKS
    # The input of a block is kept from its forward to the end of its backward.
    again = [Part(FORWARD_TIME, 1.0)] * BLOCKS
    for _ in range(BLOCKS):
        again += [*_there_and_back(1.0, INSIDE)]
        again += [Part(0.0, -1.0)]
    c = Canvas(
        "recompute",
        760,
        460,
        title="Activation checkpointing: inputs are kept, the inside is recomputed",
        desc=(
            f"At the top a chain of {BLOCKS} blocks. A filled circle before each block "
            f"is its input: {BLOCKS} inputs are kept. {INSIDE} open circles in each "
            "block are activations that are recomputed. Below, live activations over "
            f"work time, where a block's forward takes {FORWARD_TIME:g} unit and its "
            f"backward {BACKWARD_TIME:g}. Without checkpointing one hill that peaks at "
            f"{_peak(plain):.0f} activations and takes {_time(plain):.0f} units. With "
            f"checkpointing a low staircase during the {BLOCKS} forwards, then a tooth "
            "for each block: its forward runs again, then its backward. The peak is "
            f"{_peak(again):.0f} activations and the time {_time(again):.0f} units."
        ),
    )
    for block in range(BLOCKS):
        x = 60 + 128 * block
        c.arrow(x - 30, 60, x + 14, 60, color=INK)
        c.rect(x + 16, 36, 86, 48, round_=6, fill=NEUTRAL)
        c.circle(x - 8, 60, 7, fill=ACTIVATIONS)
        for number in range(INSIDE):
            c.circle(x + 29 + 15 * number, 60, 5, fill=SURFACE, stroke=MUTED)
    for x, radius, fill, words in (
        (46, 7, ACTIVATIONS, "input of a block: kept"),
        (246, 5, SURFACE, "activation inside a block: recomputed"),
    ):
        c.circle(x, 108, radius, fill=fill, stroke=MUTED if radius == 5 else INK)
        c.text(x + 14, 112, words, size=12, anchor="start")
    _legend(c, 40, 446)
    c.text(742, 446, "time →", size=11.5, color=MUTED, anchor="end")
    wide, tall = 27.0, 4.2  # pixels for a unit of time, and for an activation
    for bottom, parts, words in (
        (270, plain, "block(x)"),
        (404, again, "checkpoint(block, x)"),
    ):
        _hills(c, 40, bottom, wide, tall, parts)
        c.text(742, bottom - 96, words, size=13, bold=True, anchor="end", mono=True)
        figures = (
            f"peak {_peak(parts):.0f} activations, {_time(parts):.0f} units of time"
        )
        c.text(742, bottom - 78, figures, size=12, anchor="end")
        middle = 40 + wide * FORWARD_TIME * BLOCKS
        c.line(middle, bottom - 30, middle, bottom + 22, color=MUTED, dash="3 3")
        c.text(middle - 6, bottom + 20, "forward", size=11.5, anchor="end")
        after = "backward" if parts is plain else "each block: forward again, backward"
        c.text(middle + 8, bottom + 20, after, size=11.5, anchor="start")
    return c.svg()


def _legend(c: Canvas, x: float, y: float) -> None:
    """The meaning of the colors; memory above the time axis, work below it."""
    for color, words, wide in (
        (ACTIVATIONS, "live activations", 130),
        (FORWARD, "forward", 80),
        (BACKWARD, "backward", 80),
    ):
        c.rect(x, y - 10, 12, 12, fill=color, thick=0.5)
        c.text(x + 17, y, words, size=11.5, anchor="start")
        x += wide


def _part(time: float, change: float) -> list[Part]:
    """A forward or backward: the memory changes in equal steps."""
    return [Part(time / INSIDE, change / INSIDE)] * INSIDE


def _there_and_back(work: float, kept: float) -> list[Part]:
    """A forward that keeps activations, and the backward that frees them."""
    return [*_part(FORWARD_TIME * work, kept), *_part(BACKWARD_TIME * work, -kept)]


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
) -> None:
    """Live memory as bars, `wide` pixels for a unit of time; freed at a part's end."""
    x, before = left, 0.0
    for part, live in zip(parts, _live(parts), strict=True):
        height = tall * max(before, live)
        if part.time and height > 1e-6:
            width = wide * part.time
            c.rect(x, bottom - height, width, height, fill=ACTIVATIONS, thick=0.5)
        x, before = x + wide * part.time, live
    x = left
    for grows, same in groupby(parts, key=lambda part: part.change > 0):
        width = wide * _time(list(same))
        color = FORWARD if grows else BACKWARD
        c.rect(x, bottom, width, 6, fill=color, stroke="none")
        x += width
    c.line(left, bottom, x, bottom, color=INK)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"microbatches.svg": microbatches(), "recompute.svg": recompute()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
