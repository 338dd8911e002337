"""Wrong solutions that the autograder must reject, and right ones that it must not.

A mutant is a plausible wrong solution of one task; it must be rejected through the
clause that teaches the point, with the diagnosis that fits, or with none. An
accept-variant is right but written differently; it must pass. Those of one task stand
in `curriculum/mistakes/<unit>/<task>.toml`, under their names. Most are a small change
to the solution, as pairs of old and new text (changes.py); the others say the whole
body:

    [CO01]                                  [A01]
    title = "both ranks send"               title = "isend, then wait"
    rejected = "C1 unmatched-send"          body = '''...'''
    change = [["recv(", "send("]]

`rejected` names the clause, and the misconception where a diagnosis is expected.

Also possible: `function` (which one, where the task has holes in several; or that of
another task of the unit, whose code this task's clauses judge as well), `signature`
(the def line anew), `helper` (code for the end of the file), `limit_s` (how long a
run may take, for what never ends), `hunt` (the number of the milestone after which
`distlab hunt` may hide this mistake in a solution), `twin` (the right variant that it
changes; without it, the solution) and `stressor` (under which of STRESSORS alone it
fails, one or several names).
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum, CurriculumError, Task
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.regions import find_regions, functions_of
from distlab.grading.changes import with_changes
from distlab.grading.verdict import STANDING

FOLDER = Path("distlab") / "curriculum" / "mistakes"
RECORDS = Path("tests") / "mutants"
"""How the grader judges them: the stamps, the survivors, the counts."""
_MUTANT, _ACCEPT = r"[A-Z]{2}\d{2,3}", r"A\d{2,3}"
_TEXTS = {
    "title",
    "rejected",
    "body",
    "function",
    "signature",
    "helper",
    "hunt",
    "twin",
    "stressor",
}

STRESSORS = {
    "twice": "called twice in one process, the second time with other data",
    "models": "a model with tied, frozen and unused parameters",
    "uneven": "ranks have unequal numbers of samples, microbatches or elements",
    "strided": "a tensor is a non-contiguous view of the caller's memory",
    "empty": "a tensor has no elements, or no dimensions",
    "dtype": "a tensor has another dtype",
    "saved-input": "a layer saves its input for backward",
    "non-finite": "one rank has a value that is inf or nan",
    "local-rank": "the local rank is not the rank",
    "subgroup": "the communicator is a group's: other ranks, or no rank 0",
    "error": "a call raises before, or after, the first message",
    "whose-work": "one rank does the work of the others",
    "budget-floor": "less is sent, computed or kept than the result needs",
}
"""Under what a solution may fail that is right in the common case: see stressors.py."""


class CatalogueError(ValueError):
    """An entry of the catalogue cannot be used; the message names file and entry."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One solution of one task, wrong (it names a clause) or right (it names none)."""

    id: str
    task: str
    title: str
    body: str
    clause: str = ""
    slug: str = ""
    function: str = ""
    signature: str = ""
    helper: str = ""
    limit_s: float = 0.0
    hunt: str = ""
    twin: str = ""
    stressor: str = ""

    @property
    def unit(self) -> str:
        """The unit of its task."""
        return self.task.partition(".")[0]

    @property
    def is_mutant(self) -> bool:
        """Whether it must be rejected."""
        return bool(self.clause)

    def applied_to(self, solution: str) -> str:
        """The solution's text with this entry's body in place of the task's own."""
        functions = functions_of(solution)
        owner = owner_of(functions, self.task, self.function)
        names = functions[owner]
        regions = [r for r in find_regions(solution) if r.id == owner]
        place = names.index(self.function) if self.function else 0
        region = regions[place]
        lines = solution.splitlines(keepends=True)
        body = textwrap.indent(_dedented(self.body), region.indent)
        lines[region.first - 1 : region.last] = [body]
        if self.signature:
            first, last = _signature_lines(solution, names[place])
            lines[first - 1 : last] = [_dedented(self.signature)]
        text = "".join(lines)
        return f"{text}\n\n{_dedented(self.helper)}" if self.helper else text


def owner_of(functions: Mapping[str, Collection[str]], task: str, function: str) -> str:
    """The task in whose region `function` is; "" is the task's own first one."""
    return next((o for o, names in functions.items() if function in names), task)


def read_catalogue(
    curriculum: Curriculum,
    folder: Path | None = None,
    *,
    hunts_only: bool = False,
    unit: str = "*",
) -> list[Entry]:
    """Every entry of every unit, in the order of the files; or hunts and their twins.

    With `unit` those of its tasks only.

    Raises:
        CatalogueError: an entry is not usable; one sentence that names it.
    """
    folder = folder or curriculum.root / FOLDER
    if not folder.is_dir():  # a learner's copy of the course, without distlab's code
        folder = Path(__file__).parents[2] / FOLDER
    files = sorted(folder.glob(f"{unit}/*.toml"))
    entries = [e for path in files for e in _entries_of(curriculum, path, hunts_only)]
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            raise CatalogueError(f"{entry.id} is used by two entries")
        seen.add(entry.id)
    return entries


