"""Functions of a unit as text: found by name, cut out whole, markers taken away."""

from __future__ import annotations

import ast
import re

_MARKER = re.compile(r" *(### (BEGIN|END) SOLUTION\b.*|#\|.*)")


def find_function(tree: ast.Module, qualified: str) -> ast.FunctionDef | None:
    """The function called `average` or `Sampler.set_epoch`; of two, the later one."""
    body: list[ast.stmt] = tree.body
    *holders, name = qualified.split(".")
    for holder in holders:
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == holder]
        if not classes:
            return None
        body = classes[-1].body
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[-1] if found else None


def span_of(node: ast.FunctionDef | ast.ClassDef) -> tuple[int, int]:
    """First and last line of a definition, with its decorators."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return first, node.end_lineno or node.lineno


def docstring_span(node: ast.FunctionDef | ast.ClassDef) -> range:
    """The lines of a definition's docstring; empty where there is none."""
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


def body_line(node: ast.FunctionDef) -> int:
    """The line after the docstring; without one, the first line of the body."""
    if ast.get_docstring(node, clean=False) is not None:
        return (node.body[0].end_lineno or node.body[0].lineno) + 1
    return node.body[0].lineno


def without_markers(text: str) -> str:
    """A solution without the markers and prompts of its regions."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not _MARKER.fullmatch(line.rstrip("\n")))
