"""Layers sharded over two ranks; `python -m figures.phase2_tensor` writes two pictures.

Shards, rows and numbers come from the reference's functions; the ranks run one after
another, without messages.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from distlab.curriculum import load
from distlab.models.transformer import Attention, TransformerConfig
from distlab.trace.palette import (
    GRID,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
)
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER

RANKS = 2
COLORS = RANK_COLORS[:RANKS]
HEADS = 4
FACTORS = (3.0, 4.0)  # what the two ranks' shards multiply by
INPUT = 2.0


@cache
def unit() -> ModuleType:
    """The reference's functions."""
    return load("tensor_parallel")


def passed() -> tuple[list[float], float, list[float], float]:
    """Partial sums, their sum, the gradients of both shards' inputs, and their sum.

    In one process, where autograd sees both uses of x and needs no f and no g.
    """
    x = torch.tensor(INPUT, requires_grad=True)
    copies = [x * 1 for _ in FACTORS]
    for copy in copies:
        copy.retain_grad()
    summands = [factor * copy for factor, copy in zip(FACTORS, copies, strict=True)]
    total = torch.stack(summands).sum()
    total.backward()
    assert x.grad is not None
    parts = [copy.grad.item() for copy in copies if copy.grad is not None]
    return [s.item() for s in summands], total.item(), parts, x.grad.item()


def conjugate() -> str:
    """The conjugate pair, forward and backward, with numbers."""
    summands, total, parts, gradient = passed()
    c = Canvas(
        "conjugate",
        760,
        512,
        title="f copies forward and sums backward; g sums forward, copies backward",
        desc=(
            f"Above, forward, from left to right: both ranks have x = {INPUT:g}. f "
            f"returns it unchanged. The shards compute {summands[0]:g} and "
            f"{summands[1]:g} from it. In g the lines of both ranks cross: both get "
            f"the sum, {total:g}. Below, backward, from right to left: g returns the "
            f"gradient 1 unchanged, the shards compute {parts[0]:g} and {parts[1]:g}, "
            f"and in f the lines cross: both ranks get the sum, {gradient:g}."
        ),
    )
    forward = [[INPUT] * 2, [INPUT] * 2, summands, [total] * 2]
    backward = [[gradient] * 2, parts, [1.0] * 2, [1.0] * 2]
    for top, words, numbers, crossed in (
        (54, "forward", forward, "g"),
        (298, "backward", backward, "f"),
    ):
        c.text(24, top - 28, words, size=15, bold=True, anchor="start")
        _panel(c, top, numbers, crossed, back=words == "backward")
    words = "f, g: before and after the sharded layer; × 3, × 4: the ranks' shards"
    c.text(24, 502, words, size=12, anchor="start")
    return c.svg()


def _panel(
    c: Canvas, top: float, numbers: list[list[float]], crossed: str, *, back: bool
) -> None:
    """A row per rank from x to y, with values before f, after f, before g, after g."""
    stops = (112, 296, 464, 652)
    lanes = (top + 36, top + 116)
    for rank, y in enumerate(lanes):
        c.rect(84, y - 30, 622, 60, fill=SURFACE, stroke=GRID, round_=4)
        c.text(24, y + 5, f"rank {rank}", size=12, bold=True, anchor="start")
        ends = [(stops[0] + 20, 170), (stops[1] + 18, 344), (416, stops[2] - 18)]
        ends += [(590, stops[3] - 20)]
        ends.insert(1, (234, stops[1] - 18))
        ends.insert(4, (stops[2] + 18, 526))
        for left, right in ends:
            start, end = (right, left) if back else (left, right)
            c.arrow(start, y, end, y)
        c.rect(346, y - 18, 68, 36, fill=COLORS[rank], round_=4)
        c.text(380, y + 5, f"× {FACTORS[rank]:g}", size=14, bold=True)
        for stop, values in zip(stops, numbers, strict=True):
            c.circle(stop, y, 17, fill=NEUTRAL)
            c.text(stop, y + 5, f"{values[rank]:g}", size=13, bold=True)
    for x, name in ((172, "f"), (528, "g")):
        _operator(c, x, top, lanes, name, crossed=name == crossed)
    for stop, name in ((stops[0], "x"), (stops[3], "y")):
        words = f"gradient of {name}" if back else name
        c.text(stop, top - 6, words, size=11.5, color=MUTED)


def _operator(
    c: Canvas,
    x: float,
    top: float,
    lanes: tuple[float, float],
    name: str,
    *,
    crossed: bool,
) -> None:
    """One of the pair: level lines copy, crossing lines sum."""
    color = LINK_BUSY if crossed else INK
    c.rect(x, top, 60, 152, fill=SURFACE, stroke=color, thick=2.5, round_=6)
    for start in lanes:
        c.line(x + 6, start, x + 54, start, color=color, thick=2)
        if crossed:
            c.line(x + 6, start, x + 54, sum(lanes) - start, color=color, thick=2)
    what = "sum" if crossed else "copy"
    c.text(x + 30, top - 6, name, size=16, bold=True)
    c.text(x + 30, top + 168, what, size=11.5, bold=crossed)
    c.text(x + 30, top + 182, "all_reduce" if crossed else "no message", size=11)


