"""`--monitor FOLDER`: record all ranks' steps without changing the script.

    ranks ── rank_<r>.jsonl ──▶ the agent of node 0 ──▶ figures.jsonl, Prometheus, …

Because the agent owns the sinks, Prometheus finds the same port after a restart, and
the counters continue.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.monitor import Monitor, Sink, StepRecord
from distlab.monitor.attach import variables
from distlab.monitor.sinks import announced, job_name, open_sinks

LOOK_S = 0.5
_NAMES = {field.name for field in fields(StepRecord)}


class Monitored:
    """The records' folder in a launch; node 0 opens the sinks.

    `job` is the name of the job, by default that of the folder.

    Raises:
        LaunchError: the folder has the records of another run, a place for records is
            unknown, its port is taken, or a library is missing.
    """

    def __init__(
        self, config: LaunchConfig, script: str, job: str | None = None
    ) -> None:
        assert config.monitor is not None
        self.folder = Path(config.monitor).absolute()
        self.lines: list[str] = []
        self._read: dict[Path, int] = {}  # bytes of each file
        self._generation, self._step = 1, 0
        self._monitor: Monitor | None = None
        self._is_over, self._lock = threading.Event(), threading.Lock()
        if config.node:
            return
        run = {
            "tool": "distlab.launch",
            "job": job or job_name(self.folder),
            "dataset": Path(script).name,
            "world_size": config.world_size,
        }
        try:
            records, *others = open_sinks(self.folder, run, config.also)
        except (ValueError, OSError, ImportError) as error:
            said = " ".join(str(error).split())
            raise LaunchError(f"--monitor {config.monitor}: {said}") from error
        self.lines = announced(self.folder, others)
        self._monitor = Monitor(config.world_size, [_Figures(records), *others])
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def variables(
        self, generation: int, inherited: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the environment variables that a rank of this generation needs."""
        self._look()
        if generation > self._generation:
            self._generation = generation
            if self._monitor:
                self._monitor.figures(self._step, {"restarts": generation - 1})
        return variables(self.folder, self._step, inherited)

    def close(self) -> None:
        """Read the rest, and close the sinks."""
        if self._monitor:
            self._is_over.set()
            self._thread.join()
            self._look()
            self._monitor.close()

    def _follow(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for path in sorted(self.folder.glob("rank_*.jsonl")):
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    whole, end, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
                for line in whole.splitlines():
                    self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:  # torn by a rank that was killed
            return
        if isinstance(values, dict) and values.keys() == _NAMES:
            record = StepRecord(**values)
            self._step = max(self._step, record.step)
            if self._monitor:
                self._monitor.hear(record)


class _Figures:
    """A folder without the ranks' records, since the ranks write these themselves."""

    def __init__(self, sink: Sink) -> None:
        self.name, self._sink = sink.name, sink
        self.figures, self.close = sink.figures, sink.close

    def record(self, record: StepRecord) -> None:
        """Do nothing, because the rank has written the record itself."""
