"""The few questions that the script's text answers better than its run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from distlab.audit.places import Place
from distlab.paths import is_users_code

_RANK = re.compile(
    r"\b(local_|global_|node_)?rank\b|get_rank|is_main|is_master|main_process|master|"
    r"is_rank|rank_?zero|RANK\b",
    re.IGNORECASE,
)


@functools.cache
def tree(file: str) -> ast.Module | None:
    """Return the syntax tree of a file, None if it can't be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _nodes(file: str) -> Iterator[ast.AST]:
    """Return all nodes of a file's tree, none if it can't be read."""
    return ast.walk(tree(file) or ast.Module([], []))


def _spans(node: ast.stmt | ast.expr, place: Place) -> bool:
    return node.lineno <= place.line <= (node.end_lineno or node.lineno)


def line(place: Place) -> str:
    """Return the text of a line, without its indentation."""
    try:
        lines = Path(place.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return lines[place.line - 1].strip() if place.line <= len(lines) else ""


def is_under_rank_condition(place: Place) -> bool:
    """Return True if an `if` or a `while` around a line asks for the rank."""
    return any(
        isinstance(node, (ast.If, ast.While, ast.IfExp))
        and _spans(node, place)
        and _asks_for_rank(node.test)
        for node in _nodes(place.file)
    ) or _left_early(place)


def _left_early(place: Place) -> bool:
    """Return True if a statement above, `if rank …: return`, keeps ranks from it."""
    bodies = (
        node.body
        for node in _nodes(place.file)
        if isinstance(node, (ast.FunctionDef, ast.For, ast.While))
        and _spans(node, place)
    )
    return any(
        isinstance(statement, ast.If)
        and statement.lineno < place.line
        and isinstance(statement.body[-1], (ast.Return, ast.Continue, ast.Break))
        and _asks_for_rank(statement.test)
        for body in bodies
        for statement in body
    )


def _asks_for_rank(test: ast.expr) -> bool:
    return _RANK.search(ast.unparse(test)) is not None


def with_around(place: Place, mentions: str) -> Place | None:
    """Return the line of the innermost `with` around a line that mentions a word."""
    found = None
    for node in _nodes(place.file):
        if (
            isinstance(node, ast.With)
            and _spans(node, place)
            and any(mentions in ast.unparse(item) for item in node.items)
        ):
            found = max(found or 0, node.lineno)
    return Place(place.file, found) if found else None


def attribute_set_at(cls: type, name: str) -> Place | None:
    """Return the line of a class's `__init__` that sets an attribute, if one does."""
    code = getattr(getattr(cls, "__init__", None), "__code__", None)
    if code is None or not is_users_code(code.co_filename):
        return None
    return _set_below(Place(code.co_filename, code.co_firstlineno), name)


@functools.cache  # the hooks on a dataset ask for every sample
def _set_below(place: Place, name: str) -> Place | None:
    for node in _nodes(place.file):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            sets = any(isinstance(t, ast.Attribute) and t.attr == name for t in targets)
            if sets and node.lineno >= place.line:
                return Place(place.file, node.lineno)
    return None


def assigned_at(place: Place, keyword: str, mentions: str) -> Place | None:
    """Return the line that computes an argument of the call at `place`.

    That is the last assignment above the call to the name that `keyword` is given, if
    its value mentions `mentions` (a pattern); the call's own line if the argument does.
    """
    for node in _nodes(place.file):
        if isinstance(node, ast.Call) and _spans(node, place):
            for argument in node.keywords:
                if argument.arg == keyword:
                    return _source_of(argument.value, place, mentions)
    return None


def _source_of(value: ast.expr, place: Place, mentions: str) -> Place | None:
    if re.search(mentions, ast.unparse(value)):
        return Place(place.file, value.lineno)
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    names |= {ast.unparse(n) for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    found = None
    for node in _nodes(place.file):
        if isinstance(node, ast.Assign):
            targets, assigned = node.targets, node.value
        elif isinstance(node, ast.AugAssign):
            targets, assigned = [node.target], node.value
        else:
            continue
        told = {ast.unparse(target) for target in targets}
        if told & names and re.search(mentions, ast.unparse(assigned)):
            found = max(found or 0, node.lineno)
    return Place(place.file, found) if found else None
