"""Our DistributedDataParallel beside torch's: step time, overlap and memory.

The same transformer is wrapped twice in the same processes, with buckets of the same
size on the same gloo group, and their steps take turns. Each launch is a fresh set of
processes. Whether the numbers agree is what `distlab bench beside_torch` says.

    ratio_step_n2       seconds of a step, ours by torch's; barred by `upper`
    ratio_step_n4       the same with more ranks than this machine may have cores: shown
    overlap_share       of the time from the first bucket's departure until backward()
                        returns, what passes before the last gradient is ready
    ratio_peak_memory   bytes of tensors at their peak, weights apart, ours by torch's

    distlab bench ddp [--json]
    python benchmarks/ddp.py --code mine
"""

from __future__ import annotations

import statistics
import sys

from benchmarks import _ddp_ranks as ranks
from benchmarks._bars import Bench, Line
from benchmarks._ratios import on_ranks, slowest
from distlab.runner import Cluster

PEER = "torch DDP on gloo"
SIZES = {2: (7, 24), 4: (2, 10)}  # by ranks: launches, and pairs in each
BENCH = Bench(
    "ddp",
    __doc__,
    at_least={"overlap_share": 1e-9},
    at_most={"ratio_step_n2": 1.05, "ratio_peak_memory": 1.1},
)


def steps(cluster: Cluster, side: str, n: int, launches: int, pairs: int) -> Line:
    """The seconds of a step."""
    found = [
        slowest(on_ranks(cluster, ranks.step_pairs, n, side, pairs))
        for _ in range(launches)
    ]
    return BENCH.ratio(f"ratio_step_n{n}", found, PEER)


def overlap(cluster: Cluster, side: str) -> Line:
    """How much of the messages' time lies inside of the computing."""
    found = on_ranks(cluster, ranks.overlap, 2, side)
    moments = [step for own in found for step in own]
    shares = [(ready - left) / (over - left) for left, ready, over in moments]
    names = ("first_leaves_s", "last_gradient_s", "backward_returns_s")
    medians = map(statistics.median, zip(*moments, strict=True))
    return BENCH.line(
        "overlap_share",
        round(statistics.median(shares), 3),
        "share",
        lower=min(shares),
        n=len(shares),
        **dict(zip(names, (round(value, 5) for value in medians), strict=True)),
    )


def memory(cluster: Cluster, side: str) -> Line:
    """Peaks of tensors, on fresh ranks for each."""
    ours, torchs = (
        on_ranks(cluster, ranks.peak_bytes, 2, side, whose) for whose in ("ours", "")
    )
    own, peer = max(ours), max(torchs)
    more = {"peer": PEER, "ours_bytes": own, "peer_bytes": peer}
    return BENCH.line("ratio_peak_memory", round(own / peer, 4), "ours/peer", **more)


def measure(code: str) -> list[Line]:
    """All figures of this code: mine, reference or a file."""
    with Cluster(preload=("torch._dynamo", ranks.__name__)) as cluster:
        return [
            *(steps(cluster, code, n, *size) for n, size in SIZES.items()),
            overlap(cluster, code),
            memory(cluster, code),
        ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, code="reference"))