def _entries_of(
    curriculum: Curriculum, path: Path, hunts_only: bool
) -> Iterator[Entry]:
    """The entries of one task's file."""
    name = f"{path.parent.name}/{path.name}"
    try:
        rows = _rows(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path} is not valid TOML: {error}") from error
    task = next(
        (t for t in curriculum.tasks if t.id == f"{path.parent.name}.{path.stem}"), None
    )
    if task is None:
        raise CatalogueError(f"{name}: there is no such task")
    hunts = [r for r in rows.values() if isinstance(r, dict) and "hunt" in r]
    twins = {row.get("twin") for row in hunts}
    for id_, row in rows.items():
        where = f"{name}: {id_}"
        if not isinstance(row, dict) or not re.fullmatch(f"{_MUTANT}|{_ACCEPT}", id_):
            raise CatalogueError(f"{where}: no entry is called so")
        if not hunts_only or "hunt" in row or id_ in twins:
            yield _entry(curriculum, task, id_, rows, where)


@cache
def _rows(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


# ── one entry, checked ──────────────────────────────────────────────────────────────


def _entry(
    curriculum: Curriculum, task: Task, id_: str, rows: dict[str, Any], where: str
) -> Entry:
    row = rows[id_]
    _check_keys(id_, row, where)
    clause, _, slug = row.get("rejected", "").partition(" ")
    if clause and clause not in {**task.clauses, **STANDING}:
        raise CatalogueError(f"{where}: {task.id} has no clause {clause!r}")
    if slug and slug not in read_misconceptions():
        raise CatalogueError(f"{where}: no misconception is called {slug}")
    twin = rows.get(row.get("twin", ""), {})
    if "twin" in row and not twin:
        raise CatalogueError(f"{where}: there is no entry {row['twin']}")
    for stressor in row.get("stressor", "").split():
        if stressor not in STRESSORS or not clause:
            raise CatalogueError(f"{where}: {stressor!r} is no stressor of a wrong one")
    own = _own_body(curriculum, task.id, row.get("function", ""), where)
    body = row.get("body") or _changed(row, _changed(twin, own), where)
    given = {key: row[key] for key in {*row} - {"rejected", "change"}}
    entry = Entry(
        **given | {"id": id_, "task": task.id, "body": body},
        clause=clause,
        slug=slug,
    )
    _check_text(entry, own, where)
    return entry


def _changed(row: dict[str, Any], body: str, where: str = "") -> str:
    try:
        return row.get("body") or with_changes(body, row.get("change", ()))
    except ValueError as error:
        raise CatalogueError(f"{where}: {error}") from None


def _check_keys(id_: str, row: dict[str, Any], where: str) -> None:
    for key, value in row.items():
        if key not in _TEXTS | {"change", "limit_s"}:
            raise CatalogueError(f"{where}: {key} means nothing here")
        if key == "change":
            fits = isinstance(value, list) and all(map(_is_pair, value))
        else:
            fits = isinstance(value, str if key in _TEXTS else int | float)
        if not fits:
            raise CatalogueError(f"{where}: {key} has the wrong type")
    if "title" not in row:
        raise CatalogueError(f"{where}: title is missing")
    if ("body" in row) == ("change" in row):
        raise CatalogueError(f"{where}: a body or a change, one of the two")
    if bool(re.fullmatch(_MUTANT, id_)) != ("rejected" in row):
        raise CatalogueError(
            f"{where}: a wrong one has two letters and `rejected`, a right one neither"
        )


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(text, str) for text in value)
    )


def _own_body(curriculum: Curriculum, task: str, function: str, where: str) -> str:
    """What the solution has in that hole."""
    unit = curriculum.units[task.partition(".")[0]]
    try:
        bodies = _bodies(unit.solution(curriculum.root))
    except OSError as error:
        raise CurriculumError(f"{task} has no region in its solution") from error
    owner = owner_of({t: [*b] for t, b in bodies.items()}, task, function)
    if owner not in bodies:
        raise CurriculumError(f"{task} has no region in its solution")
    if function and function not in bodies[owner]:
        raise CatalogueError(f"{where}: {task} has no hole in {function!r}")
    return bodies[owner][function or next(iter(bodies[owner]))]


def _check_text(entry: Entry, own: str, where: str) -> None:
    try:
        body = _as_function(entry.body)
        if entry.helper:
            ast.parse(_dedented(entry.helper))
        if entry.signature:
            _as_function("pass", entry.signature)
    except SyntaxError as error:
        raise CatalogueError(f"{where}: {error.msg}: {error.text}") from error
    changes_more = entry.helper or entry.signature
    if not changes_more and _is_same(body, _own_function(own)):
        raise CatalogueError(f"{where}: that is the solution itself")


@cache
def _own_function(body: str) -> ast.Module:
    return _as_function(body)


def _is_same(one: object, other: object) -> bool:
    """Whether two trees are the same code; most are found to differ soon."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        fields = one._fields
        return all(
            _is_same(getattr(one, name, None), getattr(other, name, None))
            for name in fields
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


@cache
def _bodies(path: Path) -> dict[str, dict[str, str]]:
    """The solution's code of each task, by function, without its prompts."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    found: dict[str, dict[str, str]] = {}
    for task, names in functions_of(text).items():
        regions = [region for region in find_regions(text) if region.id == task]
        codes = [lines[r.first : r.last - 1] for r in regions]
        kept = ["".join(line for line in c if line.lstrip()[:2] != "#|") for c in codes]
        found[task] = dict(zip(names, map(_dedented, kept), strict=True))
    return found


def _as_function(body: str, head: str = "def f():") -> ast.Module:
    return ast.parse(_dedented(head) + textwrap.indent(_dedented(body), "    "))


def _signature_lines(text: str, name: str) -> tuple[int, int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name.split(".")[-1]:
            return node.lineno, node.body[0].lineno - 1
    raise CatalogueError(f"{name} is not in the solution")


def _dedented(text: str) -> str:
    return textwrap.dedent(text).strip("\n") + "\n"
