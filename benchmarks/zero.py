"""Our ZeRO beside torch's: bytes per rank against the formula, and step times.

The same transformer in the same processes, on one gloo group; the steps of ours and of
the peer take turns. Each launch is a fresh set of processes. Whether the numbers agree
is what `distlab bench beside_torch` says.

    state_bytes_err_stage1…3   bytes held per rank between backward() and step(), by
                               the formula: the largest relative error of weights,
                               gradients, state, and of all tensors that are alive
    held_…                     these bytes of torch's two
    ratio_step_vs_fsdp2        stage 3 with prefetch by fully_shard
    ratio_step_vs_fsdp2_stage2 stage 2 by fully_shard(reshard_after_forward=False)
    ratio_step_vs_zro          stage 1 by DDP with ZeroRedundancyOptimizer

    distlab bench zero [--json]
    python benchmarks/zero.py --code mine
"""

from __future__ import annotations

import sys

from benchmarks import _zero_ranks as ranks
from benchmarks._bars import Bench, Line
from benchmarks._ratios import on_ranks, slowest
from distlab.runner import Cluster
from tests.corpora import sharded

LAUNCHES, PAIRS = 5, 16
WORLDS = (2, 4)  # at which bytes are counted
STAGES = (1, 2, 3)
BENCH = Bench(
    "zero",
    __doc__,
    at_most={f"state_bytes_err_stage{stage}": 0.01 for stage in STAGES},
)
RATIOS = {  # our stage, the peer, and what torch calls it
    "ratio_step_vs_fsdp2": (3, "fsdp2", "fully_shard of each layer"),
    "ratio_step_vs_fsdp2_stage2": (2, "fsdp2 stage 2", "fully_shard, kept unsharded"),
    "ratio_step_vs_zro": (1, "zro", "DDP and ZeroRedundancyOptimizer"),
}


def held(cluster: Cluster, side: str, stage: int) -> Line:
    """The bytes of a stage beside the formula, on the rank where they differ most."""
    errors, last = [], {}
    for n in WORLDS:
        for own in on_ranks(cluster, sharded.held, n, side, stage):
            errors += [
                abs(own["held"][kind] / right - 1)
                for kind, right in own["formula"].items()
            ]
            last[f"n{n}"] = own
    name = f"state_bytes_err_stage{stage}"
    return BENCH.line(name, round(max(errors), 6), "relative", **last)


def peers(cluster: Cluster, n: int) -> list[Line]:
    """What torch's two hold of the same model."""
    found = on_ranks(cluster, sharded.peers_held, n)
    return [
        BENCH.line(
            f"held_{name}_n{n}",
            max(sum(own[name].values()) for own in found),
            "bytes",
            by_rank=[own[name] for own in found],
        )
        for name in found[0]
    ]


def ratio(cluster: Cluster, side: str, name: str) -> Line:
    """Step times; a step takes as long as on its slowest rank."""
    stage, peer, words = RATIOS[name]
    found = [
        slowest(on_ranks(cluster, ranks.step_pairs, 2, side, stage, peer, PAIRS))
        for _ in range(LAUNCHES)
    ]
    return BENCH.ratio(name, found, f"torch {words}")


def measure(code: str) -> list[Line]:
    """All figures of this code: mine, reference or a file."""
    preload = ("torch._dynamo", "torch.distributed.fsdp", ranks.__name__)
    with Cluster(preload=preload) as cluster:
        return [
            *(held(cluster, code, stage) for stage in STAGES),
            *(line for n in WORLDS for line in peers(cluster, n)),
            *(ratio(cluster, code, name) for name in RATIOS),
        ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, code="reference"))
