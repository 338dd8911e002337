"""Forms that look like a solution and are none: seen in the file, before it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def not_a_def(tree: ast.Module, qualified: str) -> str:
    """What stands in place of a function, as a sentence; or nothing.

    Functions are looked for as `def`, at the top of the file or of a class.
    """
    *holders, name = qualified.split(".")
    for node in reversed(_body(tree, holders)):
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            return f"{name} is an async def: calling it runs nothing; write def"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{name} is a class; write it as a def"
        if name in _assigned(node):
            return f"{name} is assigned, not defined; write it as a def"
    return ""


def flaw_in(tree: ast.Module, reference: ast.Module, functions: Sequence[str]) -> str:
    """Why these functions cannot be what is asked for, as a sentence; or nothing."""
    for qualified in functions:
        mine, theirs = _function(tree, qualified), _function(reference, qualified)
        if mine is None:
            continue
        flaw = private_use(mine)
        if theirs is not None and not never_runs(theirs):
            flaw = flaw or never_runs(mine)
        if flaw:
            return flaw
    return ""


def never_runs(function: ast.FunctionDef) -> str:
    """Why a call of `function` runs nothing of it, as a sentence; or nothing."""
    for node in _own(function.body):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return (
                f"line {node.lineno}: yield makes {function.name} a generator, "
                "and calling it runs nothing"
            )
    return ""


def private_use(function: ast.FunctionDef) -> str:
    """Where `function` reaches behind `comm`, as a sentence; or nothing."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and _last_name(node.value) == "comm"
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
        ):
            return f"line {node.lineno}: comm.{node.attr} is not part of comm"
    return ""


def _last_name(node: ast.expr) -> str:
    """`comm` for comm and for self.comm."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _body(tree: ast.Module, holders: Sequence[str]) -> list[ast.stmt]:
    body = tree.body
    for holder in holders:
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == holder]
        body = classes[-1].body if classes else []
    return body


def _function(tree: ast.Module, qualified: str) -> ast.FunctionDef | None:
    *holders, name = qualified.split(".")
    for node in reversed(_body(tree, holders)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def _assigned(node: ast.stmt) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node of a function's body that is not in a function inside of it."""
    level: list[ast.AST] = list(body)
    while level:
        node = level.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        level += ast.iter_child_nodes(node)
