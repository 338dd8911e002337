"""`distlab status`: where the learner is on the path."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from distlab.cli.check import current_task, remaining
from distlab.cli.optional import offer
from distlab.cli.screen import command, show
from distlab.curriculum import Curriculum, Progress, Task, load_curriculum
from distlab.grading.preflight import look_at

_BAR = 28
_WIDTH = 79
_PAUSE_DAYS = 14  # after so long one has forgotten where one was


def status(*, now: datetime | None = None) -> int:
    """Print the path with what has passed; always exit code 0."""
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    kept = progress.read()
    state = kept.get("tasks", {})
    emptied = _emptied(curriculum, progress)
    for task in emptied:
        state[task.id] = {**state[task.id], "emptied": True}
    passed = progress.passed() - {task.id for task in emptied}
    core = [task for task in curriculum.tasks if not task.stretch]
    done = sum(task.id in passed for task in core)
    filled = _BAR * done // len(core) if core else 0
    lines = _recap(curriculum, progress, kept.get("last", {}), now or datetime.now(UTC))
    lines.append(
        ("plain", f"{'█' * filled}{'░' * (_BAR - filled)}  {done} of {len(core)}")
    )
    for phase in curriculum.phases:
        lines.append(("plain", f"phase {phase.number} · {phase.title}"))
        units = {unit.name for unit in phase.units}
        tasks = [task for task in curriculum.tasks if task.unit in units]
        lines += [
            _row(task, state.get(task.id, {})) for task in tasks if not task.stretch
        ]
        stretch = [task for task in tasks if task.stretch]
        if stretch:
            lines.append(("dim", "  optional, for whoever wants more:"))
            lines += [_row(task, state.get(task.id, {})) for task in stretch]
    show([*lines, *_next(curriculum, progress, passed)])
    return 0


def _emptied(curriculum: Curriculum, progress: Progress) -> list[Task]:
    """Tasks that had passed and whose function is a hole again."""
    passed, state = progress.passed(), progress.read().get("tasks", {})
    judged = [
        t for t in curriculum.tasks if t.id in passed and state[t.id].get("digest")
    ]
    looks = ((task, look_at(curriculum, task, "mine")[0]) for task in judged)
    return [task for task, verdict in looks if verdict.status == "not_started"]


def _next(
    curriculum: Curriculum, progress: Progress, passed: set[str]
) -> list[tuple[str, str]]:
    open_ones = remaining(curriculum, passed)
    left = [task for task in open_ones if not task.stretch]
    if not left:
        more = offer(curriculum, passed, open_ones[0]) if open_ones else []
        see = command("demo --phase 2 --code mine")
        return [
            ("pass", "all there is so far: 2 × 2 ranks equal one, on your own code"),
            ("dim", f"      {see}"),
            *more,
        ]
    task = current_task(curriculum, progress)
    if task not in left:  # it passed once, and what follows has passed, too
        task = left[0]
    verdict, _ = look_at(curriculum, task, "mine")
    minutes = sum(task.minutes for task in left)
    return [
        ("plain", f"next: {task.number} at {verdict.place}"),
        ("dim", f"      {command('watch')}   about {minutes} min to go"),
    ]


def _recap(
    curriculum: Curriculum, progress: Progress, last: dict[str, Any], now: datetime
) -> list[tuple[str, str]]:
    """After a long pause: what was done last, what is next, and what it is about."""
    try:
        then = datetime.fromisoformat(last["at"])
        days = (now - then).days
        task = next(t for t in curriculum.tasks if t.id == last["task"])
    except (KeyError, TypeError, ValueError, StopIteration):
        return []
    if days < _PAUSE_DAYS:
        return []
    how = "and it passed" if last.get("passed") else "and it did not pass yet"
    following = current_task(curriculum, progress)
    idea = curriculum.units[following.unit].summary
    return [
        ("rule", f"{days} days ago you checked {task.number} {task.title}, {how}."),
        ("rule", f"Next is {following.number}: {following.title}."),
        ("rule", f"The idea of {following.unit}: {idea}."),
        ("plain", ""),
    ]


def _row(task: Task, entry: dict[str, Any]) -> tuple[str, str]:
    checks = entry.get("checks", 0)
    used = f"{checks} check{'s' * (checks != 1)}" if checks else ""
    mark, style = "·", "plain"
    if entry.get("passed"):
        mark, style = "✓", "pass"
        if entry.get("fails_now"):
            mark, style, used = "!", "fail", "last check failed"
        elif entry.get("emptied"):
            mark, style, used = "·", "plain", "passed before, open again"
    text = f"  {mark} {task.number:<4} {task.id:<26} "
    room = _WIDTH - len(text) - (len(used) + 2 if used else 0)
    short = len(task.title) <= room
    title = task.title if short else f"{task.title[: room - 1].rstrip()}…"
    text += title
    return style, f"{text}{used.rjust(_WIDTH - len(text))}" if used else text
