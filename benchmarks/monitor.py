"""Monitoring a real training: who is named when something is wrong, and what it costs.

Four faults, one run of `distlab ddp --monitor FOLDER` on three processes each, with ten
steps in a record, as it is by default (`_monitor_faults`):

    named_straggler   one rank takes 0.1 s longer in each step
    named_desync      one weight of one rank changes by 0.001
    named_nan         one gradient of one rank gets a nan before it is averaged
    named_hang        one rank sleeps in a step, the others wait in all_reduce

1 if the rank was named, it alone and as nothing else, within 3 steps or 5 s. The first
three are named from the folder by the reference's 4.2, as in `distlab top`; the hang by
the run's own end (`--hang-after 2`).

    overhead_share    the processor time that monitoring takes in the ranks and in their
                      parent, by that of a step: its functions timed with the threads'
                      processor clocks (`_monitor_cpu`). Pairs of runs, with and
                      without, differ by more than 1 % on their own, so they cannot show
                      1 %; ratio_cpu_monitored is what they say, for comparison
    false_alarms      ranks that are named in these runs, which have no fault

Two ranks, the convolutional network of `distlab ddp --dataset fashion-mnist`, 256
random images on each in a step. `monitor_us` hardly grows with their number.

    distlab bench monitor [--json]        exits with 1 when a bar is missed
    python benchmarks/monitor.py [--pairs 5] [--json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import the programs by name

from benchmarks import _monitor_cpu as cpu  # noqa: E402
from benchmarks import _monitor_faults as faults  # noqa: E402
from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from benchmarks._ratios import Pair, lower_bound, ratio_of, upper_bound  # noqa: E402
from distlab.curriculum import load_curriculum, read_source  # noqa: E402
from distlab.curriculum.choose import Choice  # noqa: E402
from distlab.data.idx_sets import find_files  # noqa: E402
from distlab.monitor.jsonl import read_folder  # noqa: E402
from distlab.monitor.suspected import suspected  # noqa: E402
from distlab.processes.tree import descendants  # noqa: E402
from distlab.runner import Cluster  # noqa: E402
from distlab.training.ddp import PRELOADS  # noqa: E402
from distlab.training.ddp_code import choose_units  # noqa: E402
from distlab.training.ddp_config import Wishes, make_config  # noqa: E402

AT_MOST = {"overhead_share": 0.01, "false_alarms": 0, "leftover_processes": 0}
AT_LEAST = {f"named_{fault.name}": 1 for fault in faults.FAULTS}
BARS = Bars(AT_LEAST, AT_MOST)
result = BARS.line
WITHIN_STEPS, WITHIN_S = 3, 5.0
PAIRS, EPOCHS, STEPS = 5, 3, 20
_PRELOAD = (*PRELOADS, "benchmarks._monitor_cpu")
Costs = tuple[cpu.Cost, cpu.Cost]
"""Of a monitored training, and of the plain one beside it."""


def of_fault(fault: faults.Fault, named: faults.Named) -> Line:
    """Whether the rank was named, soon enough and alone."""
    is_soon = named.steps <= WITHIN_STEPS or named.seconds <= WITHIN_S
    return result(
        f"named_{fault.name}",
        int(named.is_right(fault) and is_soon),
        rank=fault.rank,
        named=list(named.ranks),
        seconds=round(named.seconds, 2),
        steps=named.steps,
        what=[*named.others, *([named.said] if named.said else [])],
    )


def of_costs(pairs: Sequence[Costs]) -> list[Line]:
    """What monitoring takes of a step, both ways."""
    own = [[_own(watched, plain)] for watched, plain in pairs]
    both = [[(watched.total_s, plain.total_s)] for watched, plain in pairs]
    n = len(pairs)
    return [
        result(
            "overhead_share",
            round(ratio_of(own), 5),
            "share",
            upper=round(upper_bound(own), 5),
            n=n,
        ),
        result("monitor_us", _median_us([pair[0][0] for pair in own]), "µs a step"),
        result("step_us", _median_us([pair[0][1] for pair in own]), "µs a step"),
        result(
            "ratio_cpu_monitored",
            round(ratio_of(both), 4),
            "monitored/plain",
            lower=round(lower_bound(both), 4),
            upper=round(upper_bound(both), 4),
            n=n,
        ),
    ]


def _own(watched: cpu.Cost, plain: cpu.Cost) -> Pair:
    """Monitoring's own processor time of a step of all ranks, and the step's."""
    in_parent = max(0.0, watched.parent_s - plain.parent_s)
    return watched.monitor_s + in_parent, watched.ranks_s - watched.monitor_s


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def reference_unit() -> ModuleType:
    """The reference's unit `monitoring`."""
    curriculum = load_curriculum(ROOT)
    unit = read_source(curriculum, curriculum.units["monitoring"], "reference")
    return Choice(source=unit, reference=unit, grafts=(), parts=()).load()


def costs(folder: Path, num_pairs: int, unit: ModuleType) -> tuple[list[Costs], Line]:
    """Pairs of trainings, in either order; and who was named in them."""
    wishes = Wishes(
        world_size=2,
        epochs=EPOCHS,
        dataset="idx",
        global_batch_size=512,
        device="cpu",
        code=("reference",),
    )
    config, units = make_config(wishes, num_gpus=0), choose_units(("reference",))
    faults.write_images(folder / "images", STEPS * config.global_batch_size)
    files = find_files(folder / "images")
    pairs: list[Costs] = []
    alarms: list[str] = []
    with Cluster(preload=_PRELOAD) as cluster:
        for number in range(num_pairs):
            records = folder / f"records{number}"
            order = (None, records) if number % 2 else (records, None)
            found = {
                is_into: cpu.trained(cluster, config, files, units, is_into)
                for is_into in order
            }
            pairs.append((found[records], found[None]))
            named = suspected(read_folder(records), unit, "")
            alarms += [f"rank {rank} in {named}" for rank in named.ranks]
        cluster.settle()
    return pairs, result("false_alarms", len(alarms), what=alarms)


def measure(num_pairs: int) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    before = set(descendants(os.getpid()))
    unit = reference_unit()
    with tempfile.TemporaryDirectory(prefix="distlab-bench-") as temporary:
        folder = Path(temporary)
        images = folder / "few"
        faults.write_images(images, faults.STEPS * faults.BATCH)
        results = [
            of_fault(fault, faults.watched(fault, folder / fault.name, images, unit))
            for fault in faults.FAULTS
        ]
        pairs, alarms = costs(folder, num_pairs, unit)
    left = len(set(descendants(os.getpid())) - before)
    results += [*of_costs(pairs), alarms, result("leftover_processes", left)]
    return report_of("monitor", results)


def text(results: Sequence[Line]) -> list[str]:
    """What is printed without --json."""
    return rows(results, _row)


def _row(line: Line) -> str:
    sure = f"  upper {line['upper']:g}" if "upper" in line else ""
    when = ""
    if "seconds" in line:
        when = f"  rank {line['rank']}: {line['named']} after {line['seconds']} s"
        when += f", {line['steps']} steps"
    told = f"{line['name']:<20} {line['value']:>9g} {line['unit']}{sure}{when}"
    return told + BARS.told(line)


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    report = measure(options.pairs)
    return show(report, text, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
