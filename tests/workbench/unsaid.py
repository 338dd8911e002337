"""Texts of the checks that no verdict can show.

`expect_values` says its own `rule` with a suspect that has none. So without suspects,
or where each of them has a rule, no learner ever reads it.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator

Functions = dict[str, ast.FunctionDef]
"""Of one folder of checks, by name."""


def unsaid_rules(files: dict[str, str]) -> list[str]:
    trees = {
        path: tree_of(path, text)
        for path, text in files.items()
        if path.startswith("distlab/grading/")
    }
    folders = defaultdict[str, Functions](dict)
    for path, tree in trees.items():
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        folders[folder_of(path)] |= {node.name: node for node in nodes}
    found = []
    for path, tree in trees.items():
        for call in calls_of(tree, "expect_values"):
            given = keywords(call)
            functions = folders[folder_of(path)]
            if "rule" in given and not is_said(given.get("suspects"), functions):
                found.append(f"{path}:{call.lineno}: no suspect lacks a rule")
    return found


@functools.cache
def tree_of(path: str, text: str) -> ast.Module:
    """The syntax tree of a file; several rules read it."""
    return ast.parse(text, path)


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def is_said(suspects: ast.expr | None, functions: Functions) -> bool:
    """Whether a suspect without a rule is possible; yes where it cannot be seen."""
    if suspects is None:
        return False
    made = list(suspects_in(suspects, functions))
    return not made or not all(is_text(keywords(call).get("rule")) for call in made)


def suspects_in(node: ast.AST, functions: Functions) -> Iterator[ast.Call]:
    """The calls of Suspect in it, and in the functions that it mentions."""
    reached, left = set[str](), [node]
    while left:
        one = left.pop()
        yield from calls_of(one, "Suspect")
        names = {n.id for n in ast.walk(one) if isinstance(n, ast.Name)} - reached
        reached |= names
        left += [functions[name] for name in names if name in functions]


def calls_of(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Name)
            and inner.func.id == name
        ):
            yield inner


def keywords(call: ast.Call) -> dict[str | None, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords}


def is_text(value: ast.expr | None) -> bool:
    """Whether it is a text, and not empty, for sure."""
    if isinstance(value, ast.Constant):
        return bool(value.value)
    is_constant = isinstance(value, ast.Name) and value.id.isupper()
    return is_constant or isinstance(value, ast.JoinedStr)
