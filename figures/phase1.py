"""The pictures of phase 1; `python -m figures.phase1` writes them beside its text."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    COMPLETE,
    COMPLETE_TEXT,
    FAILURE,
    FAILURE_TEXT,
    GRADIENTS,
    GRID,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
    WEIGHTS,
    text_on,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase1_data_parallel" / "figures"


def lanes() -> str:
    """One program, four processes, walls between their memories."""
    c = Canvas(
        "lanes",
        760,
        430,
        title="One program, four processes, four separate memories",
        desc=(
            "One file, train.py, is started four times. Each of the four processes "
            "has its own rank, from 0 to 3, and its own variable x with its own "
            "value. The four memories are separate. A "
            "message from rank 0 to rank 1 is the only way to copy data between "
            "them."
        ),
    )
    c.rect(290, 18, 180, 50, fill=SURFACE, thick=2, round_=6)
    c.text(380, 40, "train.py", size=16, bold=True, mono=True)
    c.text(380, 58, "one file, started four times", size=11)
    for rank, color in enumerate(RANK_COLORS[:4]):
        x = 30 + 180 * rank
        c.arrow(320 + 40 * rank, 69, x + 80, 108, color=MUTED, thick=1.5)
        c.rect(x, 110, 160, 230, fill=SURFACE, thick=1.5, round_=6)
        c.rect(x, 110, 160, 40, fill=color, thick=1.5, round_=6)
        c.text(x + 80, 136, f"process {rank}", size=15, bold=True)
        c.text(x + 80, 178, f"rank = {rank}", size=14, mono=True, bold=True)
        c.text(x + 80, 202, "world_size = 4", size=13, mono=True)
        c.text(x + 80, 240, "its own memory:", size=11.5, color=MUTED)
        c.rect(x + 45, 252, 70, 34, fill=NEUTRAL, round_=4)
        c.text(x + 80, 274, f"x = {(5, 8, 1, 3)[rank]}", size=14, mono=True)
    for rank in range(3):
        c.hatch(30 + 180 * rank + 165, 104, 10, 196, color=INK)
    c.rect(82, 306, 56, 26, fill=SURFACE, thick=1.5)
    c.line(82, 306, 110, 321)
    c.line(138, 306, 110, 321)
    c.arrow(142, 319, 252, 319, color=LINK_BUSY, thick=3)
    c.rect(256, 306, 68, 26, fill=SURFACE, dash="4 3")
    c.text(290, 324, "a copy", size=11.5)
    c.text(110, 366, "send", size=13, bold=True)
    c.text(290, 366, "recv", size=13, bold=True)
    c.text(200, 388, "only a message copies data", size=12.5)
    c.hatch(452, 360, 10, 30, color=INK)
    c.text(474, 372, "separate memories: no process", size=12, anchor="start")
    c.text(474, 388, "reads or writes another's x", size=12, anchor="start")
    c.text(380, 416, "no rank is special: all four run the same lines", size=12.5)
    return c.svg()


def _handshake(c: Canvas) -> None:
    c.text(124, 34, "1  send meets recv", size=15, bold=True)
    for rank, x in enumerate((62, 158)):
        c.text(x, 66, f"rank {rank}", bold=True)
        c.line(x, 76, x, 300, color=MUTED)
    c.hatch(54, 110, 16, 102)
    c.text(76, 104, "send(t, 1)", size=11, mono=True, anchor="start")
    c.text(76, 160, "blocked", size=11.5, anchor="start")
    c.rect(150, 198, 16, 16, fill=COMPLETE)
    c.text(168, 190, "recv(t, 0)", size=11, mono=True, anchor="start")
    c.arrow(70, 206, 149, 206, color=LINK_BUSY, thick=3)
    c.line(62, 243, 158, 243, color=COMPLETE, thick=2)
    c.text(172, 240, "both", size=11.5, anchor="start")
    c.text(172, 255, "return  ✓", size=11.5, anchor="start")
    c.text(24, 122, "time", size=11, color=MUTED)
    c.arrow(24, 132, 24, 280, color=MUTED, thick=1.5)
    c.text(124, 330, "send returns only when", size=12)
    c.text(124, 347, "the other rank receives", size=12)


def _triangle(x: float) -> list[tuple[float, float]]:
    return [(x, 110), (x + 70, 236), (x - 70, 236)]


def _edges(
    c: Canvas, corners: list[tuple[float, float]], color: str, dash: str
) -> None:
    """Draw the arrows 0→1, 1→2, 2→0 between circles of radius 26."""
    for rank in range(3):
        (x1, y1), (x2, y2) = corners[rank], corners[(rank + 1) % 3]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length * 31, (y2 - y1) / length * 31
        c.arrow(x1 + dx, y1 + dy, x2 - dx, y2 - dy, color=color, thick=3, dash=dash)


def _cycle(c: Canvas) -> None:
    c.text(380, 34, "2  every rank sends first", size=15, bold=True)
    corners = _triangle(380)
    _edges(c, corners, FAILURE, "7 4")
    for rank, (x, y) in enumerate(corners):
        c.circle(x, y, 26, fill=SURFACE, stroke=FAILURE)
        c.text(x, y - 2, f"rank {rank}", size=11, bold=True)
        c.text(x, y + 13, "blocked", size=11)
    c.text(380, 190, "✗", size=30, color=FAILURE_TEXT, bold=True)
    c.text(380, 288, "send(right); recv(left)", size=11.5, mono=True)
    c.text(380, 330, "all three are blocked in send,", size=12)
    c.text(380, 347, "no rank is in recv: a deadlock", size=12)


def _cured(c: Canvas) -> None:
    c.text(640, 34, "3  send and recv at once", size=15, bold=True)
    corners = _triangle(640)
    _edges(c, corners, LINK_BUSY, "")
    for rank, (x, y) in enumerate(corners):
        c.circle(x, y, 26, fill=SURFACE, stroke=COMPLETE)
        c.text(x, y - 2, f"rank {rank}", size=11, bold=True)
        c.text(x, y + 13, "both", size=11)
    c.text(640, 190, "✓", size=30, color=COMPLETE_TEXT, bold=True)
    c.text(640, 288, "sendrecv(…)", size=11.5, mono=True)
    c.text(640, 330, "every rank sends and receives", size=12)
    c.text(640, 347, "in one call: no deadlock", size=12)


def handshake() -> str:
    """A send meets its recv; a ring of sends; the same ring with sendrecv."""
    c = Canvas(
        "handshake",
        770,
        370,
        title="A matched send, a ring of sends that deadlocks, and sendrecv",
        desc=(
            "Left: rank 0 calls send and blocks until rank 1 calls recv; then both "
            "return. Middle, dashed and marked with a cross: ranks 0, 1 and 2 each "
            "send to the next rank; all three block. Right, solid and marked with a "
            "tick: each rank sends and receives in one call, and "
            "all ranks return."
        ),
    )
    _handshake(c)
    c.line(250, 20, 250, 350, color=GRID)
    _cycle(c)
    c.line(510, 20, 510, 350, color=GRID)
    _cured(c)
    return c.svg()


def _squares(c: Canvas, x: float, y: float, cells: list[tuple[str, str]]) -> None:
    """Draw one square per rank; a heavy border marks a value that changed."""
    for rank, (label, fill) in enumerate(cells):
        changed = label.endswith("*")
        c.rect(x + 56 * rank, y, 46, 46, fill=fill, thick=3 if changed else 1)
        c.text(x + 56 * rank + 23, y + 29, label.rstrip("*"), size=17, bold=True)


def family() -> str:
    """Broadcast, reduce and all-reduce, before and after."""
    c = Canvas(
        "family",
        760,
        356,
        title="Broadcast, reduce and all-reduce, before and after, on four ranks",
        desc=(
            "Ranks 0 to 3 begin with 1, 2, 3 and 4. Broadcast from rank 2 leaves 3, "
            "3, 3, 3. Reduce to rank 0 leaves 10 on rank 0 and the others unchanged. "
            "All-reduce leaves 10 on every rank. A heavy border marks a changed "
            "value."
        ),
    )
    start = [(str(k + 1), RANK_COLORS[k]) for k in range(4)]
    total = ("10*", COMPLETE)
    copy = ("3*", RANK_COLORS[2])
    rows = [
        ("broadcast", "from rank 2", [copy, copy, start[2], copy]),
        ("reduce", "sum at rank 0", [total, *start[1:]]),
        ("all-reduce", "sum on all ranks", [total] * 4),
    ]
    c.text(278, 34, "before", size=14, bold=True)
    c.text(618, 34, "after", size=14, bold=True)
    for rank in range(4):
        for x in (173, 513):
            c.text(x + 56 * rank + 20, 60, f"rank {rank}", size=11, color=MUTED)
    for row, (name, what, after) in enumerate(rows):
        y = 72 + 84 * row
        c.text(24, y + 20, name, size=15, bold=True, anchor="start")
        c.text(24, y + 39, what, size=11.5, anchor="start")
        _squares(c, 170, y, start)
        c.arrow(408, y + 23, 488, y + 23)
        _squares(c, 510, y, after)
    c.rect(170, 319, 18, 18, fill=SURFACE, thick=3)
    c.text(198, 333, "heavy border: changed by the call", size=12, anchor="start")
    c.text(736, 333, "1 + 2 + 3 + 4 = 10", size=12, anchor="end")
    return c.svg()


def _digest(c: Canvas, x: float, y: float, text: str, fill: str) -> None:
    c.rect(x - 34, y - 15, 68, 30, fill=fill, round_=4)
    c.text(x, y + 5, text, size=14, mono=True, bold=True, color=text_on(fill))


def step() -> str:
    """One training step of four ranks, with digests."""
    c = Canvas(
        "step",
        800,
        400,
        title="One training step on four ranks, with a digest at each stage",
        desc=(
            "Four rows, one per rank. All four ranks start with weights of digest "
            "7f3a. Each rank has different samples and so a different gradient: "
            "91c0, e2d4, 08bb, 5d17. A frame across all rows averages the gradients; "
            "after it every rank has gradient b6e2. Each rank takes its own optimizer "
            "step, and all four end with weights of digest c41d."
        ),
    )
    heads = [
        (112, "weights", "same start"),
        (238, "samples", "different"),
        (372, "own gradient", "different"),
        (598, "gradient", "same"),
        (732, "weights", "same end"),
    ]
    for x, top, below in heads:
        c.text(x, 36, top, size=13, bold=True)
        c.text(x, 54, below, size=12)
    for rank, color in enumerate(RANK_COLORS[:4]):
        y = 100 + 66 * rank
        c.rect(14, y - 27, 772, 54, fill=SURFACE, stroke=GRID, round_=4)
        c.rect(18, y - 14, 50, 28, fill=color, round_=4)
        c.text(43, y + 5, f"rank {rank}", size=12, bold=True)
        _digest(c, 112, y, "7f3a", WEIGHTS)
        c.arrow(148, y, 196, y)
        c.text(238, y + 5, f"{rank}, {rank + 4}, …", size=13, mono=True)
        c.arrow(282, y, 334, y)
        _digest(c, 372, y, ("91c0", "e2d4", "08bb", "5d17")[rank], color)
        c.arrow(408, y, 448, y)
        c.arrow(524, y, 562, y)
        _digest(c, 598, y, "b6e2", GRADIENTS)
        c.arrow(634, y, 694, y)
        _digest(c, 732, y, "c41d", WEIGHTS)
    c.text(664, 68, "optimizer step", size=11)
    c.text(302, 68, "backward", size=11)
    c.rect(450, 73, 72, 252, fill=SURFACE, stroke=LINK_BUSY, thick=3, round_=6)
    for line, words in enumerate(("average", "over", "all", "ranks")):
        c.text(486, 176 + 20 * line, words, size=12, bold=True)
    c.text(
        24,
        352,
        "the average is the only communication of the step;",
        anchor="start",
    )
    c.text(
        24,
        374,
        "equal weights and equal gradients give equal weights",
        anchor="start",
    )
    c.text(24, 391, "(digests are illustrative)", size=11, color=MUTED, anchor="start")
    return c.svg()


def mean() -> str:
    """Gradients 2 and 6 on a number line: sum, mean, and each alone."""
    c = Canvas(
        "mean",
        760,
        250,
        title="Two gradients, 2 and 6, on a number line: their mean and their sum",
        desc=(
            "A number line from 0 to 9. Rank 0's gradient is 2, a circle; rank 1's is "
            "6, a circle. Their mean 4, a filled diamond, is the gradient of "
            "a single process on the full batch. Their sum 8, a square with a cross, "
            "is twice as far."
        ),
    )

    def at(value: float) -> float:
        return 60 + 72 * value

    c.arrow(40, 150, 736, 150, color=INK)
    for value in range(10):
        c.line(at(value), 144, at(value), 156)
        c.text(at(value), 174, str(value), size=12, color=MUTED)
    for rank, value in enumerate((2, 6)):
        c.circle(at(value), 150, 10, fill=RANK_COLORS[rank])
        c.text(at(value), 206, f"rank {rank} alone: {value}", size=13, bold=True)
        c.text(at(value), 224, "half of the data", size=11.5)
    x = at(4)
    c.polygon(
        [(x, 136), (x + 14, 150), (x, 164), (x - 14, 150)], fill=COMPLETE, stroke=INK
    )
    c.line(x, 132, x, 106, color=COMPLETE, thick=2)
    c.text(x, 78, "mean: (2 + 6) / 2 = 4  ✓", size=14, bold=True)
    c.text(x, 97, "single process, full batch", size=11.5)
    x = at(8)
    c.rect(x - 11, 139, 22, 22, fill=SURFACE, stroke=FAILURE, thick=2)
    c.line(x - 11, 139, x + 11, 161, color=FAILURE, thick=2)
    c.line(x - 11, 161, x + 11, 139, color=FAILURE, thick=2)
    c.line(x, 135, x, 106, color=FAILURE, thick=2, dash="5 3")
    c.text(x, 78, "sum: 2 + 6 = 8  ✗", size=14, bold=True)
    c.text(x, 97, "not divided: 2 × too large", size=11.5)
    c.text(380, 36, "one step, four candidates for the gradient", size=15, bold=True)
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {
        "lanes.svg": lanes(),
        "handshake.svg": handshake(),
        "family.svg": family(),
        "step.svg": step(),
        "mean.svg": mean(),
    }


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
