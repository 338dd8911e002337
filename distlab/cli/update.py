"""`distlab update`: move the learner's code into newer templates; keep old files.

If the course came from a wheel, all other files are renewed first.
"""

from __future__ import annotations

from distlab.cli.own_course import own_course
from distlab.cli.screen import show
from distlab.curriculum import (
    Curriculum,
    CurriculumError,
    Unit,
    load_curriculum,
    make_template,
    naming_file,
    read_source,
)
from distlab.curriculum.carry import Carried, carry, is_current
from distlab.curriculum.fetched import is_fetched, keep_beside, renew, replace_whole
from distlab.paths import shown


def update(unit_name: str = "") -> int:
    """Renew the template of one unit, or of all, around the learner's own code.

    Raises:
        CurriculumError: there is no such unit, or we can't write a file.
        SourceError: a file isn't valid Python. In that case, we change nothing.
    """
    curriculum = own_course(complain=False)
    if unit_name and unit_name not in curriculum.units:
        known = ", ".join(curriculum.units)
        raise CurriculumError(f"no unit is called {unit_name!r}; choose one of {known}")
    renewed = _renew_all_else(curriculum)
    curriculum = load_curriculum(curriculum.root)
    units = [u for u in curriculum.units.values() if unit_name in ("", u.name)]
    work = [(unit, _renewed(curriculum, unit)) for unit in units]  # all, or none
    changed = [(unit, carried) for unit, carried in work if carried]
    for unit, carried in changed:
        _write(curriculum, unit, carried)
    if not changed and not renewed:
        show([("plain", "your files already have the newest templates")])
    return 0


def _renew_all_else(curriculum: Curriculum) -> bool:
    """Bring a copied course to the wheel's version; return True if that changed it."""
    if not is_fetched(curriculum.root):
        return False
    for unit in curriculum.units.values():
        if unit.template(curriculum.root).exists():
            _read_mine(curriculum, unit)
    try:
        done = renew(curriculum.root)
    except OSError as error:
        raise CurriculumError(
            f"cannot update {error.filename}: {error.strerror}"
        ) from error
    if done.written:
        show([("plain", f"{len(done.written)} files of the course are new")])
    for kept in done.kept:
        show([("dim", f"  you had edited one of them; we kept it as {kept}")])
    return bool(done.written or done.removed)


def _renewed(curriculum: Curriculum, unit: Unit) -> Carried | None:
    """Return the unit's new text, or nothing if it is current."""
    solution = read_source(curriculum, unit, "reference").text
    path = unit.template(curriculum.root)
    if not path.exists():
        return Carried(text=make_template(solution))
    mine = _read_mine(curriculum, unit)
    return None if is_current(mine, solution) else carry(mine, solution)


def _read_mine(curriculum: Curriculum, unit: Unit) -> str:
    """Read the learner's file, before we change any.

    Raises:
        SourceError: the file isn't valid Python.
    """
    with naming_file("; nothing was changed"):
        source = read_source(curriculum, unit, "mine")
        source.tree  # noqa: B018 - says in one sentence where it is no Python
    return source.text


def _write(curriculum: Curriculum, unit: Unit, carried: Carried) -> None:
    path = unit.template(curriculum.root)
    try:
        kept = keep_beside(path) if path.exists() else None
        replace_whole(path, carried.text.encode())
    except OSError as error:
        raise CurriculumError(f"cannot update {path}: {error.strerror}") from error
    numbers = {task.id: task.number for task in unit.tasks}
    show([("plain", f"{shown(path)} is new")])
    if carried.carried:
        names = ", ".join(numbers.get(task, task) for task in carried.carried)
        show([("plain", f"  it contains your code: {names}")])
    if carried.added:
        show([("plain", f"  and what you added: {', '.join(carried.added)}")])
    for task in carried.heads:
        number = numbers.get(task, task)
        show(
            [
                (
                    "rule",
                    f"  {number}: the docstring or signature changed, so read it again",
                )
            ]
        )
    if carried.lost:
        show(
            [
                (
                    "fail",
                    "  the template changed these, so your version is only in the old "
                    "file:",
                )
            ]
        )
        show([("fail", f"    {', '.join(carried.lost)}")])
    if kept:
        show([("dim", f"  we kept the old file as {shown(kept)}")])
