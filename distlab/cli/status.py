"""`distlab status`: where the learner is on the path."""

from __future__ import annotations

from typing import Any

from distlab.cli.check import current_task
from distlab.cli.screen import command, show
from distlab.curriculum import Progress, Task, load_curriculum
from distlab.grading.preflight import look_at

_BAR = 28


def status() -> int:
    """Print the path with what has passed; always exit code 0."""
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    state = progress.read().get("tasks", {})
    passed = progress.passed() & {task.id for task in curriculum.tasks}
    total = len(curriculum.tasks)
    filled = _BAR * len(passed) // total
    lines = [
        ("plain", f"{'█' * filled}{'░' * (_BAR - filled)}  {len(passed)} of {total}")
    ]
    for phase in curriculum.phases:
        lines.append(("plain", f"phase {phase.number} · {phase.title}"))
        for unit in phase.units:
            for task in unit.tasks:
                lines.append(_row(task, state.get(task.id, {})))
    left = [task for task in curriculum.tasks if task.id not in passed]
    if left:
        task = current_task(curriculum, progress)
        verdict, _ = look_at(curriculum, task, "mine")
        minutes = sum(task.minutes for task in left)
        lines.append(("plain", f"next: {task.number} at {verdict.place}"))
        lines.append(("dim", f"      {command('watch')}   about {minutes} min to go"))
    else:
        see = command("demo --code mine")
        lines.append(("pass", "all there is so far: four equals one, on your own code"))
        lines.append(("dim", f"      {see}"))
    show(lines)
    return 0


def _row(task: Task, entry: dict[str, Any]) -> tuple[str, str]:
    checks = entry.get("checks", 0)
    used = f"{checks} check{'s' * (checks != 1)}" if checks else ""
    mark, style = "·", "plain"
    if entry.get("passed"):
        mark, style = "✓", "pass"
        if entry.get("fails_now"):
            mark, style, used = "!", "fail", "fails now"
    text = f"  {mark} {task.number} {task.id:<27} {task.title}"
    return style, f"{text:<69}{used:>10}".rstrip()
