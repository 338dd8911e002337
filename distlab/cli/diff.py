"""`distlab diff`: compare a function with the reference's once it has passed."""

from __future__ import annotations

import difflib
import shutil
import sys
from itertools import zip_longest

from distlab.cli.own_course import own_course
from distlab.cli.screen import command, show, warn
from distlab.curriculum import (
    Curriculum,
    Progress,
    SourceError,
    Task,
    UnitSource,
    naming_file,
    read_source,
)
from distlab.curriculum.functions import (
    docstring_span,
    find_function,
    span_of,
    without_markers,
)
from distlab.curriculum.path import last_checked, passed_tasks
from distlab.curriculum.regions import functions_of
from distlab.grading import FAILED
from distlab.paths import shown

_SIDE = 60  # columns that each side must have at least
_STYLES = {"+": "pass", "-": "fail", "@": "rule"}


def diff(name: str = "", *, anyway: bool = False, width: int | None = None) -> int:
    """Print both functions; return 1 as long as the task hasn't passed.

    The default is the task that was checked last.

    Raises:
        CurriculumError: an unknown task.
        SourceError: a file cannot be read or parsed.
    """
    curriculum = own_course()
    progress = Progress(curriculum.root)
    task = curriculum.task(name) if name else last_checked(curriculum, progress)
    if not anyway and task.id not in passed_tasks(curriculum, progress):
        look = command(f"diff {task.number} --anyway")
        entry = progress.read().get("tasks", {}).get(task.id, {})
        how = (
            "has changed since it passed"
            if entry.get("passed")
            else "has not passed yet"
        )
        warn(f"{task.number} {how}; to look anyway: {look}")
        return FAILED
    mine, reference = _both(curriculum, task)
    if mine == reference:
        show(
            [
                (
                    "plain",
                    f"{task.number} {task.id}: yours is identical to the reference's",
                )
            ]
        )
        return 0
    width = width or shutil.get_terminal_size().columns
    is_wide = width >= 2 * _SIDE + 3
    wide = sys.stdout.isatty() and is_wide
    show(side_by_side(mine, reference, width) if wide else unified(mine, reference))
    return 0


def unified(mine: list[str], reference: list[str]) -> list[tuple[str, str]]:
    """Show one above the other, with - and + before lines that only one has."""
    rows = difflib.unified_diff(
        mine, reference, "yours", "the reference", n=1000, lineterm=""
    )
    return [(_STYLES.get(row[:1], "plain"), row) for row in rows]


def side_by_side(
    mine: list[str], reference: list[str], width: int
) -> list[tuple[str, str]]:
    """Show yours on the left and the reference's on the right, row by row."""
    room = (width - 3) // 2
    rows = [("rule", f"{'yours':<{room}} │ the reference")]
    matcher = difflib.SequenceMatcher(a=mine, b=reference, autojunk=False)
    for tag, a1, a2, b1, b2 in matcher.get_opcodes():
        style = "plain" if tag == "equal" else "fail"
        for left, right in zip_longest(mine[a1:a2], reference[b1:b2], fillvalue=""):
            rows.append((style, f"{_cut(left, room):<{room}} │ {_cut(right, room)}"))
    return rows


def _cut(line: str, room: int) -> str:
    return line if len(line) <= room else f"{line[: room - 1]}…"


def _both(curriculum: Curriculum, task: Task) -> tuple[list[str], list[str]]:
    unit = curriculum.units[task.unit]
    reference = read_source(curriculum, unit, "reference")
    names = functions_of(reference.text)[task.id]
    clean = UnitSource(
        unit.name, "reference", reference.path, without_markers(reference.text)
    )
    with naming_file():
        mine = read_source(curriculum, unit, "mine")
    return _functions(mine, names), _functions(clean, names)


def _functions(source: UnitSource, names: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    with naming_file():
        tree = source.tree
    for name in names:
        node = find_function(tree, name)
        if node is None:
            raise SourceError(
                f"{shown(source.path)} has no function {name}", source.path
            )
        first, last = span_of(node)
        told = docstring_span(node)
        own = [
            line.rstrip()
            for number, line in enumerate(source.text.splitlines(), 1)
            if first <= number <= last and number not in told
        ]
        lines += [*([""] if lines else []), *own]
    return lines
