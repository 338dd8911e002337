"""Which of a unit's other tasks a task's own code builds on."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def parts_used(
    tree: ast.Module, task: str, functions: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The other tasks whose functions those of `task` mention, directly or not.

    `functions` maps each task of the unit to its own. Names are followed through
    every function of the file, so a helper of the learner's own hides nothing.
    """
    bodies: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            bodies[node.name] = node
    reached: set[str] = set()
    open_names = [_last(name) for name in functions[task]]
    while open_names:
        name = open_names.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            open_names += _mentioned(bodies[name])
    return tuple(
        other
        for other, names in functions.items()
        if other != task and any(_last(name) in reached for name in names)
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
