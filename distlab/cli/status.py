"""`distlab status`: where the learner is on the path."""

from __future__ import annotations

from distlab.cli.check import current_task
from distlab.cli.screen import command, show
from distlab.curriculum import Progress, load_curriculum
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
                checks = state.get(task.id, {}).get("checks", 0)
                used = f"{checks} check{'s' * (checks != 1)}" if checks else ""
                mark, style = ("✓", "pass") if task.id in passed else ("·", "plain")
                text = f"  {mark} {task.number} {task.id:<28} {task.title}"
                lines.append((style, f"{text:<70}{used:>9}".rstrip()))
    left = [task for task in curriculum.tasks if task.id not in passed]
    if left:
        task = current_task(curriculum, progress)
        verdict, _ = look_at(curriculum, task, "mine")
        minutes = sum(task.minutes for task in left)
        lines.append(("plain", f"next: {task.number} at {verdict.place}"))
        lines.append(("dim", f"      {command('watch')}   about {minutes} min to go"))
    else:
        lines.append(("pass", "all there is so far: four equals one, on your own code"))
    show(lines)
    return 0
