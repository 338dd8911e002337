"""What the learner has done so far: one small JSON file that may be deleted.

It lives in `.distlab/` of the course's folder, or where DISTLAB_STATE says. The copy
of the course in a wheel isn't the learner's, so in its place we use the home directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from distlab.curriculum.manifest import BUNDLED

_DIGESTS = 20  # of code that has passed, per task
_KEPT = ("predictions", "use", "quiz", "hunts", "tests")
"""Tables of what the learner answered or chose; none of it is ever graded."""


class ProgressUnavailableError(OSError):
    """The state folder cannot be written; the verdict holds all the same."""


class Progress:
    """Read and update the progress file; safe against two commands at once."""

    def __init__(self, root: Path) -> None:
        state = os.environ.get("DISTLAB_STATE")
        home = Path.home() if root == BUNDLED else root
        self.folder = Path(state) if state else home / ".distlab"
        self._path = self.folder / "progress.json"

    def read(self) -> dict[str, Any]:
        """The state as it is now; whatever cannot be used in it is left out."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict):
            return {}
        tasks = _table(data.get("tasks"))
        return {
            **data,
            "tasks": {name: _usable(_table(entry)) for name, entry in tasks.items()},
            **{name: _table(data.get(name)) for name in _KEPT},
            "last": _table(data.get("last")),
        }

    def record_verdict(
        self,
        task_id: str,
        *,
        passed: bool,
        digest: str,
        ran: bool = True,
        slug: str = "",
        file_digest: str = "",
        counts: bool = True,
    ) -> None:
        """Count a check of a task, and note when it first passed and if it still does.

        `digest` is that of the task's function, to see later whether it has changed;
        `file_digest` that of the whole file, on whose other functions the verdict may
        depend. `slug` names the misconception, for the hint that fits it. A check that
        could not run, for a syntax error say, takes no pass away; one that does not
        count is only remembered as the latest.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        with self._change() as state:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            last = {"task": task_id, "passed": passed, "at": now, "slug": slug}
            state["last"] = last
            if not counts:
                return
            entry = _entry(state, task_id)
            entry["checks"] = entry.get("checks", 0) + 1
            entry["slug"] = slug
            if ran:
                entry["digest"] = digest
                entry["fails_now"] = not passed
            if passed and not entry.get("passed"):
                entry["passed"] = now
            if ran:  # the last word on this very code
                for key, own in (("passes", digest), ("passing_files", file_digest)):
                    others = [known for known in entry.get(key, []) if known != own]
                    entry[key] = [*others, *([own] * passed)][-_DIGESTS:]

    def next_hint(
        self, task_id: str, levels: int, opens: Callable[[str], int] = lambda _: 0
    ) -> tuple[int, str]:
        """The hint level to show now: one deeper each time, to the deepest.

        `opens` gives the level that fits a verdict's slug, or 0. Where that is deeper
        than what was shown so far, it is opened at once, and the slug comes with it.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        with self._change() as state:
            entry = _entry(state, task_id)
            shown = entry.get("hint", 0)
            slug = str(entry.get("slug", ""))
            fitting = opens(slug) if slug != entry.get("hinted") else 0
            if fitting > shown:
                entry["hint"], entry["hinted"] = min(levels, fitting), slug
                return entry["hint"], slug
            entry["hint"] = min(levels, shown + 1)
            return entry["hint"], ""

    def keep(self, table: str, entries: dict[str, Any]) -> None:
        """Keep answers or choices under `table`; what is None there is taken out.

        Raises:
            ProgressUnavailableError: the file cannot be written.
        """
        assert table in _KEPT, table
        with self._change() as state:
            kept = state.setdefault(table, {})
            kept |= entries
            for name in [name for name, value in entries.items() if value is None]:
                del kept[name]

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
            with open(self.folder / "lock", "w", encoding="utf-8") as lock:
                _wait_for(lock)
                state = self.read()
                if not state:
                    self._put_aside()
                yield state
                self._write(state)
        except OSError as error:
            raise ProgressUnavailableError(
                "we can't save your progress, because we can't write to "
                f"{self.folder} ({error.strerror})"
            ) from error

    def _put_aside(self) -> None:
        """Keep a file that cannot be read: somebody may want to mend it."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path, self.folder / "progress.unreadable.json")

    def _write(self, state: dict[str, Any]) -> None:
        # Beside, then renamed: a full disk or Ctrl-C leaves the old file whole.
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="progress")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(state, file, indent=1, sort_keys=True)
            os.replace(name, self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _wait_for(lock: IO[str]) -> None:
    """Hold the lock on a file until it is closed, on the systems that have locks."""
    if sys.platform == "win32":
        import msvcrt

        while True:  # LK_LOCK would give up after ten seconds
            try:
                msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(0.05)
            else:
                return
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _usable(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry without counts that are none, or a list that is none."""
    types = {"checks": int, "hint": int, "passes": list, "passing_files": list}
    return {k: v for k, v in entry.items() if type(v) is types.get(k, type(v))}


def _entry(state: dict[str, Any], task_id: str) -> dict[str, Any]:
    entry: dict[str, Any] = state.setdefault("tasks", {}).setdefault(task_id, {})
    return entry
