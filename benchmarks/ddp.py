"""Our DistributedDataParallel beside torch's: time, overlap, memory, and the numbers.

The same transformer is wrapped twice in the same processes, with buckets of the same
size on the same gloo group, and their steps take turns. Each launch is a fresh set of
processes.

    ratio_step_n2       seconds of a step, ours by torch's; barred by `upper`
    ratio_step_n4       the same with more ranks than this machine may have cores: shown
    overlap_share       of the time from the first bucket's departure until backward()
                        returns, what passes before the last gradient is ready
    ratio_peak_memory   bytes of tensors at their peak, weights apart, ours by torch's
    *_max_difference    after 20 steps of SGD in float64

    distlab bench ddp [--json]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks import _ddp_ranks as ranks  # noqa: E402
from benchmarks._ratios import Pair, command, result_of  # noqa: E402
from distlab.runner import Cluster, Limits  # noqa: E402

LAUNCHES, PAIRS = 7, 24
LAUNCHES_OF_4, PAIRS_OF_4 = 2, 10
BAR_STEP, BAR_MEMORY, BAR_DIFFERENCE = 1.05, 1.1, 1e-10
LIMITS = Limits(seconds=600.0, memory_bytes=8 << 30)


class Launcher:
    """Starts fresh ranks for each measurement; `side` says whose code is measured."""

    def __init__(self, cluster: Cluster, side: str) -> None:
        self._cluster, self._side = cluster, side

    def __call__(self, program: Callable[..., Any], n: int, *values: Any) -> Any:
        """What `program` gives on each of n ranks."""
        with tempfile.TemporaryDirectory() as folder:
            run = self._cluster.run(
                program, n, self._side, folder, *values, limits=LIMITS, journal=False
            )
        return run.require_finished().values


def steps(launch: Launcher, n: int, launches: int, pairs: int) -> list[list[Pair]]:
    """By launch, the pairs of seconds; a step takes as long as on its slowest rank."""
    found = []
    for _ in range(launches):
        by_rank = launch(ranks.step_pairs, n, pairs)
        found.append(
            [
                (max(own[k][0] for own in by_rank), max(own[k][1] for own in by_rank))
                for k in range(pairs)
            ]
        )
    return found


def overlap(launch: Launcher, n: int) -> dict[str, Any]:
    """How much of the messages' time lies inside of the computing."""
    found = launch(ranks.overlap, n)
    moments = [step for own in found for step in own]
    shares = [(ready - left) / (over - left) for left, ready, over in moments]
    left, ready, over = (
        statistics.median(column) for column in zip(*moments, strict=True)
    )
    value = round(statistics.median(shares), 3)
    return {
        "name": "overlap_share",
        "value": value,
        "unit": "share",
        "first_leaves_s": round(left, 5),
        "last_gradient_s": round(ready, 5),
        "backward_returns_s": round(over, 5),
        "n": len(shares),
        "bar": 0.0,
        "is_met": min(shares) > 0,
    }


def memory(launch: Launcher, n: int) -> list[dict[str, Any]]:
    """Peaks of tensors, and how much the processes grew; on fresh ranks for each."""
    ours, torchs = (launch(ranks.peak_bytes, n, which) for which in ("ours", "torch's"))
    peak, other = (max(told["peak"] for told in own) for own in (ours, torchs))
    grown, its = (max(told["grown"] for told in own) for own in (ours, torchs))
    return [
        {
            "name": "ratio_peak_memory",
            "value": round(peak / other, 4),
            "unit": "ours/peer",
            "peer": "torch DDP",
            "ours_bytes": peak,
            "peer_bytes": other,
            "gradient_bytes": ours[0]["gradients"],
            "bar": BAR_MEMORY,
            "is_met": peak / other <= BAR_MEMORY,
        },
        {
            "name": "ratio_resident_growth",
            "value": round(grown / its, 4) if its else None,
            "unit": "ours/peer",
            "peer": "torch DDP",
            "ours_bytes": grown,
            "peer_bytes": its,
        },
    ]


def parity(launch: Launcher, n: int) -> list[dict[str, Any]]:
    """Losses and parameters beside torch's."""
    found = launch(ranks.parity, n)
    return [
        {
            "name": f"{what}_max_difference_n{n}",
            "value": (value := max(told[key] for told in found)),
            "unit": "1",
            "peer": "torch DDP",
            "n": ranks.PARITY_STEPS,
            "buckets": found[0]["buckets"],
            "bar": BAR_DIFFERENCE,
            "is_met": value <= BAR_DIFFERENCE,
        }
        for what, key in (("loss", "loss"), ("parameter", "parameters"))
    ]


def measure(
    side: str,
    *,
    launches: int = LAUNCHES,
    pairs: int = PAIRS,
    launches_of_4: int = LAUNCHES_OF_4,
    pairs_of_4: int = PAIRS_OF_4,
) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    import torch

    preload = ("torch._dynamo", "benchmarks._ddp_ranks")
    with Cluster(preload=preload) as cluster:
        launch = Launcher(cluster, side)
        of_2 = steps(launch, 2, launches, pairs)
        of_4 = steps(launch, 4, launches_of_4, pairs_of_4)
        results = [
            result_of("ratio_step_n2", of_2, "torch DDP on gloo", BAR_STEP),
            result_of("ratio_step_n4", of_4, "torch DDP on gloo"),
            overlap(launch, 2),
            *memory(launch, 2),
            *parity(launch, 2),
            *parity(launch, 3),
        ]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__}
    return {"bench": "ddp", "machine": machine, "code": side, "results": results}


def main() -> int:
    """Measure, print, and say whether every bar is met."""
    return command(__doc__, measure, _row)


def _row(result: dict[str, Any]) -> str:
    return f"{result['name']:<28} {result['value']:>10}"


if __name__ == "__main__":
    sys.exit(main())
