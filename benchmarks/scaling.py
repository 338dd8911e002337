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

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from benchmarks._scaling_ranks import epochs  # noqa: E402
from distlab.runner import Cluster, Limits  # noqa: E402

WORLDS = (1, 2, 4)
EPOCHS = 3  # of each kind, after one that is not counted
LIMITS = Limits(seconds=500.0, memory_bytes=8 << 30)


def measure(
    min_efficiency: float | None = None,
    *,
    worlds: tuple[int, ...] = WORLDS,
    num_epochs: int = EPOCHS,
) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    room = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    lines: list[Line] = []
    alone_s = 0.0
    for n in worlds:
        with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
            run = cluster.run(
                epochs, n, folder, num_epochs, limits=LIMITS, journal=False
            )
        by_rank = run.require_finished().values
        # An epoch takes as long as on its slowest rank.
        sent, silent = (
            statistics.median(map(max, zip(*(own[k] for own in by_rank), strict=True)))
            for k in (0, 1)
        )
        alone_s = alone_s or sent
        lines += figures(n, sent, silent, alone_s, min_efficiency, is_shared=n > room)
    return report_of("scaling", lines)


def figures(
    n: int,
    sent_s: float,
    silent_s: float,
    alone_s: float,
    min_efficiency: float | None,
    *,
    is_shared: bool,
) -> list[Line]:
    """The row of n ranks."""
    has_bar = min_efficiency is not None and n > 1 and not is_shared
    bars = Bars(
        at_least={f"efficiency_n{n}": min_efficiency or 0.0} if has_bar else {},
        at_most={},
    )
    more = {"ranks": n, "more_ranks_than_cores": is_shared}
    speedup = alone_s / sent_s
    values = {
        "epoch_s": (sent_s, "s"),
        "speedup": (speedup, "×"),
        "efficiency": (speedup / n, "share"),
        "communication_share": (max(0.0, 1 - silent_s / sent_s), "share"),
    }
    return [
        bars.line(f"{name}_n{n}", round(value, 4), unit, **more)
        for name, (value, unit) in values.items()
    ]


def text(results: Any) -> list[str]:
    """The table."""

    def row(line: Line) -> str:
        mark = "  more ranks than cores" if line["more_ranks_than_cores"] else ""
        bar = f"  bar ≥ {line['bar']:g}" if "bar" in line else ""
        bar += "" if line.get("met", True) else "  MISSED"
        return f"{line['name']:<24} {line['value']:>9g} {line['unit']:<6}{bar}{mark}"

    return rows(results, row)


def main() -> int:
    """Measure, print, and say whether every bar is met."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--min-efficiency", type=float)
    given = parser.parse_args()
    return show(measure(given.min_efficiency), text, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
