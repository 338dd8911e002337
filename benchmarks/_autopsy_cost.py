"""What recording costs a DDP step: pairs of rounds in the same processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._bars import Bench, Line

ROOT = Path(__file__).parents[1]
RANKS, LAUNCHES, LIMIT_S = 2, 5, 240.0
CALLS_OF_A_STEP = 4  # one for each bucket


def overhead(bench: Bench, launches: int = LAUNCHES) -> list[Line]:
    """The ratio of a step's processor time, which has the bar, and of its wall time.

    Two launches of the same job differ by more than 1 %, so we compare rounds of one
    launch. What torch's flight recorder costs is the difference between calls of two
    launches, one of them without it; we add it to the recorded steps.

    Raises:
        RuntimeError: a launch has failed.
    """
    recorded = [_launch(recorded=True) for _ in range(launches)]
    bare = [_launch(recorded=False) for _ in range(launches)]
    call_s = _seconds_of_a_call(recorded) - _seconds_of_a_call(bare)
    more_s = max(0.0, call_s) * CALLS_OF_A_STEP
    peer = "the same step with recording paused"
    found = {
        name: [
            [(on + more_s, off) for rank in launch for on, off in rank[name]]
            for launch in recorded
        ]
        for name in ("cpu", "clock")
    }
    return [
        bench.ratio("overhead_processor", found["cpu"], peer),
        bench.ratio("overhead_clock", found["clock"], peer),
        bench.line("flight_recorder_call_us", round(1e6 * call_s, 4), "µs"),
    ]


def _seconds_of_a_call(launches: list[list[dict[str, Any]]]) -> float:
    found = [float(rank["call_s"]) for ranks in launches for rank in ranks]
    return statistics.median(found)


def _launch(*, recorded: bool) -> list[dict[str, Any]]:
    """What each rank told, in the order of the ranks."""
    command = [sys.executable, "-m", "distlab.launch", "-n", str(RANKS)]
    command += ["--explain-hangs"] * recorded
    command.append(str(Path(__file__).with_name("_autopsy_step.py")))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    lines = sorted(line for line in done.stdout.splitlines() if "] {" in line)
    return [json.loads(line.partition("] ")[2]) for line in lines]
