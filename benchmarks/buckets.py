"""How large should DDP's buckets be? Its own code, in virtual time, on many ranks.

    python benchmarks/buckets.py [--ranks 64] [--json]

DDP sends its gradients in buckets while backward() goes on. One large bucket leaves
nothing to overlap with; many small ones pay the latency again and again:

    step, no overlap = forward + backward + all-reduce of all gradients at once
    all-reduce of S bytes on n ranks = 2(n-1) (alpha + S / (n B))

Prints a step's time by bucket size, the best, and that formula beside it. Exits with 1
if the largest bucket does not take what the formula says, or no bucket beats it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import AlphaBeta
from distlab.sim import torch as sim_torch

LAYERS, WIDTH, BATCH = 16, 256, 32
CAPS_MB = (100, 25, 5, 2, 1, 0.5, 0.25)
NET = AlphaBeta(alpha_s=1e-6, bytes_per_s=12.5e9)
FLOPS_PER_S = 2e11
MOST_REL_ERR = 1e-6


def steps(cap_mb: float, count: int) -> list[float]:
    """Train as DDP's tutorial does; the virtual seconds that each step took."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(BATCH, WIDTH)
    took = []
    for _ in range(count):
        started = sim_torch.now_s()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        took.append(sim_torch.now_s() - started)
    return took


def formula(ranks: int) -> dict[str, float]:
    """Seconds of compute and of one all-reduce, and their sum."""
    product = 2 * BATCH * WIDTH * WIDTH
    # Backward is two products a layer, but for the first: its input needs no gradient.
    compute = (3 * LAYERS - 1) * product / FLOPS_PER_S
    num_bytes = 4 * LAYERS * WIDTH * WIDTH
    hop = NET.alpha_s + num_bytes / ranks / NET.bytes_per_s
    all_reduce = 2 * (ranks - 1) * hop
    return {
        "compute_s": compute,
        "all_reduce_s": all_reduce,
        "no_overlap_s": compute + all_reduce,
    }


def measure(ranks: int, caps_mb: Sequence[float] = CAPS_MB) -> list[dict[str, float]]:
    """A step's time for each bucket size; the third, when DDP has settled."""
    points = []
    for cap_mb in caps_mb:
        started = time.perf_counter()
        done = sim_torch.run(steps, ranks, cap_mb, 3, net=NET, flops_per_s=FLOPS_PER_S)
        done.require_finished()
        points.append(
            {
                "bucket_mb": float(cap_mb),
                "step_s": max(took[-1] for took in done.values),
                "wall_s": time.perf_counter() - started,
            }
        )
    return points


def results_of(
    ranks: int, points: list[dict[str, float]], parts: dict[str, float]
) -> list[dict[str, Any]]:
    """The results in the schema of all benchmarks."""
    best = min(points, key=lambda point: point["step_s"])
    alone = parts["no_overlap_s"]
    error = abs(points[0]["step_s"] - alone) / alone
    found = [(f"step_{p['bucket_mb']:g}MB", p["step_s"], "s") for p in points]
    found += [(name.removesuffix("_s"), value, "s") for name, value in parts.items()]
    found += [
        ("optimum", best["bucket_mb"], "MB"),
        ("no_overlap_over_optimum", alone / best["step_s"], "ratio"),
        ("one_bucket_rel_err", error, "1"),
        ("slowest_run", max(point["wall_s"] for point in points), "s"),
    ]
    return [
        {"name": name, "value": value, "unit": unit, "n": ranks}
        for name, value, unit in found
    ]


def missed(results: list[dict[str, Any]]) -> list[str]:
    """The results that are not as they must be."""
    value = {result["name"]: result["value"] for result in results}
    right = {
        "one_bucket_rel_err": value["one_bucket_rel_err"] <= MOST_REL_ERR,
        "no_overlap_over_optimum": value["no_overlap_over_optimum"] > 1,
    }
    return [name for name, is_right in right.items() if not is_right]


def draw(points: list[dict[str, float]], parts: dict[str, float]) -> None:
    """A bar for each bucket size, with the formula below."""
    longest = max(parts["no_overlap_s"], *(point["step_s"] for point in points))
    rows = [(f"{p['bucket_mb']:g} MB", p["step_s"]) for p in points]
    for name, seconds in [*rows, ("no overlap", parts["no_overlap_s"])]:
        bar = "█" * round(50 * seconds / longest)
        print(f"{name:>10}  {1e6 * seconds:8.1f} µs  {bar}")


def main() -> int:
    """Measure, print, and say whether the curve is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    points, parts = measure(options.ranks), formula(options.ranks)
    results = results_of(options.ranks, points, parts)
    value = {result["name"]: result["value"] for result in results}
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        print(json.dumps({"bench": "buckets", "machine": machine, "results": results}))
    else:
        draw(points, parts)
        print(
            f"best: {value['optimum']:g} MB, {value['no_overlap_over_optimum']:.2f} "
            f"times as fast as without overlap; {options.ranks} ranks"
        )
    return int(bool(missed(results)))


if __name__ == "__main__":
    sys.exit(main())
