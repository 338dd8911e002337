"""From a solution to its template: marked regions become holes to fill.

A region lies inside a function body; a task may have one in each of several functions:

    ### BEGIN SOLUTION unit.task          # TODO(unit.task)
    #| what to do, never how         →    # what to do, never how
    the code                              raise NotImplementedError("unit.task")
    ### END SOLUTION

A helper that only the solution needs stands between `### BEGIN SOLUTION-ONLY` and
`### END SOLUTION-ONLY` and is left out whole. All else is the same to the byte.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_BEGIN = re.compile(
    r"^(?P<indent> *)### BEGIN SOLUTION (?P<id>[a-z_0-9]+\.[a-z_0-9]+)$"
)
_END = re.compile(r"^ *### END SOLUTION$")
_BEGIN_ONLY = re.compile(r"^ *### BEGIN SOLUTION-ONLY$")
_END_ONLY = re.compile(r"^ *### END SOLUTION-ONLY$")
_LOOKALIKE = re.compile(r"#.*\b(BEGIN|END)\b.*\bSOLUTION", re.IGNORECASE)
_PROMPT = re.compile(r"^ *#\| ?(?P<text>.*)$")


class RegionError(ValueError):
    """A solution's markers are wrong; the message names the line."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """One hole: `first` and `last` are the line numbers of its markers, from 1."""

    id: str
    indent: str
    first: int
    last: int
    prompts: tuple[str, ...]


def find_regions(text: str) -> list[Region]:
    """The regions of a solution, in order.

    Raises:
        RegionError: nested, unclosed, id-less or look-alike markers.
    """
    regions: list[Region] = []
    for kind, first, last, match, lines in _blocks(text):
        if kind == "only":
            continue
        prompts = [m["text"] for m in map(_PROMPT.match, lines) if m]
        regions.append(
            Region(
                id=match["id"],
                indent=match["indent"],
                first=first,
                last=last,
                prompts=tuple(prompts),
            )
        )
    return regions


def make_template(text: str) -> str:
    """The template of a solution: every region replaced by its hole.

    Raises:
        RegionError: see `find_regions`.
    """
    regions = {region.first: region for region in find_regions(text)}
    dropped = {
        first: last for kind, first, last, _, _ in _blocks(text) if kind == "only"
    }
    lines = text.splitlines(keepends=True)
    out: list[str] = []
    number = 1
    while number <= len(lines):
        if number in regions:
            out += _hole(regions[number])
            number = regions[number].last
        elif number in dropped:
            number = dropped[number]
        else:
            out.append(lines[number - 1])
        number += 1
    return "".join(out)


@lru_cache(maxsize=32)
def functions_of(text: str) -> dict[str, tuple[str, ...]]:
    """For each task's id the qualified names of the functions its regions lie in.

    Raises:
        RegionError: a region lies outside every function, or two lie in one.
    """
    spans = list(_functions(ast.parse(text).body, ""))
    found: dict[str, tuple[str, ...]] = {}
    for region in find_regions(text):
        around = [s for s in spans if s[1] <= region.first and region.last <= s[2] + 1]
        if not around:
            raise RegionError(f"line {region.first}: {region.id} is not in a function")
        name = max(around, key=lambda span: span[1])[0]
        if any(name in names for names in found.values()):
            raise RegionError(f"line {region.first}: a second region in {name}")
        found[region.id] = (*found.get(region.id, ()), name)
    return found


def _blocks(
    text: str,
) -> Iterator[tuple[str, int, int, re.Match[str], list[str]]]:
    """Each marked block: kind, first and last line number, opening match, its lines."""
    opened: tuple[str, int, re.Match[str]] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        begin = _BEGIN.match(line) or _BEGIN_ONLY.match(line)
        end = _END.match(line) or _END_ONLY.match(line)
        if begin:
            if opened:
                raise RegionError(f"line {number}: a region inside a region")
            kind = "region" if _BEGIN.match(line) else "only"
            opened = (kind, number, begin)
        elif end:
            if not opened or (opened[0] == "only") != bool(_END_ONLY.match(line)):
                raise RegionError(f"line {number}: an end without its beginning")
            kind, first, match = opened
            yield kind, first, number, match, lines[first : number - 1]
            opened = None
        elif _LOOKALIKE.search(line):
            raise RegionError(f"line {number}: looks like a marker, but is not one")
    if opened:
        raise RegionError(f"line {opened[1]}: the region is never closed")


def _hole(region: Region) -> list[str]:
    lines = [f"# TODO({region.id})"]
    lines += [f"# {prompt}".rstrip() for prompt in region.prompts]
    lines.append(f'raise NotImplementedError("{region.id}")')
    return [f"{region.indent}{line}\n" for line in lines]


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node.lineno, node.end_lineno or node.lineno
            yield from _functions(node.body, f"{name}.")
