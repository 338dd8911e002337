"""How large should DDP's buckets be? Its own code, in virtual time, on many ranks.

    distlab bench buckets [--json]        exits with 1 when a bar is missed
    python benchmarks/buckets.py --ranks 64

DDP sends its gradients in buckets while backward() goes on. One large bucket leaves
nothing to overlap with; many small ones pay the latency again and again:

    step, no overlap = forward + backward + all-reduce of all gradients at once
    all-reduce of S bytes on n ranks = 2(n-1) (alpha + S / (n B))

The figures are a step's time by bucket size, the best, and that formula beside it. The
largest bucket must take what the formula says, and another one must beat it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._bars import Bench, Line
from distlab.sim import AlphaBeta
from distlab.sim import torch as sim_torch

LAYERS, WIDTH, BATCH = 16, 256, 32
CAPS_MB = (100, 25, 5, 2, 1, 0.5, 0.25)
NET = AlphaBeta(alpha_s=1e-6, bytes_per_s=12.5e9)
FLOPS_PER_S = 2e11
BENCH = Bench(
    "buckets",
    __doc__,
    at_least={"no_overlap_over_optimum": 1.000001},
    at_most={"one_bucket_rel_err": 1e-6},
)


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


def points_of(
    ranks: int, caps_mb: Sequence[float] = CAPS_MB
) -> list[tuple[float, float]]:
    """By bucket size in MB, the seconds of the third step, when DDP has settled."""
    points = []
    for cap_mb in caps_mb:
        done = sim_torch.run(steps, ranks, cap_mb, 3, net=NET, flops_per_s=FLOPS_PER_S)
        done.require_finished()
        points.append((float(cap_mb), max(took[-1] for took in done.values)))
    return points


def results_of(
    ranks: int, points: Sequence[tuple[float, float]], parts: dict[str, float]
) -> list[Line]:
    """The figures; `points` begin with a bucket for everything."""
    best_mb, best_s = min(points, key=lambda point: point[1])
    alone_s = parts["no_overlap_s"]
    error = abs(points[0][1] - alone_s) / alone_s
    found = [(f"step_{mb:g}MB", 1e6 * step_s, "µs") for mb, step_s in points]
    found += [(n.removesuffix("_s"), 1e6 * value, "µs") for n, value in parts.items()]
    found += [
        ("optimum", best_mb, "MB"),
        ("no_overlap_over_optimum", alone_s / best_s, "ratio"),
        ("one_bucket_rel_err", error, ""),
    ]
    return [BENCH.line(name, value, unit, n=ranks) for name, value, unit in found]


def measure(ranks: int) -> list[Line]:
    """All figures on so many ranks."""
    return results_of(ranks, points_of(ranks), formula(ranks))


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, ranks=64))
