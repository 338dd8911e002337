"""From a saved file to its verdict: warm watch mode, against spawned processes.

A copy of the course is made in a temporary folder, `distlab watch --json` runs in it,
the reference's code is saved into its template again and again, and the time from the
save to the line with the verdict is taken, 40 times. The peer runs the scenario of the
task at the same world sizes through torch.multiprocessing.spawn, pair by pair. Then
each phase is checked from nothing, with `distlab check --phase`.

Seconds differ by 2.5 between machines, so they are shown and have no bar; the ratio of
the peer to ours has one.

    distlab bench verdict [--json]
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
SAVES, PAIRS = 40, 3
COURSE = (
    "curriculum.toml",
    "solutions",
    *(phase.folder for phase in load_curriculum(ROOT).phases),
)
BENCH = Bench("verdict", __doc__, at_least={"ratio_spawn_over_warm": 50})


class Watcher:
    """`distlab watch` on a copy of the course, and the clock beside it."""

    def __init__(self, folder: Path) -> None:
        for name in COURSE:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        unit = load_curriculum(ROOT).units[TASK.partition(".")[0]]
        self._template = unit.template(folder)
        self._code = unit.solution(folder).read_text()
        sizes = [part for n in WORLDS for part in ("-n", str(n))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distlab", "watch", TASK, "--json", *sizes],
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
    return round(time.perf_counter() - started, 2)


def saves() -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds from save to verdict; and beside the peer's, in pairs."""
    with tempfile.TemporaryDirectory() as folder:
        watcher = Watcher(Path(folder))
        try:
            seconds = [watcher.save(number + 1) for number in range(SAVES)]
            return seconds, [
                (watcher.save(SAVES + number + 1), spawn_all_worlds())
                for number in range(PAIRS)
            ]
        finally:
            watcher.close()


def measure() -> list[Line]:
    """All figures."""
    seconds, pairs = saves()
    p50_s, p95_s = statistics.median(seconds), sorted(seconds)[int(0.95 * SAVES)]
    ratio = summary([[(peer_s, ours_s) for ours_s, peer_s in pairs]])
    more = {"peer": "torch.multiprocessing.spawn", "n": PAIRS}
    phases = [phase.number for phase in load_curriculum(ROOT).phases]
    return [
        BENCH.line("warm_p50_s", round(p50_s, 3), "s", n=SAVES),
        BENCH.line("warm_p95_s", round(p95_s, 3), "s", n=SAVES),
        BENCH.line("ratio_spawn_over_warm", round(ratio["value"], 1), "×", **more),
        *(BENCH.line(f"cold_phase{n}_s", cold_phase(n), "s", n=1) for n in phases),
    ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure))
