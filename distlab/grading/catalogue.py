"""Wrong solutions that the autograder must reject, and right ones that it must not.

A mutant is a plausible wrong solution of one task; it must be rejected through the
clause that teaches the point, with the diagnosis that fits, or with none. An
accept-variant is right but written differently; it must pass. Both stand in
`tests/mutants/<unit>.toml`, or `<unit>_<part>.toml`, as the body that replaces the
solution's own:

    [[mutant]]                            [[accept]]
    id = "CO01"                           id = "A01"
    task = "collectives.exchange"         task = "collectives.exchange"
    title = "both ranks send"             title = "isend, then wait"
    clause = "C1"                         body = '''...'''
    slug = "unmatched-send"
    body = '''...'''

Also possible: `function` (which one, where the task has holes in several; or that of
another task of the unit, whose code this task's clauses judge as well), `signature`
(the def line anew), `helper` (code for the end of the file), `limit_s` (how long a
run may take, for what never ends), `hunt` (the number of the milestone after which
`distlab hunt` may hide this mistake in a solution) and `twin` (the right variant that
it is a mistake in; without it, the solution). Where a mistake is a small change to the
solution, `change` says it shorter than a body, as pairs of old and new text:

    change = [["dst=1", "dst=0"]]
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum, CurriculumError
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.regions import find_regions, functions_of
from distlab.grading.verdict import STANDING

FOLDER = Path("tests") / "mutants"
_ID = {"mutant": r"[A-Z]{2}\d{2,3}", "accept": r"A\d{2,3}"}
_REQUIRED = {
    "mutant": {"id", "task", "title", "clause", "slug", "body"},
    "accept": {"id", "task", "title", "body"},
}
_OPTIONAL = {"function", "signature", "helper", "limit_s", "hunt", "twin"}


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
    unit: str = "",
) -> list[Entry]:
    """Every entry of every unit, in the order of the files; or hunts and their twins.

    With `unit` those of its files only.

    Raises:
        CatalogueError: an entry is not usable; one sentence that names it.
    """
    entries: list[Entry] = []
    for path in sorted((folder or curriculum.root / FOLDER).glob("*.toml")):
        if (
            not path.name.startswith(unit) or path.name == "survivors.toml"
        ):  # generated ones, see generated.py
            continue
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CatalogueError(f"{path} is not valid TOML: {error}") from error
        unknown = sorted(set(data) - set(_ID))
        if unknown:
            raise CatalogueError(f"{path}: [[{unknown[0]}]] is not mutant or accept")
        for kind, number, row in _rows(data, hunts_only):
            where = f"{path.name}: {kind} {row.get('id', f'no. {number}')}"
            entries.append(_entry(curriculum, path.stem, kind, row, where))
    _check_ids(entries)
    return entries


def _rows(
    data: dict[str, Any], hunts_only: bool
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The tables of one file: kind, number among those of its kind, content."""
    twins = [row.get("twin") for row in data.get("mutant", [])]
    for kind in _ID:
        for number, row in enumerate(data.get(kind, []), 1):
            if not hunts_only or row.get("hunt") or row.get("id") in twins:
                yield kind, number, row


