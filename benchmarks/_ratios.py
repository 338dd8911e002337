"""Ours and a peer's measured in turn in the same processes, and how sure a ratio is."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from distlab.runner import Cluster, Limits

Pair = tuple[float, float]
"""Ours and the peer's, one after the other in the same processes."""
Launches = Sequence[Sequence[Pair]]
"""The pairs of each launch, in processes of its own."""
RESAMPLED = 2000
LIMITS = Limits(seconds=600.0, memory_bytes=8 << 30)


def on_ranks(
    cluster: Cluster,
    program: Callable[..., Any],
    n: int,
    *values: Any,
    limits: Limits = LIMITS,
) -> list[Any]:
    """What `program(context, folder, *values)` returns on each of n fresh ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run = cluster.run(program, n, folder, *values, limits=limits, journal=False)
    return list(run.require_finished().values)


def in_turn(
    ways: Sequence[Callable[[], Any]],
    count: int,
    *,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], Any] = lambda: None,
) -> list[tuple[float, ...]]:
    """Seconds of each way, `count` times in turn.

    Whoever comes second finds warm caches, so another one goes first each time.
    """
    found = []
    for number in range(warm_up + count):
        took = [0.0] * len(ways)
        for turn in range(len(ways)):
            place = (number + turn) % len(ways)
            before()
            started = clock()
            ways[place]()
            took[place] = clock() - started
        if number >= warm_up:
            found.append(tuple(took))
    return found


def slowest(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[Any]:
    """From what each rank measured: something takes as long as on its slowest rank."""
    return [
        tuple(map(max, zip(*same, strict=True))) for same in zip(*by_rank, strict=True)
    ]


def ratio_of(launches: Launches) -> float:
    """The median of ours / peer over all pairs of all launches."""
    return statistics.median(ours / peer for pairs in launches for ours, peer in pairs)


def _resampled(launches: Launches, seed: int) -> list[float]:
    """The ratios of a bootstrap, in order.

    Launches are drawn anew, and pairs inside of each: what differs from launch to
    launch counts as much as what differs from pair to pair.
    """
    draw = random.Random(seed)
    found = []
    for _ in range(RESAMPLED):
        drawn = [
            draw.choices(pairs, k=len(pairs))
            for pairs in draw.choices(launches, k=len(launches))
        ]
        found.append(ratio_of(drawn))
    return sorted(found)


def summary(launches: Launches) -> dict[str, Any]:
    """The median of the ratios, both sides' seconds, and how many.

    With 95 % confidence the ratio is above `lower`; the same goes for below `upper`.
    """
    pairs = [pair for own in launches for pair in own]
    ratios = sorted(ours / other for ours, other in pairs)
    drawn = _resampled(launches, seed=0)
    return {
        "value": round(ratio_of(launches), 5),
        "unit": "ours/peer",
        "lower": round(drawn[int(0.05 * RESAMPLED)], 5),
        "upper": round(drawn[int(0.95 * RESAMPLED)], 5),
        "ours_s": round(statistics.median(ours for ours, _ in pairs), 7),
        "peer_s": round(statistics.median(other for _, other in pairs), 7),
        "n": len(pairs),
        "launches": len(launches),
        "p50": round(statistics.median(ratios), 5),
        "p95": round(ratios[int(0.95 * (len(ratios) - 1))], 5),
    }
