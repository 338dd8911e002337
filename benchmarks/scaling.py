"""How an epoch of torch's DDP scales with the ranks, and what its messages cost.

A convolutional network on 28×28 images, 32 samples per rank and step, 1,024 samples an
epoch. Epochs with messages and epochs under no_sync() take turns on the same ranks.

    epoch_s_n<N>               seconds of an epoch, median
    speedup_n<N>               by that of one rank
    efficiency_n<N>            speed-up by ranks; barred with --min-efficiency
    communication_share_n<N>   of the epoch, what no_sync() saves: exposed communication

A row of more ranks than cores (GPUs, where there are some) is marked and has no bar.

distlab bench scaling [--json] [--min-efficiency 0.5]
"""

from __future__ import annotations

import os
import statistics
import sys

import torch

from benchmarks._bars import Bench, Line
from benchmarks._ratios import on_ranks, slowest
from benchmarks._scaling_ranks import epochs
from distlab.runner import Cluster

WORLDS = (1, 2, 4)
EPOCHS = 3  # of each kind, after one that is not counted


def bench(min_efficiency: float = 0.0) -> Bench:
    """The harness, with this bar on the efficiency at every size; 0: none."""
    bars = {f"efficiency_n{n}": min_efficiency for n in WORLDS if n > 1}
    return Bench("scaling", __doc__, at_least=bars if min_efficiency else {})


def measure(min_efficiency: float = 0.0) -> list[Line]:
    """All figures."""
    room = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    lines: list[Line] = []
    alone_s = 0.0
    for n in WORLDS:
        with Cluster() as cluster:
            pairs = slowest(on_ranks(cluster, epochs, n, EPOCHS))
        sent_s, silent_s = map(statistics.median, zip(*pairs, strict=True))
        alone_s = alone_s or sent_s
        lines += figures(n, sent_s, silent_s, alone_s, min_efficiency, n > room)
    return lines


def figures(
    n: int,
    sent_s: float,
    silent_s: float,
    alone_s: float,
    min_efficiency: float = 0.0,
    is_shared: bool = False,
) -> list[Line]:
    """The figures of n ranks; there is no bar if they share cores."""
    line = bench(0.0 if is_shared else min_efficiency).line
    note = "more ranks than cores" if is_shared else ""
    speedup = alone_s / sent_s
    values = {
        "epoch_s": (sent_s, "s"),
        "speedup": (speedup, "×"),
        "efficiency": (speedup / n, "share"),
        "communication_share": (max(0.0, 1 - silent_s / sent_s), "share"),
    }
    return [
        line(f"{name}_n{n}", round(value, 4), unit, ranks=n, note=note)
        for name, (value, unit) in values.items()
    ]


if __name__ == "__main__":
    sys.exit(bench().main(measure, min_efficiency=0.0))
