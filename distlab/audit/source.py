"""The few questions that the script's text answers better than its run."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from distlab.audit.places import Place, is_users

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


def line(place: Place) -> str:
    """Return the text of a line, without its indentation."""
    try:
        lines = Path(place.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return lines[place.line - 1].strip() if place.line <= len(lines) else ""


def is_under_rank_condition(place: Place) -> bool:
    """Return True if an `if` or a `while` around a line asks for the rank."""
    parsed = tree(place.file)
    if parsed is None:
        return False
    for node in ast.walk(parsed):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            end = node.end_lineno or node.lineno
            inside = node.lineno <= place.line <= end
            if inside and _RANK.search(ast.unparse(node.test)):
                return True
    return _left_early(parsed, place)


def _left_early(parsed: ast.Module, place: Place) -> bool:
    """Return True if a statement above, `if rank …: return`, keeps ranks from it."""
    for node in ast.walk(parsed):
        if not isinstance(node, (ast.FunctionDef, ast.For, ast.While)):
            continue
        end = node.end_lineno or node.lineno
        if not node.lineno <= place.line <= end:
            continue
        for statement in node.body:
            if statement.lineno >= place.line or not isinstance(statement, ast.If):
                continue
            leaves = isinstance(
                statement.body[-1], (ast.Return, ast.Continue, ast.Break)
            )
            if leaves and _RANK.search(ast.unparse(statement.test)):
                return True
    return False


def with_around(place: Place, mentions: str) -> Place | None:
    """Return the line of the innermost `with` around a line that mentions a word."""
    found = None
    for node in ast.walk(tree(place.file) or ast.Module([], [])):
        if isinstance(node, ast.With):
            inside = node.lineno <= place.line <= (node.end_lineno or node.lineno)
            if inside and any(mentions in ast.unparse(item) for item in node.items):
                found = max(found or 0, node.lineno)
    return Place(place.file, found) if found else None


def attribute_set_at(cls: type, name: str) -> Place | None:
    """Return the line of a class's `__init__` that sets an attribute, if one does."""
    code = getattr(getattr(cls, "__init__", None), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    for node in ast.walk(tree(code.co_filename) or ast.Module([], [])):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            sets = any(isinstance(t, ast.Attribute) and t.attr == name for t in targets)
            if sets and node.lineno >= code.co_firstlineno:
                return Place(code.co_filename, node.lineno)
    return None


def assigned_at(place: Place, keyword: str, mentions: str) -> Place | None:
    """Return the line that computes an argument of the call at `place`.

    That is the last assignment above the call to the name that `keyword` is given, if
    its value mentions `mentions` (a pattern); the call's own line if the argument does.
    """
    parsed = tree(place.file)
    if parsed is None:
        return None
    for node in ast.walk(parsed):
        end = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.Call) and node.lineno <= place.line <= end:
            for argument in node.keywords:
                if argument.arg == keyword:
                    return _source_of(parsed, argument.value, place, mentions)
    return None


def _source_of(
    parsed: ast.Module, value: ast.expr, place: Place, mentions: str
) -> Place | None:
    if re.search(mentions, ast.unparse(value)):
        return Place(place.file, value.lineno)
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    names |= {ast.unparse(n) for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    found = None
    for node in ast.walk(parsed):
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
