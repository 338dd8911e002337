"""For which units the whole catalogue was played since they last changed.

`distlab mutants --stamp` notes it in `tests/mutants/verified.toml`, by the digest of
what belongs to the unit alone: its solution, its checks and its catalogue. Comments and
docstrings change no verdict, nor does the order of the entries, and so no digest. What
all units share changes the verdicts of all, and to play all takes half an hour:
`--touched` plays one entry of each unit that is noted as right, and a different one
whenever the shared code changes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeGuard

from distlab.curriculum import Curriculum
from distlab.grading.catalogue import FOLDER, RECORDS, CatalogueError, Entry

NAME = "verified.toml"
_HEAD = """\
# The digest at which a unit's whole catalogue was last played, every entry judged as it
# says: `distlab mutants --stamp` writes it, `--touched` plays what has changed since.
"""


def digest_of(curriculum: Curriculum, unit: str) -> str:
    """Of the unit's solution, checks and catalogue: 12 hexadecimal digits."""
    root = curriculum.root
    codes = [curriculum.units[unit].solution(root)]
    codes += sorted((root / "distlab" / "grading" / "checks" / unit).glob("*.py"))
    catalogue = sorted((root / FOLDER / unit).glob("*.toml"))
    said = [(file.name, _code(_text(file))) for file in codes]
    said += [(file.name, _entries(_text(file))) for file in catalogue]
    return _digest(said)


def unverified(curriculum: Curriculum) -> list[str]:
    """The units that changed since their catalogue was played whole.

    Raises:
        CatalogueError: the notes cannot be read.
    """
    known = _read(curriculum.root / RECORDS / NAME)
    units = curriculum.units
    return [unit for unit in units if known.get(unit) != digest_of(curriculum, unit)]


def touched(curriculum: Curriculum, entries: Iterable[Entry]) -> list[Entry]:
    """Return every entry of the units that changed, and one of each other unit."""
    changed, turn = unverified(curriculum), _turn(curriculum)
    chosen = []
    for unit, own in groupby(entries, key=attrgetter("unit")):
        found = list(own)
        # Entries with a limit never end by themselves.
        quick = [entry for entry in found if not entry.limit_s]
        if unit in changed:
            chosen += found
        elif quick:
            chosen.append(quick[turn % len(quick)])
    return chosen


def _turn(curriculum: Curriculum) -> int:
    """Return a number that changes with the code that all units share."""
    grading = curriculum.root / "distlab" / "grading"
    shared = [f for f in sorted(grading.rglob("*.py")) if "checks" not in f.parts]
    return int(_digest((file.name, _code(_text(file))) for file in shared), 16)


def stamp(
    curriculum: Curriculum, entries: Sequence[Entry], played: Mapping[str, bool]
) -> list[str]:
    """Note each unit whose every entry is right; forget one that has a wrong one.

    `played` says of an entry that was played, by id, whether its verdict was right.
    Returns the names of the units that it noted.
    """
    path = curriculum.root / RECORDS / NAME
    known, noted = _read(path), []
    for unit in curriculum.units:
        own = [played.get(e.id) for e in entries if e.unit == unit]
        if all(own):
            known[unit] = digest_of(curriculum, unit)
            noted.append(unit)
        elif False in own:
            known.pop(unit, None)
    lines = [f'{unit} = "{digest}"\n' for unit, digest in sorted(known.items())]
    path.write_text(_HEAD + "".join(lines), encoding="utf-8")
    return noted


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path} is not valid TOML: {error}") from error


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _code(text: str) -> str:
    """The lines without docstrings and comments; a text that is broken is itself.

    A tree would say it more strictly, and differ between versions of Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return text
    lines = text.splitlines()
    for node in filter(_is_text, nodes):
        lines[node.lineno - 1 : node.end_lineno] = [""] * _height(node)
    return "\n".join(x for x in lines if x.strip() and not x.lstrip().startswith("#"))


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether it is a docstring, or stands as one below what it describes."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _height(node: ast.Expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@cache
def _entries(text: str) -> str:
    try:
        return json.dumps(tomllib.loads(text), sort_keys=True)
    except tomllib.TOMLDecodeError:
        return text


def _digest(said: Iterable[tuple[str, str]]) -> str:
    """Of names and texts; files in two folders may have one name."""
    digest = hashlib.sha256()
    for name, text in said:
        digest.update(f"{name}\n{text}".encode())
    return digest.hexdigest()[:12]
