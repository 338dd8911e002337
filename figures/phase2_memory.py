"""What is kept, and what is sent; `python -m figures.phase2_memory` writes both.

The heights are worked out here, step by step, from what each step keeps and sets free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

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
LAYERS = 5  # activations of one microbatch, or inside one block
BLOCKS = 5
SIZES = (1.0, 1.0, 0.4)  # microbatches: the last one is short


def microbatches() -> str:
    """Live activations of three microbatches, the two ways; one message at the end."""
    c = Canvas(
        "microbatches",
        760,
        400,
        title="Gradient accumulation: one microbatch at a time, one message",
        desc=(
            "Two curves of memory over time. Above, three microbatches one after "
            "another: the activations rise during each forward and fall to nothing "
            "during its backward, three hills, the last one lower; after the last hill "
            "one arrow for the message. Below, all three forwards first: the curve "
            "rises two and a half times as high before it falls, with the same message."
        ),
    )
    one_by_one: list[float] = []
    for size in SIZES:
        one_by_one += [size] * LAYERS + [-size] * LAYERS
    ups = [size for size in SIZES for _ in range(LAYERS)]
    together = ups + [-size for size in reversed(ups)]
    rows = (
        (160, one_by_one, SKY, "forward, backward, forward, backward, …"),
        (350, together, ORANGE, "all forwards, then all backwards: the same gradient"),
    )
    for bottom, steps, color, words in rows:
        _hills(c, 40, bottom, 18.0, 9.0, steps, color)
        c.text(40, bottom - 128, words, size=13, bold=True, anchor="start")
        end = 40 + 18.0 * len(steps)
        c.rect(end + 10, bottom - 26, 64, 26, fill=GREEN, round_=4)
        c.text(end + 42, bottom - 9, "message", size=11.5, color="#FFFFFF")
        c.rect(end + 84, bottom - 26, 44, 26, fill=PALE, round_=4)
        c.text(end + 106, bottom - 9, "step", size=11.5)
    peak = 350 - 9.0 * max(accumulate(together))
    c.line(40, peak, 700, peak, color=GREY, dash="5 4", thick=1)
    c.text(700, peak - 5, f"{sum(SIZES):.1f} × one microbatch", size=11.5, anchor="end")
    peak = 160 - 9.0 * max(accumulate(one_by_one))
    c.line(40, peak, 700, peak, color=GREY, dash="5 4", thick=1)
    c.text(700, peak - 5, "1 × one microbatch", size=11.5, anchor="end")
    c.text(40, 386, "time →", size=11.5, color=GREY, anchor="start")
    return c.svg()


def recompute() -> str:
    """The graph with what is kept, above the live memory of both ways."""
    c = Canvas(
        "recompute",
        760,
        430,
        title="Activation checkpointing: inputs are kept, the inside comes again",
        desc=(
            f"At the top a chain of {BLOCKS} blocks. A filled circle before each block "
            "is its input, which is kept; the open circles inside are activations, "
            "which are computed again. Below, live memory over time without and with "
            "checkpoint. Without, one tall hill. With it, a low staircase in forward, "
            "and in backward a saw: for each block a tooth as high as its inside, on a "
            "staircase that goes down."
        ),
    )
    for block in range(BLOCKS):
        x = 60 + 128 * block
        c.arrow(x - 30, 60, x + 14, 60, color=INK)
        c.rect(x + 16, 36, 86, 48, round_=6, fill=PALE)
        c.circle(x - 8, 60, 7, fill=BLUE)
        for place in range(3):
            c.circle(x + 36 + 23 * place, 60, 6, fill="#FFFFFF", stroke=GREY)
    c.text(40, 112, "● kept      ○ computed again", size=12.5, anchor="start")
    inside = [1.0] * LAYERS
    plain = [1.0, *inside] * BLOCKS
    plain += [-1.0 for _ in plain]
    again = [1.0] * BLOCKS
    for _ in range(BLOCKS):
        again += [*inside, *[-1.0] * LAYERS, -1.0]
    for bottom, steps, color, words in (
        (270, plain, ORANGE, "block(x)"),
        (404, again, SKY, "checkpoint(block, x)"),
    ):
        _hills(c, 40, bottom, 10.5, 4.2, steps, color)
        top = max(accumulate(steps))
        c.text(742, bottom - 96, words, size=13, bold=True, anchor="end", mono=True)
        c.text(742, bottom - 78, f"peak {top:.0f}", size=12, anchor="end")
    middle = 40 + 10.5 * BLOCKS
    c.text(middle - 4, 422, "forward", size=11.5, color=GREY, anchor="end")
    c.text(middle + 8, 422, "backward, each block once more", size=11.5, anchor="start")
    c.line(middle, 360, middle, 424, color=GREY, dash="3 3", thick=1)
    return c.svg()


def _hills(
    c: Canvas,
    left: float,
    bottom: float,
    width: float,
    height: float,
    steps: Sequence[float],
    color: str,
) -> None:
    """Live memory after each step, as bars; `height` pixels for one activation."""
    for place, live in enumerate(accumulate(steps)):
        tall = height * live
        if live > 1e-9:
            c.rect(
                left + width * place, bottom - tall, width, tall, fill=color, thick=0.5
            )
    c.line(left, bottom, left + width * len(steps), bottom, color=INK)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"microbatches.svg": microbatches(), "recompute.svg": recompute()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
