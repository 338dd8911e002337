"""From a saved file to its verdict: warm watch mode, against spawned processes.

A copy of the course is made in a temporary folder, `distlab watch --json` runs in it,
the reference's code is saved into its template again and again, and the time from the
save to the line with the verdict is taken: 40 times for one task, 10 times for each of
the others, which play the sizes of their own. The peer runs the scenario of the first
task at the same world sizes through torch.multiprocessing.spawn, pair by pair.

A task with a time limit of its own forms process groups of torch again: its seconds
are shown and have no bar.

    distlab bench verdict [--json]
    python benchmarks/verdict.py --phase 3 [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from distlab.curriculum import load_curriculum

ROOT = Path(__file__).parents[1]
TASK = "collectives.all_reduce"
WORLDS = (2, 3, 4)
SAVES, SAVES_OF_OTHERS = 40, 10
PAIRS = 3
COURSE = (
    "curriculum.toml",
    "solutions",
    *(phase.folder for phase in load_curriculum(ROOT).phases),
)
BAR_P50_S, BAR_P95_S = 0.4, 0.8


class Watcher:
    """`distlab watch TASK` on a copy of the course, and the clock beside it.

    With `worlds` it plays the task at these sizes only.
    """

    def __init__(self, folder: Path, task: str, worlds: tuple[int, ...] = ()) -> None:
        for name in COURSE:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        unit = load_curriculum(ROOT).units[task.partition(".")[0]]
        self._template = unit.template(folder)
        self._code = unit.solution(folder).read_text()
        sizes = [part for n in worlds for part in ("-n", str(n))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distlab", "watch", task, "--json", *sizes],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._verdict()  # of the pristine template
        self.save(0)  # imports torch here and in the zygote

    def save(self, number: int) -> float:
        """Save the reference with a comment that differs; seconds to its verdict."""
        text = f"{self._code}\n# save {number}\n"
        beside = self._template.with_suffix(".tmp")
        beside.write_text(text)
        started = time.perf_counter()
        beside.replace(self._template)
        verdict = self._verdict()
        seconds = time.perf_counter() - started
        if verdict["status"] != "pass":
            raise SystemExit(f"unexpected verdict: {verdict}")
        return seconds

    def close(self) -> None:
        """End the watcher."""
        self._process.terminate()
        self._process.wait()

    def _verdict(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("distlab watch ended early")
        return json.loads(line)  # type: ignore[no-any-return]


def spawned_rank(rank: int, world_size: int, store: str) -> None:
    """One rank of the peer: the usual way, a process from scratch."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from distlab.comm import TorchComm, Traffic
    from distlab.curriculum import load
    from distlab.grading.checks.collectives.all_reduce import reduce_once
    from distlab.runner import RankContext

    file_store = FileStore(store, world_size)
    comm = TorchComm.from_store(file_store, rank, world_size)
    context = RankContext(comm=comm, traffic=Traffic(), report=lambda value: None)
    reduce_once(context, load("collectives", "reference"), 1)


def spawn_all_worlds() -> float:
    """The peer: seconds for the same scenario at the same world sizes."""
    import torch.multiprocessing as mp

    started = time.perf_counter()
    for world_size in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            spawn: Any = mp.spawn  # type: ignore[attr-defined]
            spawn(spawned_rank, (world_size, f"{folder}/store"), world_size)
    return time.perf_counter() - started


def cold_phase(phase: int) -> float:
    """Seconds of `distlab check --phase N --code reference` from nothing."""
    command = [sys.executable, "-m", "distlab", "check", "--phase", str(phase)]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--code", "reference", "--json"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - started


def saves(task: str, count: int, pairs: int = 0) -> tuple[list[float], list[Any]]:
    """Seconds from save to verdict, `count` times; and beside the peer's, in pairs."""
    with tempfile.TemporaryDirectory() as folder:
        watcher = Watcher(Path(folder), task, WORLDS if pairs else ())
        try:
            seconds = [watcher.save(number + 1) for number in range(count)]
            beside = [
                (watcher.save(count + number + 1), spawn_all_worlds())
                for number in range(pairs)
            ]
        finally:
            watcher.close()
    return seconds, beside


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """The median, and the 95th percentile (of few values, the largest)."""
    return statistics.median(seconds), sorted(seconds)[int(0.95 * len(seconds))]


def each_task(phase: int) -> list[dict[str, Any]]:
    """Two results for every other task of the phase."""
    results: list[dict[str, Any]] = []
    units = load_curriculum(ROOT).phase(phase).units
    for task in (task for unit in units for task in unit.tasks):
        if task.id == TASK:
            continue
        has_bar = task.time_limit_s == type(task).time_limit_s
        values = quantiles(saves(task.id, SAVES_OF_OTHERS if has_bar else 3)[0])
        for name, value, bar in zip(
            ("p50", "p95"), values, (BAR_P50_S, BAR_P95_S), strict=True
        ):
            row = {"name": f"{task.number}_{name}_s", "value": round(value, 3)}
            row |= {"unit": "s", "task": task.id, "bar": bar if has_bar else None}
            results.append(row)
    return results


def measure(phase: int) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    import torch

    seconds, pairs = saves(TASK, SAVES, PAIRS)
    ratio = statistics.median(peer / ours for ours, peer in pairs)
    p50, p95 = quantiles(seconds)
    results = [
        {"name": "warm_p50_s", "value": round(p50, 3), "unit": "s", "n": SAVES},
        {"name": "warm_p95_s", "value": round(p95, 3), "unit": "s", "n": SAVES},
        {
            "name": "ratio_spawn_over_warm",
            "value": round(ratio, 1),
            "unit": "peer/ours",
            "peer": "torch.multiprocessing.spawn",
            "ours_s": round(statistics.median(o for o, _ in pairs), 3),
            "peer_s": round(statistics.median(p for _, p in pairs), 3),
            "n": PAIRS,
        },
        {
            "name": f"cold_phase{phase}_s",
            "value": round(cold_phase(phase), 2),
            "unit": "s",
            "n": 1,
        },
        *each_task(phase),
    ]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__}
    return {
        "bench": "verdict",
        "machine": machine,
        "task": TASK,
        "world_sizes": list(WORLDS),
        "results": results,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--phase", type=int, default=1, help="whose tasks, beside 1.4")
    arguments = parser.parse_args()
    report = measure(arguments.phase)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for result in report["results"]:
        print(f"{result['name']:<24} {result['value']:>8} {result['unit']}")


if __name__ == "__main__":
    main()
