"""Which of a unit's other tasks a task's own code builds on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Functions = Mapping[str, tuple[str, ...]]
"""The functions of each task of a unit: "all_reduce", "DistributedSampler.__iter__"."""


def parts_used(tree: ast.Module, task: str, functions: Functions) -> tuple[str, ...]:
    """The other tasks whose functions those of `task` mention, directly or not.

    Names are followed through every function of the file, so a helper of the learner's
    own hides nothing. Who mentions a class uses all of its methods: Python calls some
    of them unseen.
    """
    bodies = dict(_bodies(tree))
    reached: set[str] = set()
    open_names = list(functions[task])
    while open_names:
        name = open_names.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            open_names += _mentioned(bodies[name], bodies)
    return tuple(
        other
        for other, names in functions.items()
        if other != task and not reached.isdisjoint(names)
    )


def parts_beside(
    tree: ast.Module, task: str, needs: Sequence[str], functions: Functions
) -> tuple[str, ...]:
    """The tasks of `parts_used`, and those that work on the same object.

    These are the tasks among `needs` with methods of the same class: what is judged is
    an object of it, whether or not one method mentions the other.
    """
    own = _classes(functions[task])
    mates = [n for n in needs if n in functions and own & _classes(functions[n])]
    used = {name for t in (task, *mates) for name in parts_used(tree, t, functions)}
    return tuple(n for n in functions if n != task and (n in used or n in mates))


def _classes(names: Sequence[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if "." in name}


def _bodies(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions by their names in `functions`; what is inside one is part of it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _mentioned(node: ast.AST, bodies: Mapping[str, ast.AST]) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
            yield from (name for name in bodies if name.startswith(f"{inner.id}."))
        elif isinstance(inner, ast.Attribute) and _is_self(inner.value):
            # Of which class it is, base or derived, is not asked.
            yield from (name for name in bodies if name.endswith(f".{inner.attr}"))


def _is_self(node: ast.expr) -> bool:
    # self.step, not comm.broadcast: that is the communicator's, not the unit's.
    return isinstance(node, ast.Name) and node.id == "self"
