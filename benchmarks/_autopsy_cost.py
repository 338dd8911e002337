"""What recording costs: the same training with and without it, launch by launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._ratios import Pair, result_of

ROOT = Path(__file__).parents[1]
RANKS, PAIRS, LIMIT_S = 2, 8, 180.0
AT_MOST = 1.01
"""The bar: recorded steps take at most 1 % longer."""


def overhead(pairs: int = PAIRS) -> list[dict[str, Any]]:
    """The ratio of a step's processor time, which has the bar, and of its wall time.

    The wall time of a busy machine differs from launch to launch by more than 1 %.

    Raises:
        RuntimeError: a launch has failed.
    """
    cpu: list[list[Pair]] = []
    clock: list[list[Pair]] = []
    for number in range(pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {recorded: _launch(recorded=recorded) for recorded in order}
        for name, launches in (("cpu_s", cpu), ("step_s", clock)):
            both = zip(found[True][name], found[False][name], strict=True)
            launches.append(list(both))
    peer = "the same launch without --explain-hangs"
    return [
        result_of("overhead_processor", cpu, peer, AT_MOST),
        result_of("overhead_clock", clock, peer),
    ]


def _launch(*, recorded: bool) -> dict[str, list[float]]:
    """Medians of all ranks, in the order of the ranks."""
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
    ranks = [json.loads(line.partition("] ")[2]) for line in lines]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}
