"""From a saved file to its verdict: warm watch mode, against spawned processes.

A copy of the course is made in a temporary folder, `distlab watch --json` runs in it,
the reference's code is saved into its template again and again, and the time from the
save to the line with the verdict is taken: 40 times for one task, 10 times for each of
the others, which play the sizes of their own. The peer runs the scenario of the first
task at the same world sizes through torch.multiprocessing.spawn, pair by pair.

Seconds differ by 2.5 between machines, so they are shown and have no bar.

    distlab bench verdict [--json]
    python benchmarks/verdict.py --phase 3 [--json]
"""

from __future__ import annotations

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

from benchmarks._bars import Bench, Line
from benchmarks._ratios import summary
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
BENCH = Bench("verdict", __doc__)


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


def each_task(phase: int) -> list[Line]:
    """Two figures for every other task of the phase."""
    lines = []
    units = load_curriculum(ROOT).phase(phase).units
    for task in (task for unit in units for task in unit.tasks):
        if task.id != TASK:
            has_own_limit = task.time_limit_s != type(task).time_limit_s
            seconds, _ = saves(task.id, 3 if has_own_limit else SAVES_OF_OTHERS)
            for name, value in zip(("p50", "p95"), quantiles(seconds), strict=True):
                name = f"{task.number}_{name}_s"
                lines.append(BENCH.line(name, round(value, 3), "s", task=task.id))
    return lines


def measure(phase: int) -> list[Line]:
    """All figures; those of the other tasks are of this phase."""
    seconds, pairs = saves(TASK, SAVES, PAIRS)
    p50_s, p95_s = quantiles(seconds)
    ratio = summary([[(peer_s, ours_s) for ours_s, peer_s in pairs]])
    more = {"peer": "torch.multiprocessing.spawn", "n": PAIRS}
    cold_s = cold_phase(phase)
    return [
        BENCH.line("warm_p50_s", round(p50_s, 3), "s", n=SAVES, world_sizes=WORLDS),
        BENCH.line("warm_p95_s", round(p95_s, 3), "s", n=SAVES, world_sizes=WORLDS),
        BENCH.line("ratio_spawn_over_warm", round(ratio["value"], 1), "×", **more),
        BENCH.line(f"cold_phase{phase}_s", round(cold_s, 2), "s", n=1),
        *each_task(phase),
    ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, phase=1))
