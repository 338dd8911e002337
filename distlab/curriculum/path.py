"""Where the learner is on the path: which tasks have passed, and which one is next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distlab.curriculum.manifest import Curriculum, Task
from distlab.curriculum.progress import Progress
from distlab.curriculum.regions import functions_of
from distlab.curriculum.units import SourceError, read_source
from distlab.runner.kind import ranks_kind


def passed_tasks(curriculum: Curriculum, progress: Progress) -> set[str]:
    """The ids of the tasks whose code, as it is now, has passed at some time.

    To break a solution on purpose, and to undo that, costs nothing; nor does a changed
    comment. Where the code cannot be read, the last verdict counts.
    """
    entries = progress.read().get("tasks", {})
    return {
        task.id
        for task in curriculum.tasks
        if _counts(curriculum, task, entries.get(task.id, {}))
    }


def is_open_again(curriculum: Curriculum, task: Task, entry: dict[str, Any]) -> bool:
    """Whether a task that had passed is a hole again, after a reset for example."""
    return bool(entry.get("passed")) and _digest(curriculum, task) == ""


def current_task(curriculum: Curriculum, progress: Progress) -> Task:
    """The one that follows the latest to pass; the last of all when all have passed."""
    return next_task(curriculum, progress) or curriculum.tasks[-1]


def last_checked(curriculum: Curriculum, progress: Progress) -> Task:
    """The task that was checked last; where none was, the current one."""
    name = progress.read().get("last", {}).get("task")
    known = (task for task in curriculum.tasks if task.id == name)
    return next(known, None) or current_task(curriculum, progress)


def next_task(
    curriculum: Curriculum, progress: Progress, passed_now: Collection[str] = ()
) -> Task | None:
    """The one that follows the latest to pass; None when all have passed.

    One that passed before and failed when it was checked last comes first. What is in
    `passed_now` has passed even where that could not be written down.
    """
    passed = {*passed_tasks(curriculum, progress), *passed_now}
    entries = progress.read().get("tasks", {})
    done = [task for task in curriculum.tasks if task.id in passed]
    for task in curriculum.tasks:
        entry = entries.get(task.id, {})
        if task.id not in passed and entry.get("passed") and entry.get("fails_now"):
            return task
    if not done:
        return next(iter(remaining(curriculum, passed)), None)
    # Of those that passed at the same moment, the last one of the path.
    latest = max(reversed(done), key=lambda task: _passed_at(entries, task))
    return following(curriculum, passed, latest)


def following(
    curriculum: Curriculum, passed: Collection[str], task: Task
) -> Task | None:
    """The next after `task` that has not passed; else the first one before it."""
    left = remaining(curriculum, {*passed, task.id})
    place = curriculum.tasks.index(task)
    later = [other for other in left if curriculum.tasks.index(other) > place]
    return next(iter(later or left), None)


def is_judged_here(task: Task) -> bool:
    """Return False if a task needs processes, and ours are simulated ranks."""
    return not task.processes or ranks_kind() != "simulated"


def remaining(curriculum: Curriculum, passed: Collection[str]) -> list[Task]:
    """The tasks of the path that have not passed; once all have, the stretch ones.

    Those that can't be judged on this system are no part of it.
    """
    here = filter(is_judged_here, curriculum.tasks)
    left = [task for task in here if task.id not in passed]
    return [task for task in left if not task.stretch] or left


def _passed_at(entries: dict[str, Any], task: Task) -> str:
    """When it first passed; what could not be written down is the newest."""
    return str(entries.get(task.id, {}).get("passed", "~"))


def _counts(curriculum: Curriculum, task: Task, entry: dict[str, Any]) -> bool:
    if not entry.get("passed"):
        return False
    digest = _digest(curriculum, task)
    if digest is None:
        return not entry.get("fails_now")
    if digest in entry.get("passes", []):
        return True
    mine = read_source(curriculum, curriculum.units[task.unit], "mine")
    return mine.digest in entry.get("passing_files", [])


def _digest(curriculum: Curriculum, task: Task) -> str | None:
    """The digest of the learner's code: empty where there is a hole, None if unknown.

    A file that is no Python for the moment takes no pass away.
    """
    unit = curriculum.units[task.unit]
    try:
        functions = functions_of(read_source(curriculum, unit, "reference").text)
        mine = read_source(curriculum, unit, "mine")
        state, _ = mine.state_of(task.id, functions[task.id])
    except (SourceError, ValueError, SyntaxError, KeyError):
        return None
    if state == "missing":
        return None
    return "" if state == "not_started" else mine.function_digest(functions[task.id])