def _check_ids(entries: list[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            raise CatalogueError(f"{entry.id} is used by two entries")
        seen.add(entry.id)
    for entry in entries:
        if entry.twin and entry.twin not in seen:
            raise CatalogueError(f"{entry.id}: there is no entry {entry.twin}")


# ── one entry, checked ──────────────────────────────────────────────────────────────


def _entry(
    curriculum: Curriculum, unit: str, kind: str, row: dict[str, Any], where: str
) -> Entry:
    if "change" in row:
        row = {**row, "body": _changed(curriculum, row, where)}
        del row["change"]
    _check_keys(kind, row, where)
    if not re.fullmatch(_ID[kind], row["id"]):
        raise CatalogueError(f"{where}: the id must look like {_ID[kind]}")
    known = {field.name for field in fields(Entry)}
    entry = Entry(**{key: value for key, value in row.items() if key in known})
    own = entry.task.partition(".")[0]
    if unit != own and not unit.startswith(f"{own}_"):
        raise CatalogueError(f"{where}: {entry.task} is not a task of {unit}")
    try:
        task = next(t for t in curriculum.tasks if t.id == entry.task)
    except StopIteration:
        raise CatalogueError(f"{where}: there is no task {entry.task}") from None
    if kind == "mutant" and entry.clause not in {**task.clauses, **STANDING}:
        raise CatalogueError(f"{where}: {entry.task} has no clause {entry.clause!r}")
    if entry.slug and entry.slug not in read_misconceptions():
        raise CatalogueError(f"{where}: no misconception is called {entry.slug}")
    _check_text(curriculum, entry, where)
    return entry


def _changed(curriculum: Curriculum, row: dict[str, Any], where: str) -> str:
    """The solution's own body with the row's changes; each old text is there once.

    A line that a change leaves empty is left out.
    """
    if "body" in row:
        raise CatalogueError(f"{where}: a body or a change, not both")
    task, name = str(row.get("task")), str(row.get("function", ""))
    try:
        unit = curriculum.units[task.partition(".")[0]]
        text = unit.solution(curriculum.root).read_text(encoding="utf-8")
        functions = functions_of(text)
        owner = owner_of(functions, task, name)
        place = functions[owner].index(name) if name else 0
    except (KeyError, ValueError):
        raise CatalogueError(f"{where}: {task} has no hole {name}") from None
    region = [r for r in find_regions(text) if r.id == owner][place]
    lines = text.splitlines(keepends=True)[region.first : region.last - 1]
    body = _dedented("".join(line for line in lines if line.lstrip()[:2] != "#|"))
    for old, new in row["change"]:
        if body.count(old) != 1:
            raise CatalogueError(f"{where}: {old!r} is there {body.count(old)} times")
        body = body.replace(old, new)
    return "\n".join(line for line in body.splitlines() if line.strip())


def _check_keys(kind: str, row: dict[str, Any], where: str) -> None:
    missing = sorted(_REQUIRED[kind] - set(row))
    unknown = sorted(set(row) - _REQUIRED[kind] - _OPTIONAL)
    if missing:
        raise CatalogueError(f"{where}: {missing[0]} is missing")
    if unknown:
        raise CatalogueError(f"{where}: {unknown[0]} means nothing here")
    for key, value in row.items():
        if not isinstance(value, int | float if key == "limit_s" else str):
            raise CatalogueError(f"{where}: {key} has the wrong type")


def _check_text(curriculum: Curriculum, entry: Entry, where: str) -> None:
    unit = curriculum.units[entry.task.partition(".")[0]]
    try:
        every = _bodies(unit.solution(curriculum.root))
        bodies = every[owner_of(every, entry.task, entry.function)]
    except (OSError, KeyError) as error:
        raise CurriculumError(f"{entry.task} has no region in its solution") from error
    if entry.function and entry.function not in bodies:
        raise CatalogueError(f"{where}: {entry.task} has no hole in {entry.function!r}")
    own = bodies[entry.function or next(iter(bodies))]
    try:
        parts = [ast.dump(_as_function(entry.body))]
        parts += [ast.dump(ast.parse(_dedented(entry.helper)))]
        parts += [ast.dump(_as_function("pass", entry.signature or "def f():"))]
    except SyntaxError as error:
        raise CatalogueError(f"{where}: {error.msg}: {error.text}") from error
    if parts[0] == own and not entry.helper and not entry.signature:
        raise CatalogueError(f"{where}: that is the solution itself")


@cache
def _bodies(path: Path) -> dict[str, dict[str, str]]:
    """The solution's code of each task, by function: parsed, to be compared."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    found: dict[str, dict[str, str]] = {}
    for task, names in functions_of(text).items():
        regions = [region for region in find_regions(text) if region.id == task]
        codes = ["".join(lines[r.first : r.last - 1]) for r in regions]
        dumps = [ast.dump(_as_function(code)) for code in codes]
        found[task] = dict(zip(names, dumps, strict=True))
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
