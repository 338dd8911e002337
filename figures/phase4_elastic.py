"""An epoch on 4, 2 and 3 ranks, a round, a divided job.

`python -m figures.phase4_elastic` writes all three.
"""

from __future__ import annotations

from pathlib import Path

from distlab.given.elastic import GLOBAL_BATCH_SIZE, STAGES
from distlab.trace.palette import (
    ACTIVATIONS,
    BACKWARD,
    COMPLETE,
    COMPLETE_TEXT,
    FAILURE,
    FAILURE_TEXT,
    FORWARD,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    OPTIMIZER_STATE,
    SURFACE,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
RANKS = (FORWARD, BACKWARD, ACTIVATIONS, OPTIMIZER_STATE)
CELL, GAP, LEFT, TOP = 26, 12, 28, 66
BETWEEN = ("two processes end", "one process joins")


def epoch() -> str:
    """One row of samples; a cell has the number of the rank that reads it."""
    c = Canvas(
        "elastic_epoch",
        760,
        168,
        title="One epoch on four, then two, then three ranks",
        desc=(
            "24 samples in the order of the shuffle, in six steps of four. A number in "
            "each sample is the rank that reads it. In steps 0 and 1 there are four "
            "ranks with one sample each. In steps 2 and 3 two ranks have two each. In "
            "steps 4 and 5 there are three ranks: rank 0 has two samples, ranks 1 and "
            "2 have one each. Every step has four samples; each is read once."
        ),
    )
    step, x = 0, float(LEFT)
    for place, (world_size, num_steps) in enumerate(STAGES):
        first = x
        for _ in range(num_steps):
            middle = x + CELL * GLOBAL_BATCH_SIZE / 2
            c.text(middle, TOP - 10, f"step {step}", size=11.5, color=MUTED)
            for number in range(GLOBAL_BATCH_SIZE):
                rank = number % world_size
                c.rect(x, TOP, CELL - 1, 34, fill=RANKS[rank])
                c.text(x + CELL / 2, TOP + 22, str(rank), size=13, color=INK)
                x += CELL
            x += GAP
            step += 1
        last = x - GAP
        generation = f"generation {place + 1}: {world_size} ranks"
        c.line(first, TOP + 46, last, TOP + 46, color=INK, thick=1.5)
        c.text((first + last) / 2, TOP + 66, generation, size=12.5)
        if place < len(BETWEEN):
            edge = x - GAP / 2
            c.line(edge, 34, edge, TOP + 46, color=LINK_BUSY, thick=1.5, dash="4 3")
            c.text(edge, 24, BETWEEN[place], size=12, color=FAILURE_TEXT)
    words = "A number is a rank. Each step has the next four samples of the shuffle."
    c.text(LEFT, TOP + 90, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def round_states() -> str:
    """Four states, and the events that lead from one to another."""
    c = Canvas(
        "round",
        760,
        392,
        title="A round as a state machine",
        desc=(
            "Four states. In training, the Join of a member of this generation, that "
            "of a new member while there is room, or the loss of a member begins a "
            "round. A round is in one of two states. A Form is impossible while fewer "
            "than min_members or no majority have joined; after timeout_s in this "
            "state the answer is Stop. It is possible as soon as both hold. Then it "
            "comes at once if max_members have joined and none is unheard, and "
            "otherwise after grace_s. Form leads back to training, with the next "
            "generation. A loss can make a possible Form impossible again."
        ),
    )
    boxes = (
        (34, 150, 160, "training", "generation g", FORWARD),
        (300, 66, 184, "round: not possible", "too few, or no majority", SURFACE),
        (300, 254, 184, "round: possible", "min_members, majority", SURFACE),
        (628, 66, 100, "stopped", "", NEUTRAL),
    )
    for x, y, wide, name, below, fill in boxes:
        c.rect(x, y, wide, 62, fill=fill, thick=2, round_=14)
        c.text(x + wide / 2, y + (27 if below else 36), name, size=13, bold=True)
        if below:
            ink = MUTED if fill == SURFACE else INK
            c.text(x + wide / 2, y + 45, below, size=11.5, color=ink)
    c.arrow(130, 148, 296, 98, color=INK)
    for row, words in enumerate(("Lost(member)", "Join(member)", "Join(new), if room")):
        c.text(34, 62 + 17 * row, words, size=11.5, anchor="start")
    c.text(34, 40, "a round begins:", size=11.5, color=MUTED, anchor="start")
    c.arrow(392, 42, 392, 64, color=MUTED, thick=1.5)
    c.text(392, 34, "the first round", size=11.5, color=MUTED)
    c.arrow(486, 97, 624, 97, color=FAILURE)
    c.text(555, 87, "timeout_s is over", size=11.5, color=FAILURE_TEXT)
    c.text(555, 118, "Stop", size=12.5, bold=True, color=FAILURE_TEXT)
    c.arrow(350, 130, 350, 251, color=INK)
    c.text(342, 186, "a Join: enough", size=11.5, anchor="end")
    c.text(342, 202, "have joined", size=11.5, anchor="end")
    c.arrow(434, 252, 434, 131, color=INK)
    c.text(444, 186, "Lost(member): too few,", size=11.5, anchor="start")
    c.text(444, 202, "or no majority any more", size=11.5, anchor="start")
    c.arrow(298, 285, 114, 216, color=COMPLETE, thick=2.5)
    c.text(34, 266, "Form(g + 1)", size=12.5, bold=True, color=COMPLETE_TEXT,
           anchor="start")  # fmt: skip
    lines = (
        "at once: max_members have joined,",
        "and no member is unheard;",
        "otherwise when grace_s is over",
    )
    for row, words in enumerate(lines):
        c.text(34, 286 + 17 * row, words, size=11.5, anchor="start")
    for row, words in enumerate(
        (
            "Each of the two waits begins when its state does.",
            "A refused Join, or a copy of an older one, changes nothing in any state.",
        )
    ):
        c.text(34, 356 + 18 * row, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def divided() -> str:
    """A broken link through five members, and through four."""
    c = Canvas(
        "divided",
        760,
        300,
        title="A divided job: at most one side has a majority",
        desc=(
            "Two jobs, each with a broken link through the middle. On the left, five "
            "members: ranks 0, 1 and 2 on one side, 3 and 4 on the other. The side of "
            "three has a majority and forms generation 2; the side of two stops after "
            "timeout_s. On the right, four members, two on each side: the side with "
            "rank 0, the lowest one, continues, and the other stops."
        ),
    )
    for left, members, cut, why in (
        (30, 5, 3, "3 of 5: a majority"),
        (410, 4, 2, "2 of 4, with rank 0"),
    ):
        wide = 62.0
        split = left + 8 + wide * cut + 12
        c.text(left + 8, 34, f"{members} members, one link broken", size=13, bold=True,
               anchor="start")  # fmt: skip
        for rank in range(members):
            x = left + 8 + wide * rank + (24 if rank >= cut else 0) + 26
            c.circle(x, 96, 22, fill=FORWARD if rank < cut else NEUTRAL)
            c.text(x, 101, str(rank), size=14, bold=True)
            if rank not in (0, cut):
                c.line(x - wide + 23, 96, x - 23, 96, thick=2)
        c.line(split, 50, split, 142, color=FAILURE, thick=3, dash="6 4")
        for at, end, color, words in (
            (left + 8, split - 14, COMPLETE, ("Form(2)", why, "continues, one model")),
            (split + 14, left + 8 + wide * members + 24, FAILURE,
             ("no Form", f"{members - cut} of {members}", "Stop after timeout_s")),
        ):  # fmt: skip
            c.line(at, 156, end, 156, color=color, thick=3)
            ink = COMPLETE_TEXT if color == COMPLETE else FAILURE_TEXT
            middle = (at + end) / 2
            c.text(middle, 178, words[0], size=12.5, bold=True, color=ink)
            c.text(middle, 198, words[1], size=11.5)
            c.text(middle, 216, words[2], size=11.5)
    c.line(392, 24, 392, 232, color=MUTED, thick=1)
    for row, words in enumerate(
        (
            "A number is a rank of generation 1. Both sides know that generation, so",
            "both decide the same way without a message.",
        )
    ):
        c.text(38, 260 + 18 * row, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {
        "divided.svg": divided(),
        "elastic_epoch.svg": epoch(),
        "round.svg": round_states(),
    }


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
