"""Buckets in flight: `python -m figures.phase3_distributed_data_parallel` draws them.

The times are those of a formula. The tests of the unit play the same steps on simulated
ranks, and find the same.
"""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    BACKWARD,
    COMPLETE,
    FAILURE,
    FAILURE_TEXT,
    GRADIENTS,
    INK,
    LINK_BUSY,
    LINK_IDLE,
    MUTED,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
BACKWARD_MS, RANKS = 10.0, 8
HOPS = 2 * (RANKS - 1)
ALPHA_MS = 0.02  # of one hop
BYTES_MS = 1.0  # of all gradients, for one hop: 100 MB by 8 ranks by 12.5 GB/s
LAYERS = 50

Transfer = tuple[float, float]
"""From when to when, in ms."""


def transfers(num_buckets: int, *, after: bool = False) -> list[Transfer]:
    """Each bucket leaves with its last gradient, or `after` backward; one at a time."""
    takes = HOPS * (ALPHA_MS + BYTES_MS / num_buckets)
    found: list[Transfer] = []
    free = 0.0
    for number in range(num_buckets):
        ready = BACKWARD_MS if after else BACKWARD_MS * (number + 1) / num_buckets
        start = max(free, ready)
        free = start + takes
        found.append((start, free))
    return found


def lanes_of_buckets() -> str:
    """Backward and the messages, for four ways of sending the same gradients."""
    rows = (
        ("after backward, each gradient by itself", transfers(LAYERS, after=True)),
        ("one bucket", transfers(1)),
        ("five buckets", transfers(5)),
        ("fifty buckets", transfers(LAYERS)),
    )
    told = ", ".join(f"{name}: {row[-1][1]:.1f} ms" for name, row in rows)
    c = Canvas(
        "lanes-of-buckets",
        760,
        452,
        title="The same 100 MB of gradients, all-reduced in four ways",
        desc=(
            "Four pairs of rows over time. The upper row of each pair is backward, "
            "10 ms; the lower row shows the messages, each with its latency (light) "
            "first. Without overlap fifty messages start when backward ends. One "
            "bucket starts then, too. The first of five buckets starts after one fifth "
            "of backward, and the others follow without a gap. "
            f"The steps take: {told}."
        ),
    )
    left, per_ms = 40.0, 17.0
    best = min(row[-1][1] for _, row in rows)
    for place, (name, row) in enumerate(rows):
        y = 22.0 + 96 * place
        end = row[-1][1]
        c.text(left, y + 8, name, size=13, bold=True, anchor="start")
        c.rect(left, y + 16, BACKWARD_MS * per_ms, 22, fill=BACKWARD, thick=0.8)
        c.text(left + 5 * per_ms, y + 32, "backward", size=12)
        for start, over in row:
            x, w = left + start * per_ms, (over - start) * per_ms
            c.rect(x, y + 42, w, 22, fill=LINK_BUSY, thick=0.4)
            latency = HOPS * ALPHA_MS * per_ms
            c.rect(x, y + 42, latency, 22, fill=LINK_IDLE, stroke=LINK_BUSY, thick=0.4)
        x = left + end * per_ms
        c.line(x, y + 12, x, y + 68, thick=2, color=COMPLETE if end == best else INK)
        words = f"{end:.1f} ms" + (": fastest" if end == best else "")
        c.text(x + 6, y + 45, words, size=13, bold=True, anchor="start")
    c.line(left, 388, left + 40 * per_ms, 388, color=MUTED)
    for tick in range(0, 41, 10):
        x = left + tick * per_ms
        c.line(x, 388, x, 393, color=MUTED)
        c.text(x, 406, f"{tick} ms" if tick else "0", size=11, color=MUTED)
    c.rect(left, 424, 12, 14, fill=LINK_IDLE, stroke=LINK_BUSY)
    c.text(left + 18, 436, "latency, once per message", size=12, anchor="start")
    c.rect(left + 210, 424, 12, 14, fill=LINK_BUSY, thick=0.4)
    c.text(left + 228, 436, "bytes", size=12, anchor="start")
    words = f"{RANKS} ranks; one hop: {1000 * ALPHA_MS:.0f} µs, 12.5 GB/s"
    c.text(740, 436, words, size=12, color=MUTED, anchor="end")
    return c.svg()


