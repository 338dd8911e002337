"""Run one cell on real processes, watch it to its end, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from distlab.chaos import partition
from distlab.chaos.faults import FIRED, LAUNCHER
from distlab.chaos.ledger import LAUNCH, read_ledgers
from distlab.chaos.matrix import Cell
from distlab.chaos.plan import Setting, as_variable, plan_of
from distlab.curriculum.choose import OVERRIDE
from distlab.launch.agent import TIMES

TRAIN = Path(__file__).with_name("train.py")
SCRIPTS = {"restart": TRAIN, "standby": TRAIN.with_name("train_elastic.py")}
SCRIPTS["elastic"] = SCRIPTS["standby"]
# A process that is started later counts as a restart.
_STAYS = ("--max-restarts", "8", "--freeze-timeout", "5")
LIMIT_S = 180.0  # for one launch; beyond it, it hangs
GRACE_S = 10
MAX_LAUNCHES = 2
_TOKEN = "DISTLAB_CHAOS_FOLDER"
_ENDING_S = 8.0  # data workers look every few seconds whether their rank is there


@dataclass
class ChaosRun:
    """Everything that is known of a finished run; times are on the monotonic clock."""

    codes: list[int] = field(default_factory=list)  # of each launcher
    is_hung: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)  # of all ledgers
    fired: dict[str, Any] | None = None
    launched: list[float] = field(default_factory=list)
    recoveries: list[dict[str, float]] = field(default_factory=list)  # of standbys
    said: list[tuple[float, str]] = field(default_factory=list)  # by the launchers
    logs: list[str] = field(default_factory=list)  # the last lines of each rank
    left: list[str] = field(default_factory=list)  # processes that did not end
    seconds: float = 0.0


def play_cell(
    cell: Cell | None, setting: Setting, folder: Path, script: Path | None = None
) -> ChaosRun:
    """Run the training with the fault of `cell`, or with none, until it has ended.

    `folder` must be empty and on a disk. `script` replaces the script of the mode.
    """
    mode = cell.mode if cell else "restart"
    script = script or SCRIPTS[mode]
    plan = plan_of(cell, setting, str(folder)) if cell else None
    run, begun = ChaosRun(), time.monotonic()
    variables = {**as_variable(plan), _TOKEN: str(folder), OVERRIDE: setting.code}
    command = _command(setting, folder, script, mode)
    if cell and cell.fault.num_nodes > 1:
        fault = cell.fault
        command = partition.inside(fault.cut_s, folder, command, fault.min_nodes)
    num_launches = MAX_LAUNCHES if cell and cell.fault.requeued else 1
    try:
        _launch_up_to(num_launches, command, variables, run, folder)
        run.left = _wait_for_the_end(folder)
    finally:  # after Ctrl-C too
        _kill_all(folder)
    run.seconds = time.monotonic() - begun
    collect(run, folder)
    return run


def collect(run: ChaosRun, folder: Path) -> None:
    """Read everything that the ranks have left in the folder."""
    run.lines = read_ledgers(folder)
    with contextlib.suppress(OSError):
        run.fired = json.loads((folder / FIRED).read_text())
    with contextlib.suppress(OSError):
        rows = (folder / "logs" / TIMES).read_text().splitlines()
        run.recoveries = [json.loads(row) for row in rows]
    for path in sorted((folder / "logs").glob("rank_*.log")):
        run.logs += [
            f"{path.stem}: {line}" for line in path.read_text().splitlines()[-6:]
        ]


def _command(setting: Setting, folder: Path, script: Path, mode: str) -> list[str]:
    size, on_node = setting.num_ranks, setting.num_ranks // setting.num_nodes
    flags = {
        "restart": ("--nproc-per-node", on_node, "--max-restarts", 2),
        "standby": ("--nproc-per-node", on_node, "--standby", 1, *_STAYS),
        "elastic": ("--elastic", f"1:{size}", *_STAYS),
    }
    launch: list[object] = [*flags[mode]]
    launch += ["--grace-period", GRACE_S, "--log-dir", folder / "logs"]
    own = [script, folder, "--setting", setting.as_json()]
    return [sys.executable, "-m", "distlab.launch", *map(str, [*launch, *own])]


def _launch_up_to(
    most: int,
    command: list[str],
    variables: Mapping[str, str],
    run: ChaosRun,
    folder: Path,
) -> None:
    """Launch the job until it succeeds, as a scheduler does after a failure."""
    for number in range(1, most + 1):
        run.launched.append(time.monotonic())
        code = _launch(command, {**variables, LAUNCH: str(number)}, run, folder)
        run.codes.append(code)
        if code == 0 or run.is_hung:
            return
        _wait_for_the_end(folder)


def _launch(
    command: list[str], variables: Mapping[str, str], run: ChaosRun, folder: Path
) -> int:
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    (folder / LAUNCHER).write_text(str(process.pid))
    reader = threading.Thread(target=_read, args=(process, run.said), daemon=True)
    reader.start()
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        run.is_hung = True
        return -signal.SIGKILL
    except KeyboardInterrupt:
        _kill_all(folder)  # the reader would wait for all that can say something
        raise
    finally:
        process.kill()
        process.wait()
        reader.join(_ENDING_S)


def _read(process: subprocess.Popen[str], said: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            said.append((time.monotonic(), line.rstrip()))


def _wait_for_the_end(folder: Path) -> list[str]:
    """Wait until no process of this run is left; return those that don't end."""
    until = time.monotonic() + _ENDING_S
    while (found := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return [f"{process.pid} {process.info['name']}" for process in found]


def _kill_all(folder: Path) -> None:
    """Kill processes until none is left, because one may start another meanwhile."""
    until = time.monotonic() + _ENDING_S
    while (found := _processes(folder)) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def _processes(folder: Path) -> list[psutil.Process]:
    """Return the processes that were started for this folder."""
    return [
        process
        for process in psutil.process_iter(["environ", "name"])
        if (process.info["environ"] or {}).get(_TOKEN) == str(folder)
    ]
