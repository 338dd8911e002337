"""Ratios of pairs that were measured side by side, and how sure they are."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
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
    return _resampled(launches, seed)[int(0.95 * RESAMPLED)]


def lower_bound(launches: Sequence[Sequence[Pair]], seed: int = 0) -> float:
    """Above it the ratio is with 95 % confidence, as for `upper_bound`."""
    return _resampled(launches, seed)[int(0.05 * RESAMPLED)]


def _resampled(launches: Sequence[Sequence[Pair]], seed: int) -> list[float]:
    draw = random.Random(seed)
    found = []
    for _ in range(RESAMPLED):
        drawn = [
            draw.choices(pairs, k=len(pairs))
            for pairs in draw.choices(launches, k=len(launches))
        ]
        found.append(ratio_of(drawn))
    return sorted(found)


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


def command(
    about: str, measure: Callable[[str], dict[str, Any]], row: Callable[[Any], str]
) -> int:
    """Measure `--code`, print it, and say whether every bar is met.

    `row(result)` is a result's name and value, to which its bar is added.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--code", default="reference", help="mine, reference or a file")
    options = parser.parse_args()
    report = measure(options.code)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for result in report["results"]:
            bar = f"  bar {result['bar']:g}" if "bar" in result else ""
            bar += f"  upper {result['upper']:g}" if "upper" in result else ""
            print(row(result) + bar)
    return int(not all(result.get("is_met", True) for result in report["results"]))