READY = ("cba", "bca")  # on either rank, the first one first


def ready_order() -> str:
    """Two ranks that differ in what is ready first; sent as ready, and in one order."""
    c = Canvas(
        "ready-order",
        760,
        430,
        title="One order of buckets for all ranks, whichever is ready first",
        desc=(
            "Two ranks with the layers a, b and c. On rank 0 they become ready in the "
            "order c, b, a, on rank 1 in the order b, c, a. Above, each rank sends the "
            "layer that is ready: the first message of rank 0 is c, that of rank 1 is "
            "b, and they are added, which is marked in orange; so are the second "
            "messages. Below, both ranks send c, b, a: b of rank 1 is ready first and "
            "waits until c has been sent, and then equal layers meet."
        ),
    )
    c.text(40, 30, "each rank sends what is ready first", bold=True, anchor="start")
    _meetings(c, 44, [list(order) for order in READY])
    c.text(
        40,
        224,
        "every rank sends in the order of the buckets",
        bold=True,
        anchor="start",
    )
    _meetings(c, 238, [list("cba")] * 2)
    words = "a, b, c: gradients of three layers; orange: different layers are added"
    c.text(40, 418, words, size=12, anchor="start")
    return c.svg()


def _meetings(c: Canvas, top: float, sent: list[list[str]]) -> None:
    """Who is ready when, on two ranks, and which of their messages meet."""
    slot, side = 118.0, 44.0
    for rank in range(2):
        y = top + (0 if rank == 0 else 98)
        c.text(40, y + 28, f"rank {rank}", size=13, anchor="start")
        for place, layer in enumerate(READY[rank]):
            x = 130 + slot * place
            c.rect(x, y + 6, side, 32, fill=GRADIENTS, round_=4)
            c.text(x + side / 2, y + 27, layer, size=15, bold=True, mono=True)
            earlier = sent[rank][: sent[rank].index(layer)]
            missing = [other for other in earlier if other not in READY[rank][:place]]
            if missing:
                gap = x + side, x + slot
                c.line(gap[0] + 4, y + 24, gap[1] - 4, y + 24, color=MUTED, dash="4 3")
                words = f"waits for {missing[0]}"
                c.text(sum(gap) / 2, y + 18, words, size=11, color=MUTED)
    for number, pair in enumerate(zip(*sent, strict=True)):
        x = 500 + 84.0 * number
        same = pair[0] == pair[1]
        for rank, layer in enumerate(pair):
            y = top + 6 + 98 * rank
            edge, thick = (INK, 1) if same else (FAILURE, 3)
            c.rect(x, y, 52, 32, fill=GRADIENTS, stroke=edge, thick=thick, round_=4)
            c.text(x + 26, y + 21, layer, size=15, bold=True, mono=True)
        color = INK if same else FAILURE
        c.arrow(x + 26, top + 42, x + 26, top + 60, color=color)
        c.arrow(x + 26, top + 100, x + 26, top + 84, color=color)
        words = f"{pair[0]} + {pair[1]}"
        c.text(
            x + 26,
            top + 77,
            words,
            size=13,
            bold=True,
            color=INK if same else FAILURE_TEXT,
        )
    c.text(150, top + 156, "ready, one after another →", size=11.5, color=MUTED)
    c.text(606, top + 156, "all_reduce 1, 2, 3", size=11.5, color=MUTED)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {
        "lanes_of_buckets.svg": lanes_of_buckets(),
        "ready_order.svg": ready_order(),
    }


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
