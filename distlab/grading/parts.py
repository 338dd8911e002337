"""Which of a unit's other tasks a task's own code builds on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


def parts_used(
    tree: ast.Module, task: str, functions: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The other tasks whose functions those of `task` mention, directly or not.

    `functions` maps each task of the unit to its own, by qualified name. Names are
    followed through every function, class and assignment of the file, so a helper of
    the learner's own hides nothing.
    """
    file = _File.of(tree)
    reached: set[str] = set()
    open_names = list(functions[task])
    while open_names:
        name = open_names.pop()
        if name in file.bodies and name not in reached:
            reached.add(name)
            open_names += file.mentioned(name)
    return tuple(
        other
        for other, names in functions.items()
        if other != task and not reached.isdisjoint(names)
    )


@dataclass
class _File:
    """The definitions of a file: code by qualified name, and classes with bases."""

    bodies: dict[str, ast.AST] = field(default_factory=dict)
    classes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> _File:
        file = cls()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                file.bodies[node.name] = node
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
                file.bodies.update(dict.fromkeys(names, node.value))
            elif isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                file.classes[node.name] = bases
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        file.bodies[f"{node.name}.{inner.name}"] = inner
        return file

    def mentioned(self, name: str) -> Iterator[str]:
        """What the code of `name` names; a class stands for all of its methods."""
        holder = name.rpartition(".")[0]
        for node in ast.walk(self.bodies[name]):
            if isinstance(node, ast.Name):
                yield node.id
                yield from self._methods(node.id)
            elif isinstance(node, ast.Attribute) and _is_self(node.value):
                yield from (f"{own}.{node.attr}" for own in self._line(holder))

    def _methods(self, name: str) -> list[str]:
        line = self._line(name)
        return [body for body in self.bodies if body.partition(".")[0] in line]

    def _line(self, name: str) -> list[str]:
        """A class of the file and those it inherits from; nothing for other names."""
        if name not in self.classes:
            return []
        bases = self.classes[name]
        return [name, *(part for base in bases for part in self._line(base))]


def _is_self(node: ast.expr) -> bool:
    """self.step, not comm.broadcast: that is the communicator's."""
    return isinstance(node, ast.Name) and node.id == "self"
