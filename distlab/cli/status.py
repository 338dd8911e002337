"""`distlab status`: show how far the learner has come."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from distlab.cli.optional import offer
from distlab.cli.own_course import own_course
from distlab.cli.screen import command, show
from distlab.curriculum import Curriculum, Progress, Task
from distlab.curriculum.manifest import Route
from distlab.curriculum.path import (
    current_task,
    is_open_again,
    next_task,
    passed_tasks,
    remaining,
)
from distlab.grading.catalogue import read_catalogue
from distlab.grading.preflight import look_at
from distlab.terminal import screen_width

_BAR = 28
_PAUSE_DAYS = 14  # after this long, learners have forgotten where they were


def status(
    *, all_phases: bool = False, route: str = "", now: datetime | None = None
) -> int:
    """Show progress in the current phase, in all phases or on a route; return 0.

    Raises:
        CurriculumError: there is no such route.
    """
    curriculum = own_course()
    progress = Progress(curriculum.root)
    if route:
        show(_route(curriculum, progress, curriculum.route(route)))
        return 0
    kept = progress.read()
    state = kept.get("tasks", {})
    passed = passed_tasks(curriculum, progress)
    current = current_task(curriculum, progress)
    core = [task for task in curriculum.tasks if not task.stretch]
    done = sum(task.id in passed for task in core)
    filled = _BAR * done // len(core) if core else 0
    lines = _recap(curriculum, progress, kept.get("last", {}), now or datetime.now(UTC))
    lines.append(
        ("plain", f"{'█' * filled}{'░' * (_BAR - filled)}  {done} of {len(core)}")
    )
    for phase in curriculum.phases:
        tasks = curriculum.tasks_of(phase.number)
        own = [task for task in tasks if not task.stretch]
        head = f"phase {phase.number} · {phase.title}"
        if not all_phases and current not in tasks:
            count = sum(task.id in passed for task in own)
            lines.append(("dim", f"{head}  {count} of {len(own)}"))
            continue
        lines.append(("plain", head))
        lines += [_row(curriculum, task, state, passed) for task in own]
        stretch = [task for task in tasks if task.stretch]
        lines += [_row(curriculum, task, state, passed) for task in stretch]
    lines += _scores(curriculum, kept)
    show([*lines, *_next(curriculum, progress, passed)])
    return 0


def _route(
    curriculum: Curriculum, progress: Progress, route: Route
) -> list[tuple[str, str]]:
    """Show a route's tasks, the minutes left, and which one is next."""
    state = progress.read().get("tasks", {})
    passed = passed_tasks(curriculum, progress)
    tasks = [task for task in curriculum.tasks if task.id in route.tasks]
    left = [task for task in tasks if task.id not in passed]
    done = len(tasks) - len(left)
    filled = _BAR * done // len(tasks) if tasks else 0
    bar = f"{'█' * filled}{'░' * (_BAR - filled)}  {done} of {len(tasks)}"
    lines = [("plain", f"{bar}  route {route.name} · {route.title}")]
    lines += [_row(curriculum, task, state, passed) for task in tasks]
    if not left:
        return [*lines, ("pass", "you have passed all the tasks on this route")]
    # After a gap it is the task that `start` and `watch` open, if the route has it.
    following = next_task(curriculum, progress)
    task = following if following is not None and following in left else left[0]
    verdict, _ = look_at(curriculum, task, "mine")
    minutes = sum(one.minutes for one in left)
    how = command(f"watch {task.number}")
    lines.append(("plain", f"next on this route: {task.number} at {verdict.place}"))
    return [*lines, ("dim", f"      {how}   about {_duration(minutes)} to go")]


def _duration(minutes: int) -> str:
    """Format minutes, or whole hours from two hours on, so that they read well."""
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


def _scores(curriculum: Curriculum, kept: dict[str, Any]) -> list[tuple[str, str]]:
    """Count the mistakes found in hunts and caught by the learner's own tests."""
    hunts = kept.get("hunts", {}).values()
    lists = [hunt.get("found") for hunt in hunts if isinstance(hunt, dict)]
    found = {id_ for ids in lists if isinstance(ids, list) for id_ in ids}
    parts = []
    if hunts:
        entries = read_catalogue(curriculum, hunts_only=True)
        known = {entry.id for entry in entries if entry.hunt}
        parts.append(f"hunts: {len(found & known)} of {len(known)} found")
    for unit, score in kept.get("tests", {}).items():
        if isinstance(score, dict) and {"caught", "of"} <= set(score):
            caught = f"{score['caught']} of {score['of']}"
            parts.append(f"your tests for {unit}: {caught} mistakes caught")
    return [("plain", part) for part in parts]


def _next(
    curriculum: Curriculum, progress: Progress, passed: set[str]
) -> list[tuple[str, str]]:
    open_ones = remaining(curriculum, passed)
    left = [task for task in open_ones if not task.stretch]
    if not left:
        more = offer(curriculum, passed, open_ones[0]) if open_ones else []
        see = command("demo --phase 4 --code mine")
        return [
            ("pass", "you're done; now train on your own code and survive a SIGKILL:"),
            ("dim", f"      {see}"),
            *more,
        ]
    task = current_task(curriculum, progress)
    verdict, _ = look_at(curriculum, task, "mine")
    minutes = sum(task.minutes for task in left)
    hints = [f"{command('watch')}   about {_duration(minutes)} to go"]
    hints += [f"{command('status --all')}  every phase"]
    if sum(map(len, hints)) + 9 < screen_width():
        hints = ["   ".join(hints)]
    return [
        ("plain", f"next: {task.number} at {verdict.place}"),
        *(("dim", f"      {hint}") for hint in hints),
    ]


def _recap(
    curriculum: Curriculum, progress: Progress, last: dict[str, Any], now: datetime
) -> list[tuple[str, str]]:
    """After a long pause, recall the last task and introduce the next one."""
    try:
        then = datetime.fromisoformat(last["at"])
        days = (now - then).days
        task = next(t for t in curriculum.tasks if t.id == last["task"])
    except (KeyError, TypeError, ValueError, StopIteration):
        return []
    if days < _PAUSE_DAYS:
        return []
    how = "and it passed" if last.get("passed") else "but it hadn't passed yet"
    following = current_task(curriculum, progress)
    idea = curriculum.units[following.unit].summary
    return [
        ("rule", f"{days} days ago you checked {task.number} {task.title}, {how}."),
        ("rule", f"Your next task is {following.number}: {following.title}."),
        ("rule", f"The idea behind {following.unit}: {idea}."),
        ("plain", ""),
    ]


def _row(
    curriculum: Curriculum, task: Task, state: dict[str, Any], passed: set[str]
) -> tuple[str, str]:
    """Format a task's mark, number, title, and number of checks."""
    entry = state.get(task.id, {})
    checks = entry.get("checks", 0)
    used = f"{checks} check{'s' * (checks != 1)}" if checks else ""
    mark, style = "·", "plain"
    if task.id in passed:
        mark, style = "✓", "pass"
    elif is_open_again(curriculum, task, entry):
        used = "passed before, open again"
    elif entry.get("passed"):
        mark, style = "!", "fail"
        used = "last check failed" if entry.get("fails_now") else "changed since"
    text = f"  {mark} {task.number:<4}  " + "optional: " * task.stretch
    room = screen_width() - 1 - len(text) - (len(used) + 2 if used else 0)
    title = task.title
    if len(title) > room:
        title = f"{title[: max(0, room - 1)].rstrip()}…"
    text += title
    return style, f"{text}{used.rjust(screen_width() - 1 - len(text))}".rstrip()