def owners() -> list[list[int]]:
    """For queries, keys and values: the rank that has those of head h."""
    config = TransformerConfig(dim=HEADS, num_heads=HEADS)
    found = torch.full((3 * HEADS,), -1)
    for rank in range(RANKS):
        attention = Attention(config)
        attention.qkv.weight = nn.Parameter(
            torch.arange(3.0 * HEADS)[:, None].repeat(1, HEADS)
        )
        comm = SimpleNamespace(rank=rank, world_size=RANKS)
        unit().parallel_attention(comm, attention)
        found[attention.qkv.weight[:, 0].long()] = rank
    return [list(map(int, row)) for row in found.view(3, HEADS)]


def cuts() -> str:
    """An MLP split by columns, then by rows; attention split by heads."""
    c = Canvas(
        "cuts",
        780,
        540,
        title="An MLP: column-parallel, then row-parallel; attention split by heads",
        desc=(
            "Above, the MLP: both ranks have all of x, through f. The first weight is "
            "split by columns, so rank 0 has the left half of the activations and "
            "rank 1 the right half. gelu works element by element. The second weight "
            "is split by rows: each rank multiplies its half by its rows, which gives "
            "a partial sum of the full output; g adds the partial sums. Below, "
            f"attention: of queries, keys and values, {HEADS} heads each, rank 0 has "
            f"the first {HEADS // RANKS} heads and rank 1 the others; proj is split by "
            "rows."
        ),
    )
    c.text(24, 32, "MLP", size=15, bold=True, anchor="start")
    _tensor(c, 40, 96, 56, 72, "x", [NEUTRAL])
    c.arrow(104, 132, 144, 132)
    c.text(124, 120, "f", size=15, bold=True)
    _tensor(c, 152, 88, 150, 88, "up: by columns", COLORS)
    c.arrow(310, 132, 350, 132)
    c.text(330, 120, "gelu", size=12)
    _tensor(c, 358, 96, 130, 72, "each rank has half", COLORS)
    c.arrow(496, 132, 530, 132)
    _tensor(c, 538, 64, 66, 136, "down: by rows", COLORS, level=True)
    _output(c, 132)
    for rank, color in enumerate(COLORS):
        c.rect(300 + 90 * rank, 20, 16, 16, fill=color)
        c.text(322 + 90 * rank, 33, f"rank {rank}", size=12, anchor="start")
    c.line(24, 262, 756, 262, color=GRID)
    c.text(24, 292, "attention", size=15, bold=True, anchor="start")
    _tensor(c, 40, 366, 56, 72, "x", [NEUTRAL])
    c.arrow(104, 402, 144, 402)
    c.text(124, 390, "f", size=15, bold=True)
    _heads(c)
    c.arrow(496, 402, 530, 402)
    _tensor(c, 538, 334, 66, 136, "proj: by rows", COLORS, level=True)
    _output(c, 402)
    c.text(
        390,
        524,
        "between the layers nothing is sent: what the first returns, the second needs",
        size=12.5,
    )
    return c.svg()


def _tensor(
    c: Canvas,
    x: float,
    y: float,
    w: float,
    h: float,
    words: str,
    colors: tuple[str, ...] | list[str],
    *,
    level: bool = False,
) -> None:
    """A matrix in as many parts as there are colors, side by side or one below."""
    for part, color in enumerate(colors):
        if level:
            each = h / len(colors)
            c.rect(x, y + each * part, w, each, fill=color)
            if len(colors) > 1:
                c.text(x + w / 2, y + each * (part + 0.5) + 4, str(part), size=12)
        else:
            each = w / len(colors)
            c.rect(x + each * part, y, each, h, fill=color)
            if len(colors) > 1:
                c.text(x + each * (part + 0.5), y + h / 2 + 4, str(part), size=12)
    c.rect(x, y, w, h, thick=2)
    c.text(x + w / 2, y + h + 18, words, size=11.5)


def _output(c: Canvas, middle: float) -> None:
    """The two partial sums, and their sum."""
    for rank, color in enumerate(COLORS):
        y = middle - 80 + 92 * rank
        c.rect(628, y, 48, 68, fill=color, thick=1.5)
        c.text(652, y + 38, f"{rank}", size=12)
        c.line(676, y + 34, 688, middle, color=LINK_BUSY, thick=2)
    c.arrow(606, middle, 626, middle, thick=1.5)
    c.text(652, middle + 4, "+", size=15, bold=True)
    c.arrow(688, middle, 712, middle, color=LINK_BUSY)
    c.text(700, middle - 14, "g", size=15, bold=True)
    c.rect(714, middle - 36, 48, 72, fill=NEUTRAL, thick=2)
    c.text(738, middle + 54, "output", size=11.5)
    c.text(652, middle - 88, "partial sums", size=11.5)


def _heads(c: Canvas) -> None:
    """The outputs of qkv, a square per head, then the heads of each rank."""
    for row, (name, ranks) in enumerate(zip("qkv", owners(), strict=True)):
        for head, rank in enumerate(ranks):
            x, y = 152 + 38 * head, 352 + 36 * row
            c.rect(x, y, 34, 30, fill=COLORS[rank])
            c.text(x + 17, y + 20, f"{name}{head}", size=12, mono=True)
    c.text(226, 476, "qkv: full heads", size=11.5)
    for rank, color in enumerate(COLORS):
        heads = [h for h, owner in enumerate(owners()[0]) if owner == rank]
        y = 348 + 60 * rank
        c.arrow(308, y + 24, 340, y + 24, thick=1.5)
        c.rect(346, y, 142, 48, fill=color, round_=4)
        c.text(417, y + 20, f"heads {' and '.join(map(str, heads))}", size=12)
        c.text(417, y + 37, "scores, softmax, values", size=11)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"conjugate.svg": conjugate(), "cuts.svg": cuts()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
