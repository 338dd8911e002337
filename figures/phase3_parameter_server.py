"""Bounded clocks, and loads of servers; `python -m figures.phase3_parameter_server`.

The clocks are played by the rule of 3.20, the loads computed for 24 tensors.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path

from distlab.trace.palette import (
    GRID,
    HIGHLIGHT,
    INK,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"

SECONDS, BOUND, END_S = (3.0, 1.0, 1.5), 1, 15.0
SIZES_MIB = (512, *(64, 16, 16, 64, 4) * 4, 1, 1, 128)
SERVERS, PULLS_OF_HOT = 4, 10
POINTS = 32  # of each server on the circle


def spans() -> list[list[tuple[float, float]]]:
    """From when to when each worker computes; between two of them it waits."""
    clocks, ready = [0] * len(SECONDS), [*SECONDS]
    rows: list[list[tuple[float, float]]] = [[(0.0, end)] for end in SECONDS]
    while (now := min(ready)) < END_S:
        rank = ready.index(now)
        clocks[rank] += 1
        ready[rank] = math.inf
        for worker, end in enumerate(ready):
            if end == math.inf and clocks[worker] <= min(clocks) + BOUND:
                ready[worker] = now + SECONDS[worker]
                rows[worker].append((now, ready[worker]))
    return rows


def ssp_clocks() -> str:
    """Three workers of different speed, and the bound."""
    c = Canvas(
        "ssp-clocks",
        760,
        250,
        title=f"Three workers and a bound of {BOUND}: who waits, and when",
        desc=(
            "Time runs to the right. Worker 0 needs 3 seconds for each gradient, "
            "worker 1 needs 1 second and worker 2 needs 1.5. Each bar is a gradient, "
            "with its number. At first no worker waits. From then on workers 1 and 2 "
            "wait in every step, until worker 0 has pushed."
        ),
    )
    left, scale = 100, 42.0
    for rank, row in enumerate(spans()):
        y = 40 + 54 * rank
        c.text(left - 12, y + 22, f"worker {rank}", size=12.5, anchor="end")
        until = 0.0
        for number, (start, end) in enumerate(row, 1):
            if start > until:
                x = left + scale * until
                c.hatch(x, y + 4, scale * (start - until), 28)
            stop = min(end, END_S)
            c.rect(
                left + scale * start,
                y,
                scale * (stop - start),
                36,
                fill=RANK_COLORS[rank],
            )
            c.text(left + scale * (start + stop) / 2, y + 23, str(number), size=12)
            until = end
    for second in range(0, int(END_S) + 1, 3):
        x = left + scale * second
        c.line(x, 202, x, 208, color=MUTED, thick=1)
        c.text(x, 222, f"{second} s", size=11, color=MUTED)
    words = (
        f"hatched: the worker is more than {BOUND} push ahead of worker 0, and waits"
    )
    c.text(left, 242, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def round_robin(num_servers: int) -> list[int]:
    """Tensor after tensor to server after server."""
    return [index % num_servers for index in range(len(SIZES_MIB))]


def by_bytes(num_servers: int) -> list[int]:
    """The largest first, each to the server with the fewest bytes."""
    loads, servers = [0] * num_servers, [0] * len(SIZES_MIB)
    for index in sorted(range(len(SIZES_MIB)), key=lambda i: -SIZES_MIB[i]):
        servers[index] = loads.index(min(loads))
        loads[servers[index]] += SIZES_MIB[index]
    return servers


def consistent_hash(num_servers: int) -> list[int]:
    """Each tensor to the next point of a server on a circle of 2^32."""
    circle = sorted(
        (_point(f"server {server} point {point}"), server)
        for server in range(num_servers)
        for point in range(POINTS)
    )
    places = [place for place, _ in circle]
    return [
        circle[bisect(places, _point(f"tensor {index}")) % len(circle)][1]
        for index in range(len(SIZES_MIB))
    ]


def _point(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def loads(servers: Sequence[int], weights: Sequence[int]) -> list[int]:
    """What each server has."""
    return [
        sum(w for w, s in zip(weights, servers, strict=True) if s == server)
        for server in range(SERVERS)
    ]


def moved(assign: list[int], later: list[int]) -> int:
    """How many tensors have another server."""
    return sum(a != b for a, b in zip(assign, later, strict=True))


def server_loads() -> str:
    """Four servers under four ways to assign tensors, as bars."""
    c = Canvas(
        "server-loads",
        760,
        300,
        title=f"{len(SIZES_MIB)} tensors on {SERVERS} servers, assigned in four ways",
        desc=(
            "Four diagrams of four bars each. Round-robin, the server with the "
            "embedding has most of the bytes. With a consistent hash of the names the "
            "bars are uneven too. By bytes, the server with the embedding has nothing "
            "else and the other bars are equal. In the fourth diagram the bars are "
            "bytes pulled, and one tensor of 64 MiB is pulled ten times as often: its "
            "server has the highest bar, although bytes are balanced. Below each "
            "diagram stands how many tensors move when a fifth server joins."
        ),
    )
    hot = [*SIZES_MIB]
    hot[1] *= PULLS_OF_HOT
    ways = (
        ("round-robin", round_robin, SIZES_MIB),
        ("consistent hash", consistent_hash, SIZES_MIB),
        ("by bytes", by_bytes, SIZES_MIB),
        ("by bytes, a hot key", by_bytes, hot),
    )
    most = max(max(loads(way(SERVERS), weights)) for _, way, weights in ways)
    for place, (name, way, weights) in enumerate(ways):
        left, base = 30 + 182 * place, 232
        c.text(left, 36, name, size=13, bold=True, anchor="start")
        c.line(left, base, left + 156, base, color=GRID)
        bars = loads(way(SERVERS), weights)
        for server, load in enumerate(bars):
            height = 160 * load / most
            fill = HIGHLIGHT if load == max(bars) else NEUTRAL
            x = left + 4 + 39 * server
            c.rect(x, base - height, 31, height, fill=fill)
            c.text(x + 15, base - height - 6, str(load), size=11)
            c.text(x + 15, base + 16, str(server), size=11, color=MUTED)
        num = moved(way(SERVERS), way(SERVERS + 1))
        words = f"a fifth server: {num} of {len(SIZES_MIB)} move"
        if weights is SIZES_MIB:
            c.text(left, base + 36, words, size=11, anchor="start", color=INK)
    words = "MiB of weights on each server; on the right MiB pulled from it"
    c.text(30, 288, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"ssp_clocks.svg": ssp_clocks(), "server_loads.svg": server_loads()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
