"""`distlab reset`: a unit's template as it was; the old file is kept beside it."""

from __future__ import annotations

from shlex import quote

from distlab.cli.own_course import own_course
from distlab.cli.screen import show
from distlab.curriculum import CurriculumError, make_template
from distlab.curriculum.fetched import keep_beside, replace_whole
from distlab.paths import shown


def reset(unit_name: str) -> int:
    """Restore the template of a unit.

    Raises:
        CurriculumError: there is no such unit, or the file cannot be written.
    """
    curriculum = own_course()
    unit = curriculum.units.get(unit_name)
    known = ", ".join(curriculum.units)
    if not unit_name:
        raise CurriculumError(f"reset needs the name of a unit: {known}")
    if unit is None:
        raise CurriculumError(f"no unit is called {unit_name!r}; choose one of {known}")
    path = unit.template(curriculum.root)
    fresh = make_template(unit.solution(curriculum.root).read_text(encoding="utf-8"))
    if path.is_file() and path.read_text("utf-8", errors="replace") == fresh:
        show(
            [
                (
                    "plain",
                    f"{shown(path)} hasn't been edited, so there is nothing to reset",
                )
            ]
        )
        return 0
    try:
        kept = keep_beside(path) if path.exists() else None
        replace_whole(path, fresh.encode())
    except OSError as error:
        raise CurriculumError(f"cannot reset {path}: {error.strerror}") from error
    show([("plain", f"{shown(path)} is the original template again")])
    if kept:
        show([("plain", "we kept a copy of your file; to get it back:")])
        show([("plain", f"  cp {quote(shown(kept))} {quote(shown(path))}")])
    task = unit.tasks[0]
    show([("dim", f"next: {task.number} {task.title}")])
    return 0
