"""A blind set: solutions by somebody who has never seen the checks.

The catalogue grows with the checks, so the grader does well on it. How well it does on
the mistakes of a stranger, only a stranger's solutions can tell. They stand in files
named after their tasks, `<unit>.<task>.toml`:

    [[solution]]
    wrong = "the mean is taken over the ranks without samples, too"
    why = "C2: shows when a rank has no samples"
    change = [["/ self.comm.world_size", "/ ranks"]]

    [[solution]]
    right = "sums with all_gather"
    function = "Trainer.average"
    code = '''
    def average(self, gradients):
        ...
    '''
    imports = "import math"

`change` holds pairs of old and new text; each old text is there exactly once in the
unit's solution. `code` replaces a whole function.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum
from distlab.curriculum.functions import find_function, span_of

_FIELDS = {"wrong", "right", "why", "change", "function", "code", "imports"}


class BlindSetError(ValueError):
    """A solution of the set can't be used; the message names its file and place."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One solution of one task: the whole text of the unit, and what it's about."""

    id: str
    task: str
    title: str
    why: str
    is_wrong: bool
    text: str


def read_set(curriculum: Curriculum, folder: Path) -> list[Foreign]:
    """Read all solutions in a folder and the folders below it.

    Raises:
        BlindSetError: the folder has none, or one of them can't be used.
    """
    known = {task.id: task.unit for task in curriculum.tasks}
    found: list[Foreign] = []
    for path in sorted(folder.rglob("*.toml")):
        if path.stem not in known:
            raise BlindSetError(f"{path}: there is no task {path.stem}")
        unit = curriculum.units[known[path.stem]]
        solution = unit.solution(curriculum.root).read_text(encoding="utf-8")
        found += _solutions_in(path, solution)
    if not found:
        raise BlindSetError(f"{folder} has no files named <unit>.<task>.toml")
    return found


def _solutions_in(path: Path, solution: str) -> Iterator[Foreign]:
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("solution", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BlindSetError(f"{path} is not valid TOML: {error}") from error
    for number, row in enumerate(rows, 1):
        where = f"{path}, solution {number}"
        if unknown := {*row} - _FIELDS:
            raise BlindSetError(f"{where}: {', '.join(sorted(unknown))} means nothing")
        if ("wrong" in row) == ("right" in row):
            raise BlindSetError(f"{where}: it must be either wrong or right")
        try:
            text = _applied(row, solution)
            ast.parse(text)
        except (ValueError, SyntaxError) as error:
            raise BlindSetError(f"{where}: {error}") from error
        yield Foreign(
            id=f"{path.stem}#{number}",
            task=path.stem,
            title=row.get("wrong") or row["right"],
            why=row.get("why", ""),
            is_wrong="wrong" in row,
            text=text,
        )


def _applied(row: dict[str, Any], text: str) -> str:
    for old, new in row.get("change", ()):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    if "code" in row:
        text = _with_function(text, row["function"], textwrap.dedent(row["code"]))
    if "imports" in row:
        future = "from __future__ import annotations\n"
        head, mark, rest = text.rpartition(future)
        text = f"{head}{mark}{row['imports']}\n{rest}"
    return text


def _with_function(text: str, name: str, code: str) -> str:
    """Replace a function; its decorators stay unless the code brings its own."""
    node = find_function(ast.parse(text), name)
    if node is None:
        raise ValueError(f"{name} is not in the solution")
    first, last = span_of(node)
    if not code.lstrip().startswith("@"):
        first = node.lineno
    lines = text.splitlines(keepends=True)
    body = textwrap.indent(code.strip("\n") + "\n", " " * node.col_offset)
    lines[first - 1 : last] = [body]
    return "".join(lines)
