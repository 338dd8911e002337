"""`distlab hint`: go a level deeper each time, starting from the last verdict."""

from __future__ import annotations

from distlab.cli.check import chosen
from distlab.cli.screen import command, show, warn
from distlab.curriculum import (
    Curriculum,
    Progress,
    ProgressUnavailableError,
    Task,
    load_curriculum,
)
from distlab.curriculum.hints import LEVELS, read_hints
from distlab.curriculum.misconceptions import fitting_hint


def hint(name: str = "", *, level: int | None = None) -> int:
    """Print a hint for a task.

    Raises:
        ValueError: an unknown task, or a level that is not 1 to 4.
    """
    curriculum = load_curriculum()
    progress = Progress(curriculum.root)
    task = chosen(curriculum, progress, [name] if name else [])[0]
    if level is not None and not 1 <= level <= len(LEVELS):
        raise ValueError(f"choose a hint level from 1 to {len(LEVELS)}, not {level}")
    slug = ""
    if level is None:
        level, slug = _next_level(progress, task)
    show(lines_of_hint(curriculum, task, level, because=slug))
    return 0


def lines_of_hint(
    curriculum: Curriculum, task: Task, level: int, *, because: str = ""
) -> list[tuple[str, str]]:
    """Return a hint as (style, line) pairs.

    `because` is the slug of the last verdict if we chose the hint to fit it.

    Raises:
        ValueError: there is no such hint for this task.
    """
    text = read_hints(curriculum, task).get(level)
    if not text:
        raise ValueError(f"{task.id} has no hint of level {level}")
    head = f"{task.number} {task.id}   hint {level} of {len(LEVELS)}: "
    lines = [("plain", head + LEVELS[level - 1])]
    if because:
        lines.append(("dim", f"  chosen because of {because}"))
    lines += [("plain", f"  {line}".rstrip()) for line in text.splitlines()]
    if level < len(LEVELS):
        lines.append(("dim", f"  deeper: {command(f'hint {task.number}')}"))
    return lines


def _next_level(progress: Progress, task: Task) -> tuple[int, str]:
    try:
        return progress.next_hint(task.id, len(LEVELS), fitting_hint)
    except ProgressUnavailableError as error:
        warn(str(error))
        return 1, ""
