"""Our ZeRO beside torch's: bytes per rank against the formula, step times, the numbers.

The same transformer in the same processes, on one gloo group; the steps of ours and of
the peer take turns. Each launch is a fresh set of processes.

    state_bytes_err_stage1…3   bytes held per rank between backward() and step(), by
                               the formula: the largest relative error of weights,
                               gradients, state, and of all tensors that are alive
    held_stage1…3, held_…      these bytes themselves, and those of torch's two
    ratio_step_vs_fsdp2        stage 3 with prefetch by fully_shard
    ratio_step_vs_fsdp2_stage2 stage 2 by fully_shard(reshard_after_forward=False)
    ratio_step_vs_zro          stage 1 by DDP with ZeroRedundancyOptimizer
    loss_max_difference_…      to AdamW in one process, 20 steps in float64

    distlab bench zero [--json]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks import _zero_ranks as ranks  # noqa: E402
from benchmarks._ratios import Pair, command, result_of  # noqa: E402
from distlab.runner import Cluster, Limits  # noqa: E402

LAUNCHES, PAIRS = 5, 16
WORLDS = (2, 4)  # at which bytes are counted
BAR_BYTES, BAR_DIFFERENCE = 0.01, 1e-10
LIMITS = Limits(seconds=600.0, memory_bytes=8 << 30)
RATIOS = (
    ("ratio_step_vs_fsdp2", 3, "fsdp2", "torch fully_shard of each layer"),
    (
        "ratio_step_vs_fsdp2_stage2",
        2,
        "fsdp2 stage 2",
        "torch fully_shard, kept unsharded",
    ),
    ("ratio_step_vs_zro", 1, "zro", "torch DDP and ZeroRedundancyOptimizer"),
)
Launch = Callable[..., Any]


def launcher(cluster: Cluster) -> Launch:
    """Starts fresh ranks for each measurement; what the program gives on each."""

    def launch(program: Callable[..., Any], n: int, *values: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            filled = [folder if value == "folder" else value for value in values]
            run = cluster.run(program, n, *filled, limits=LIMITS, journal=False)
        return run.require_finished().values

    return launch


def held(launch: Launch, side: str) -> list[dict[str, Any]]:
    """The bytes of each stage beside the formula, on the rank that holds most."""
    results: list[dict[str, Any]] = []
    for stage in (1, 2, 3):
        errors, most = [], {}
        for n in WORLDS:
            for own in launch(ranks.held, n, side, "folder", stage):
                errors += [
                    abs(own["held"][kind] / right - 1)
                    for kind, right in own["formula"].items()
                ]
            most[f"n{n}"] = own
        worst = max(errors)
        results.append(
            {
                "name": f"state_bytes_err_stage{stage}",
                "value": round(worst, 6),
                "unit": "relative",
                "bar": BAR_BYTES,
                "is_met": worst <= BAR_BYTES,
                **most,
            }
        )
    return results


def peers(launch: Launch) -> list[dict[str, Any]]:
    """What torch's two hold of the same model."""
    results = []
    for n in WORLDS:
        found = launch(ranks.peers_held, n, "folder", False)
        results += [
            {
                "name": f"held_{name}_n{n}",
                "value": max(sum(own[name].values()) for own in found),
                "unit": "bytes",
                "by_rank": [own[name] for own in found],
            }
            for name in found[0]
        ]
    return results


def ratios(
    launch: Launch, side: str, launches: int, pairs: int
) -> list[dict[str, Any]]:
    """Step times; a step takes as long as on its slowest rank."""
    results = []
    for name, stage, peer, words in RATIOS:
        found: list[list[Pair]] = []
        for _ in range(launches):
            program = ranks.step_pairs
            by_rank = launch(program, 2, side, "folder", stage, peer, pairs)
            found.append(
                [
                    (
                        max(own[k][0] for own in by_rank),
                        max(own[k][1] for own in by_rank),
                    )
                    for k in range(pairs)
                ]
            )
        results.append(result_of(name, found, words))
    return results


def parity(launch: Launch, side: str) -> list[dict[str, Any]]:
    """How far losses are from those of one process; torch's are shown beside."""
    results = []
    found = launch(ranks.parity, 3, side, "folder")
    for name in found[0]:
        if name == "unsharded":
            continue
        value = max(
            abs(a - b)
            for own in found
            for a, b in zip(own[name], own["unsharded"], strict=True)
        )
        result = {"name": f"loss_max_difference_{name}", "value": value, "unit": "1"}
        if name.startswith("stage"):
            result |= {"bar": BAR_DIFFERENCE, "is_met": value <= BAR_DIFFERENCE}
        results.append(result)
    return results


def measure(
    side: str, *, launches: int = LAUNCHES, pairs: int = PAIRS
) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    import torch

    preload = ("torch._dynamo", "torch.distributed.fsdp", "benchmarks._zero_ranks")
    with Cluster(preload=preload) as cluster:
        launch = launcher(cluster)
        results = [
            *held(launch, side),
            *peers(launch),
            *parity(launch, side),
            *ratios(launch, side, launches, pairs),
        ]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__}
    return {"bench": "zero", "machine": machine, "code": side, "results": results}


def main() -> int:
    """Measure, print, and say whether every bar is met."""
    return command(__doc__, measure, _row)


def _row(result: dict[str, Any]) -> str:
    return f"{result['name']:<44} {result['value']:>14.6g}"


if __name__ == "__main__":
    sys.exit(main())
