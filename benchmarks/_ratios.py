"""Ratios of pairs that were measured side by side, and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

Pair = tuple[float, float]
"""Ours and the peer's, one after the other in the same processes."""
RESAMPLED = 2000


def ratio_of(launches: Sequence[Sequence[Pair]]) -> float:
    """The median of ours / peer over all pairs of all launches."""
    return statistics.median(ours / peer for pairs in launches for ours, peer in pairs)


def upper_bound(launches: Sequence[Sequence[Pair]], seed: int = 0) -> float:
    """Below it the ratio is with 95 % confidence, by bootstrap.

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
    return sorted(found)[int(0.95 * RESAMPLED)]


def result_of(
    name: str, launches: Sequence[Sequence[Pair]], peer: str, bar: float | None = None
) -> dict[str, Any]:
    """A ratio in the schema of all benchmarks; `is_met` if it has a bar."""
    pairs = [pair for own in launches for pair in own]
    ratios = sorted(ours / other for ours, other in pairs)
    result: dict[str, Any] = {
        "name": name,
        "value": round(ratio_of(launches), 4),
        "unit": "ours/peer",
        "peer": peer,
        "upper": round(upper_bound(launches), 4),
        "ours_s": round(statistics.median(ours for ours, _ in pairs), 5),
        "peer_s": round(statistics.median(other for _, other in pairs), 5),
        "n": len(pairs),
        "launches": len(launches),
        "p50": round(statistics.median(ratios), 4),
        "p95": round(ratios[int(0.95 * (len(ratios) - 1))], 4),
    }
    if bar is not None:
        result |= {"bar": bar, "is_met": result["upper"] <= bar}
    return result
