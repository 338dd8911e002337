"""The clauses' wording, which `curriculum.toml` has, written where learners read it.

A clause is worded once, in the manifest. Docstrings in `solutions/` and the table of a
guide page repeat it, so `distlab templates` writes it there anew:

    C1 Every rank has the sum, and the sums are bit for bit the same.
    C2 The sum is in the tensor that the caller passed.

A line that begins with a clause's name stands for the whole clause, and the lines that
follow further to the right belong to it. The task is the one whose region comes next,
unless its number stands before the name, as in `3.22 C1`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from distlab.curriculum.manifest import CurriculumError, Task, Unit
from distlab.curriculum.regions import find_regions

_WIDTH = 88
_CLAUSE = re.compile(r"(?P<lead> *(?:(?P<number>\d\.\d+) )?)(?P<name>C\d) ")
_TABLE = ("| clause | what must hold |\n", "|---|---|\n")


def fill_docstrings(text: str, unit: Unit) -> str:
    """Return the source of a solution with each clause worded as in the manifest.

    Raises:
        RegionError: the solution's markers are wrong.
        CurriculumError: the source names a clause that its task doesn't have.
    """
    by_number = {task.number: task for task in unit.tasks}
    by_id = {task.id: task for task in unit.tasks}
    regions = find_regions(text)
    lines = text.splitlines(keepends=True)
    out: list[str] = []
    task: Task | None = None
    position = 0
    while position < len(lines):
        found = _CLAUSE.match(lines[position])
        if not found:
            task = None
            out.append(lines[position])
            position += 1
            continue
        position += 1
        column = found.start("name")
        while position < len(lines) and _indent(lines[position]) > column:
            position += 1
        if found["number"]:
            task = by_number.get(found["number"])
        elif task is None:
            after = (by_id[r.id] for r in regions if r.first > position)
            task = next(after, None)
        name = found["name"]
        if task is None or name not in task.clauses:
            raise CurriculumError(f"line {position}: no task has this clause: {name}")
        out += _paragraph(found["lead"] + name, column, task.clauses[name])
    return "".join(out)


def fill_guide(text: str, unit: Unit) -> str:
    """Return a guide page whose table of clauses is that of the manifest."""
    lines = text.splitlines(keepends=True)
    if _TABLE[0] not in lines:
        return text
    first = last = lines.index(_TABLE[0])
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    return "".join([*lines[:first], *_TABLE, *_rows(unit), *lines[last:]])


def _rows(unit: Unit) -> Iterator[str]:
    for task in unit.tasks:
        for name, text in task.clauses.items():
            yield f"| {task.number} {name} | {text} |\n"


def _paragraph(label: str, column: int, text: str) -> list[str]:
    body = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label} ",
        subsequent_indent=" " * (column + 3),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{line}\n" for line in body]


def _indent(line: str) -> int:
    """How far a line is indented; -1 where it is empty."""
    return len(line) - len(line.lstrip(" ")) if line.strip() else -1
