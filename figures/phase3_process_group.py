"""A rendezvous in two generations; `python -m figures.phase3_process_group` draws it.

The replies are those of the reference's Rendezvous to these messages.
"""

from __future__ import annotations

import json
from pathlib import Path

from distlab.comm.services import Pending, Request
from distlab.curriculum import load
from distlab.trace.palette import (
    COMPLETE_TEXT,
    FAILURE,
    FAILURE_TEXT,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    PAPER,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
LINES = {"launcher": 80, "x": 230, "y": 350, "z": 470, "rendezvous": 640}
MESSAGES = (
    (104, "x", 1, {"op": "join", "key": "x"}),
    (136, "y", 1, {"op": "join", "key": "y"}),
    (288, "x", 2, {"op": "join", "key": "x"}),
    (320, "z", 2, {"op": "join", "key": "z"}),
    (384, "y", 1, {"op": "set", "key": "address", "value": "y"}),
)
"""Height, process, generation and message."""


def replies() -> list[list[tuple[str, str]]]:
    """After each message: which process got which reply, in words."""
    pending = Pending(load("process_group", "reference").Rendezvous(2).handle)
    found = []
    for number, (_, _, generation, step) in enumerate(MESSAGES):
        message = json.dumps(step | {"generation": generation}).encode()
        answers = pending.take(Request(peer=-1, number=number, message=message), 0.0)
        found.append(
            [(MESSAGES[a.request.number][1], _words(a.reply)) for a in answers]
        )
    return found


def _words(reply: bytes) -> str:
    read = json.loads(reply)
    return "refused" if "refused" in read else f"rank {read['reply']}"


def rendezvous() -> str:
    """Two generations of two ranks, and a message of the first in the second."""
    c = Canvas(
        "rendezvous",
        760,
        450,
        title="A rendezvous in two generations",
        desc=(
            "Lifelines of a launcher, processes x, y and z, and the rendezvous. "
            "Generation 1: x joins and gets no reply yet; y joins, and both get their "
            "ranks. Then the node of y is cut off. The launcher starts x and z in "
            "generation 2; both join and get ranks 0 and 1. At last the old y sends a "
            "set of generation 1, and it is refused."
        ),
    )
    for name, x in LINES.items():
        c.rect(x - 48, 22, 96, 26, fill=NEUTRAL, stroke="none", round_=3)
        label = name if len(name) > 1 else f"process {name}"
        c.text(x, 40, label, size=12.5)
        c.line(x, 48, x, 436, color=MUTED, thick=1, dash="3 4")
    _started(c, 76, ("x", "y"), 1)
    _started(c, 258, ("x", "z"), 2)
    for (top, who, generation, step), answered in zip(MESSAGES, replies(), strict=True):
        start, end = LINES[who], LINES["rendezvous"]
        is_refused = any(words == "refused" for _, words in answered)
        color = FAILURE if is_refused else LINK_BUSY
        c.arrow(start, top, end, top, color=color, thick=1.5)
        said = f"{step['op']} {step['key']}, generation {generation}"
        _said(c, (start + end) / 2, top - 5, said)
        if not answered:
            c.text(end + 8, top + 4, "not yet", size=11.5, color=MUTED, anchor="start")
        for place, (whose, words) in enumerate(sorted(answered, reverse=True)):
            y = top + 22 + 20 * place
            c.arrow(end, y, LINES[whose], y, color=color, thick=1.5, dash="5 3")
            ink = FAILURE_TEXT if is_refused else COMPLETE_TEXT
            _said(c, (end + LINES[whose]) / 2, y - 4, words, color=ink)
    y = LINES["y"]
    c.rect(y - 5, 196, 10, 174, fill=NEUTRAL, stroke=FAILURE, dash="4 3")
    c.text(y + 12, 214, "its node is cut off", size=11.5, anchor="start", color=INK)
    c.text(LINES["launcher"] + 8, 214, "a rank has failed", size=11.5, anchor="start")
    return c.svg()


def _said(c: Canvas, x: float, y: float, words: str, *, color: str = INK) -> None:
    """Write words of a message so that no lifeline runs through them."""
    wide = 6.6 * len(words) + 4
    c.rect(x - wide / 2, y - 11, wide, 13, fill=PAPER, stroke="none")
    c.text(x, y, words, size=11.5, color=color)


def _started(c: Canvas, top: float, names: tuple[str, ...], generation: int) -> None:
    """The launcher starts these processes."""
    start = LINES["launcher"]
    for name in names:
        c.arrow(start, top, LINES[name], top, thick=1.5)
    c.text(start + 75, top - 5, f"Start, generation {generation}", size=11.5)


def figures() -> dict[str, str]:
    """Each picture under its file name."""
    return {"rendezvous.svg": rendezvous()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
