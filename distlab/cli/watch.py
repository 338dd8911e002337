"""`distlab watch`: judge the code at every save.

The ranks' zygote stays warm between saves, so a verdict costs a few forks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distlab.cli.changes import Changes
from distlab.cli.check import (
    check_worlds,
    chosen,
    remember,
    what_helps,
)
from distlab.cli.hint import hint
from distlab.cli.keys import pressed_keys
from distlab.cli.own_course import own_course
from distlab.cli.screen import command, show, waiting
from distlab.cli.trace import keep_timeline, open_page
from distlab.curriculum import Progress, Task, load_curriculum
from distlab.curriculum.hints import LEVELS
from distlab.curriculum.path import following, passed_tasks
from distlab.grading import FAILED, ClauseVerdict, Report, TaskVerdict
from distlab.grading.preflight import look_at
from distlab.grading.report import lines_of
from distlab.paths import shown
from distlab.ranks import new_cluster
from distlab.runner import Cluster, RunCancelledError
from distlab.tutor.last_run import timeline_path

KEYS = "c check again   n next   h hint   t timeline   q quit"
_POLL_MS = 100
_HALF_WRITTEN_S = 0.05  # many an editor empties the file first, then writes it
_UNREADABLE = ("renamed", "syntax-error")  # slugs of a file that lacks the task
_SETTLE_MS = 30  # an editor's save is one or two events, this close together


def watch(name: str = "", *, worlds: Sequence[int] = (), as_json: bool = False) -> int:
    """Judge the task `name`, or the current one, at every save until q or Ctrl-C.

    Raises:
        ValueError: an unknown task.
    """
    curriculum = own_course()
    chosen(curriculum, Progress(curriculum.root), [name] if name else [])
    with new_cluster() as cluster, pressed_keys() as next_key:
        cluster.start(wait=False)
        session = _Session(name, cluster, next_key, worlds=worlds, as_json=as_json)
        saves = _saves(session.files())
        next(saves)  # watching has begun: no save after the first verdict is missed
        session.judge_if_wanted(asked=True)
        for changes in saves:
            key = session.take_key()
            if key == "q":
                break
            session.press(key)
            if changes or key == "c":
                session.judge_if_wanted(asked=key == "c")
    return session.exit_code


class _Session:
    """The state that stays warm between two saves."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        next_key: Callable[[], str],
        *,
        worlds: Sequence[int],
        as_json: bool,
    ) -> None:
        self._name = name
        self._worlds = check_worlds(worlds)
        self._cluster = cluster
        self._as_json = as_json
        self._curriculum = load_curriculum()
        self._files = sorted(
            unit.template(self._curriculum.root)
            for unit in self._curriculum.units.values()
        )
        self._progress = Progress(self._curriculum.root)
        self._task = chosen(self._curriculum, self._progress, [name] if name else [])[0]
        self._changes = Changes()
        self._passed_here: set[str] = set()
        self._hinted: set[str] = set()  # tasks whose last hint has been said
        self._skip_asked = False
        self._under_judgement: dict[Path, tuple[int, int, int]] = {}
        self._judged: dict[Path, tuple[int, int, int]] = {}  # as of the last look
        self._read: dict[str, str] = {}  # the digest of each task's code
        self._code: dict[str, str] = {}  # the same, as of the last look
        self._next_key, self._key = next_key, ""
        self.exit_code = 0
        cluster.is_unwanted = self._is_unwanted

    def take_key(self) -> str:
        """Return the key that was pressed, during the judgement or since."""
        key, self._key = self._key or self._next_key(), ""
        return key

    def press(self, key: str) -> None:
        """Handle the keys, except c and q."""
        if key == "n":
            self._go_on()
        elif key:
            self._skip_asked = False
        if key == "h":
            self._hint()
        if key == "t":
            self._open_timeline()
        if key in ("h", "t"):
            self._say_keys()

    def _hint(self) -> None:
        """Show a hint one level deeper, but the deepest only once."""
        number, deepest = self._task.number, len(LEVELS)
        if self._task.id in self._hinted:
            again = command(f"hint {number} --level {deepest}")
            self._say("dim", "  that was the last hint; to see it again:")
            self._say("dim", f"    {again}")
            return
        hint(number)
        entry = self._progress.read().get("tasks", {}).get(self._task.id, {})
        if entry.get("hint", 0) >= deepest:
            self._hinted.add(self._task.id)

    def _go_on(self) -> None:
        """Go to the next task; if the current one hasn't passed, ask for n twice."""
        task, following = self._task, self._following()
        passed = self._passed() | self._passed_here
        if following is None:
            self._say("dim", "  there are no other tasks left")
            self._say_keys()
        elif task.id not in passed and not self._skip_asked:
            self._skip_asked = True
            self._say(
                "dim", f"  {task.number} hasn't passed yet; press n again to skip it"
            )
            self._say_keys()
        else:
            self._task, self._skip_asked = following, False
            self.judge_if_wanted(asked=True)

    def _following(self) -> Task | None:
        """Return the next open task of the path, or else an open one before it."""
        passed = self._passed() | self._passed_here
        return following(self._curriculum, passed, self._task)

    def _open_timeline(self) -> None:
        path = timeline_path(self._progress)
        if self._task.kind == "plan":
            self._say(
                "dim",
                "  this task has no timeline, because no rank sends anything in it",
            )
        elif path.exists():
            self._say("dim", f"  timeline: {shown(path)}")
            open_page(path)
        else:
            self._say("dim", "  there is no timeline yet; we draw one when a run fails")

    def files(self) -> set[Path]:
        """Watch the learner's files."""
        return set(self._files)

    def judge_if_wanted(self, *, asked: bool) -> None:
        """Judge the task; a newer save or q ends this, as endless loops take long.

        `asked` is for the current task, whatever was saved.
        """
        self._read_files()
        self._skip_asked = False
        try:
            self.judge(asked=asked)
        except RunCancelledError:
            if self._key != "q":
                self._say("dim", "  saved again: starting over")
        else:
            self._judged, self._code = self._under_judgement, dict(self._read)

    def _is_unwanted(self) -> bool:
        self._key = self._key or self._next_key()
        return self._key == "q" or self._states() != self._under_judgement

    def _states(self) -> dict[Path, tuple[int, int, int]]:
        """Return what tells one save of each file from the next.

        The time alone doesn't: a file that is emptied and then written can have the
        same one twice, because the kernel's clock for files ticks every few ms.
        """
        states = {}
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                state = file.stat()
                states[file] = (state.st_mtime_ns, state.st_size, state.st_ino)
        return states

    def judge(self, *, asked: bool) -> None:
        """Judge the task that was saved, after what passed before and has changed."""
        broken = self._broken_file()
        if broken:
            self.exit_code = FAILED
            self._tell(broken)
            return
        passed_again = []
        for earlier in self._changed_since_passing():
            again = self._verdict(earlier)
            if again.status == "fail":
                if not self._name:
                    self._task = earlier  # until it passes again
                self._tell(again)
                return
            remember(self._progress, again, self._worlds)
            passed_again.append(again)
        self._move_on_if_begun()
        if not asked:
            self._turn_to_what_was_edited(passed_again)
        if asked or self._is_saved(self._task):
            self._tell(self._verdict(self._task))
        else:
            self._tell_of_other_files(passed_again)

    def _read_files(self) -> None:
        """Note the files' states and, of those that are new, each task's code.

        Both before anything is judged or said: a save that follows is a new one. If a
        task's code can't be read, its old digest stays.
        """
        while (states := self._states()) != self._under_judgement:
            before, self._under_judgement = self._under_judgement, states
            for task in self._curriculum.tasks:
                file = self._file_of(task)
                if states.get(file) == before.get(file):
                    continue
                verdict, _ = look_at(self._curriculum, task, "mine")
                if verdict.function_digest and verdict.slug not in _UNREADABLE:
                    self._read[task.id] = verdict.function_digest

    def _file_of(self, task: Task) -> Path:
        return self._curriculum.units[task.unit].template(self._curriculum.root)

    def _saved(self) -> list[Path]:
        """Return the files that have changed since the last look."""
        return [
            path
            for path in self._files
            if self._judged.get(path) != self._under_judgement.get(path)
        ]

    def _is_saved(self, task: Task) -> bool:
        return self._file_of(task) in self._saved()

    def _turn_to_what_was_edited(self, passed_again: Sequence[TaskVerdict]) -> None:
        """Take the task whose code was saved, unless one was named on the command line.

        The current one stays if its own code was edited, or no task's code was.
        """
        known = {verdict.id for verdict in passed_again}
        edited = [
            task
            for task in self._curriculum.tasks
            if self._read.get(task.id) != self._code.get(task.id)
            and task.id not in known
        ]
        if self._name or self._task in edited:
            return
        for task in edited:
            verdict, _ = look_at(self._curriculum, task, "mine")
            if verdict.status != "not_started" and verdict.slug not in _UNREADABLE:
                self._task = task
                return

    def _tell_of_other_files(self, passed_again: Sequence[TaskVerdict]) -> None:
        """Say what a save means that doesn't concern the current task."""
        time.sleep(_HALF_WRITTEN_S)
        if self._states() != self._under_judgement:
            raise RunCancelledError
        for verdict in passed_again:
            if self._as_json:
                print(json.dumps(verdict.to_json()), flush=True)
            else:
                show(lines_of(verdict))
        names = ", ".join(path.name for path in self._saved())
        if self._name and not passed_again:
            only = f"we're watching only {self._task.number}"
            self._say("dim", f"  saved {names}, but {only}")
        elif not passed_again:
            self._say("dim", f"  saved {names}, but no task's code has changed in it")
        self._say_keys()

    def _move_on_if_begun(self) -> None:
        """Go to the next task without n if the learner has saved a start on it."""
        following = self._following()
        if self._name or following is None or self._task.id not in self._passed_here:
            return
        verdict, _ = look_at(self._curriculum, following, "mine")
        if verdict.status != "not_started" and not self._has_changed(self._task):
            self._task = following

    def _broken_file(self) -> TaskVerdict | None:
        """Judge a file that isn't valid Python, or lacks a task that had passed."""
        current, passed = self._task.id, self._passed()
        read: set[str] = set()
        # The current task comes first: a typo in it isn't blamed on an earlier one.
        for task in (self._task, *self._curriculum.tasks):
            counts = task.id in passed or task.id == current
            if not counts and task.unit in read:
                continue  # one look tells whether a file is Python
            read.add(task.unit)
            verdict, ready = look_at(self._curriculum, task, "mine")
            if (
                ready is None
                and verdict.status == "fail"
                and (counts or verdict.slug != "renamed")
            ):
                return verdict
        return None

    def _changed_since_passing(self) -> list[Task]:
        """Return other tasks that have passed and whose function has changed."""
        entries = self._progress.read().get("tasks", {})
        return [
            task
            for task in self._curriculum.tasks
            if task is not self._task
            and _passed_last(entries.get(task.id, {}))
            and self._has_changed(task)
        ]

    def _has_changed(self, task: Task) -> bool:
        entry = self._progress.read().get("tasks", {}).get(task.id, {})
        verdict, ready = look_at(self._curriculum, task, "mine")
        return ready is not None and verdict.function_digest not in entry.get(
            "passes", []
        )

    def _verdict(self, task: Task) -> TaskVerdict:
        verdict, ready = look_at(self._curriculum, task, "mine")
        report = Report(code="mine", seed=0, tasks=[verdict])
        if ready is not None:
            from distlab.grading.grade import Grader

            with waiting(f"checking {task.number}", quiet=self._as_json) as sign:
                grader = Grader(
                    self._curriculum,
                    self._cluster,
                    worlds=self._worlds,
                    first=self._changes.failing(task.id),
                    on_first=lambda clause: sign(
                        f"checking {task.number}, {_as_yet(clause)}"
                    ),
                )
                report = grader.grade([task])
        self.exit_code = report.exit_code
        return report.tasks[0]

    def _tell(self, verdict: TaskVerdict) -> None:
        if verdict.status == "fail" and not verdict.ran:
            time.sleep(_HALF_WRITTEN_S)
        if self._states() != self._under_judgement:
            raise RunCancelledError
        entries = self._progress.read().get("tasks", {})
        lost = verdict.status == "fail" and _passed_last(entries.get(verdict.id, {}))
        remember(self._progress, verdict, self._worlds)
        if verdict.status == "pass":
            self._passed_here.add(verdict.id)
        else:
            self._passed_here.discard(verdict.id)
        changed = self._changes.since_last(verdict)
        if self._as_json:
            keep_timeline(self._progress, verdict)
            print(json.dumps(verdict.to_json()), flush=True)
            return
        if lost and verdict.ran:
            self._say("fail", f"{verdict.number} passed before, but fails now:")
        show(lines_of(verdict))
        if changed and verdict.status == "fail":
            self._say("plain", f"  {changed}")
        show(keep_timeline(self._progress, verdict))  # the verdict is known by now
        show(what_helps(self._curriculum, self._progress, verdict, self._worlds))
        self._say_keys()

    def _passed(self) -> set[str]:
        return passed_tasks(self._curriculum, self._progress)

    def _say_keys(self) -> None:
        self._say("dim", f"  watching your files   {KEYS}")
        self._say("plain", "")

    def _say(self, style: str, line: str) -> None:
        if not self._as_json:
            show([(style, line)])


def _passed_last(entry: dict[str, Any]) -> bool:
    """Return True if a task has passed, and did so when it was judged last."""
    return bool(entry.get("passed")) and not entry.get("fails_now")


def _as_yet(clause: ClauseVerdict) -> str:
    """Say what we know about the clause that failed last, while we judge the others."""
    return f"{clause.id} {'passes now' if clause.status == 'pass' else 'not yet'}"


def _saves(files: set[Path]) -> Iterator[set[Any]]:
    """Yield a set of changes at each save, and sometimes an empty one for the keys."""
    from watchfiles import watch as watch_files

    # The folders, because many an editor saves a new file and renames it.
    names = {file.name for file in files}
    return watch_files(
        *{file.parent for file in files},
        watch_filter=lambda _, path: Path(path).name in names,
        debounce=_SETTLE_MS,
        step=_SETTLE_MS // 3,
        rust_timeout=_POLL_MS,
        yield_on_timeout=True,
        recursive=False,
        raise_interrupt=True,
    )
