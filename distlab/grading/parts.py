"""Which of a unit's other tasks a task's own code builds on."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def parts_used(
    tree: ast.Module, task: str, functions: Mapping[str, str]
) -> tuple[str, ...]:
    """The other tasks whose functions `task`'s function mentions, directly or not.

    `functions` maps each task of the unit to its function. Names are followed through
    every function of the file, so a helper of the learner's own hides nothing.
    """
    bodies: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            bodies[node.name] = node
    reached: set[str] = set()
    open_names = [_last(functions[task])]
    while open_names:
        name = open_names.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            open_names += _mentioned(bodies[name])
    return tuple(
        other
        for other, function in functions.items()
        if other != task and _last(function) in reached
    )


def _mentioned(node: ast.AST) -> list[str]:
    names = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            names.append(inner.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            # self.step, not comm.broadcast: that is the communicator's, not the unit's
            names += [inner.attr] if inner.value.id == "self" else []
    return names


def _last(qualified: str) -> str:
    return qualified.rpartition(".")[2]
