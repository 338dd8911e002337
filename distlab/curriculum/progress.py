"""What the learner has done so far: one small JSON file that may be deleted.

It lives in `.distlab/` of the repository, or where DISTLAB_STATE says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class ProgressUnavailableError(OSError):
    """The state folder cannot be written; the verdict holds all the same."""


class Progress:
    """Read and update the progress file; safe against two commands at once."""

    def __init__(self, root: Path) -> None:
        state = os.environ.get("DISTLAB_STATE")
        self.folder = Path(state) if state else root / ".distlab"
        self._path = self.folder / "progress.json"

    def read(self) -> dict[str, Any]:
        """The state as it is now; an unreadable file counts as a fresh start."""
        try:
            data = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def passed(self) -> set[str]:
        """The ids of the tasks that have passed."""
        tasks = self.read().get("tasks", {})
        return {name for name, entry in tasks.items() if entry.get("passed")}

    def record_verdict(self, task_id: str, *, passed: bool, digest: str) -> None:
        """Count a check of a task, and note when it first passed.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        with self._change() as state:
            entry = _entry(state, task_id)
            entry["checks"] = entry.get("checks", 0) + 1
            if passed and not entry.get("passed"):
                entry["passed"] = datetime.now(UTC).isoformat(timespec="seconds")
                entry["digest"] = digest

    def next_hint(self, task_id: str, levels: int) -> int:
        """The hint level to show now: one deeper each time, to the deepest.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        with self._change() as state:
            entry = _entry(state, task_id)
            entry["hint"] = min(levels, entry.get("hint", 0) + 1)
            return int(entry["hint"])

    def record_prediction(self, question: str, answer: str) -> None:
        """Keep what was predicted. It is never graded.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        with self._change() as state:
            state.setdefault("predictions", {})[question] = answer

    @contextlib.contextmanager
    def _change(self) -> Iterator[dict[str, Any]]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                state = self.read()
                yield state
                self._write(state)
        except OSError as error:
            raise ProgressUnavailableError(
                f"progress is not kept: cannot write {self.folder} ({error.strerror})"
            ) from error

    def _write(self, state: dict[str, Any]) -> None:
        # Beside, then renamed: a full disk or Ctrl-C leaves the old file whole.
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="progress")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(state, file, indent=1, sort_keys=True)
            os.replace(name, self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _entry(state: dict[str, Any], task_id: str) -> dict[str, Any]:
    entry: dict[str, Any] = state.setdefault("tasks", {}).setdefault(task_id, {})
    return entry
