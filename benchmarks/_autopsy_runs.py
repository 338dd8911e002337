"""Run one script of the corpus and read the report of `distlab run` on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._autopsy_corpus import APART, Script
from distlab.processes.tree import descendants

ROOT = Path(__file__).parents[1]
WITHOUT_PROGRESS_S = 10.0  # for a script whose rank is stuck in code of its own
_LOOK_S = 0.2
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: the report is None if none was written.

    `exit_code` is None if we had to stop the run.
    """

    exit_code: int | None
    seconds: float
    report: dict[str, Any] | None = None
    output: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.exit_code is None:
            return f"still running after {self.seconds:.0f} s"
        return f"exit code {self.exit_code} after {self.seconds:.0f} s"

    @property
    def status(self) -> str:
        """`deadlock`, `mismatch`, `no-progress`, or nothing without a report."""
        return str((self.report or {}).get("status", ""))

    @property
    def named(self) -> list[int]:
        """The ranks that the report puts the hang down to."""
        return list((self.report or {}).get("ranks_named", []))

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """The report's row for each rank."""
        return {row["rank"]: row for row in (self.report or {}).get("ranks", [])}


def run_and_explain(script: Script, folder: Path, limit_s: float) -> Ended:
    """Run a script through `distlab run`, which reports into `folder`."""
    path = folder / "report.json"
    quiet_s = WITHOUT_PROGRESS_S if script.kind == APART else limit_s
    command = [
        *(sys.executable, "-m", "distlab", "run", "-n", str(script.world_size)),
        *("--no-progress", str(quiet_s), "--hang-report", str(path)),
        str(script.path),
    ]
    ended = run(command, folder, limit_s, until=path if script.kind == APART else None)
    report = json.loads(path.read_text()) if path.exists() else None
    return Ended(
        exit_code=ended.exit_code,
        seconds=ended.seconds,
        report=report,
        output=ended.output,
    )


def run(
    command: list[str],
    folder: Path,
    limit_s: float,
    *,
    until: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command for `limit_s` at most, or until a file exists; leave nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    environment |= {"PYTHONPATH": str(ROOT), **(variables or {})}
    started = time.monotonic()
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=folder
        )
        while time.monotonic() - started < limit_s and process.poll() is None:
            if until is not None and until.exists():
                break
            time.sleep(_LOOK_S)
        exit_code = process.poll()
        seconds = time.monotonic() - started
        _stop(process)
        output.seek(0)
        return Ended(exit_code=exit_code, seconds=seconds, output=output.read())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, and those that it has started and not ended."""
    started = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            for pid in reversed(started):
                if _is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
