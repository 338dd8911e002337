"""What might have been typed instead: one operator per kind of node.

Each yields other nodes for one node, never the node itself; `generated` puts them in.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_FIXED = {"rank": 0, "world_size": 2, "n": 2}

# ── expressions ─────────────────────────────────────────────────────────────────────


def _compare(node: ast.Compare) -> Iterator[ast.expr]:
    for index, operator in enumerate(node.ops):
        other = copy.deepcopy(node)
        other.ops[index] = _COMPARISONS[type(operator)]()
        yield other


def _constant(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        if node.value > 0:
            yield ast.Constant(node.value - 1)


def _logic(node: ast.BoolOp) -> Iterator[ast.expr]:
    other = copy.deepcopy(node)
    other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield other


def _unary(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield copy.deepcopy(node.operand)


def _binary(node: ast.BinOp) -> Iterator[ast.expr]:
    if type(node.op) in _ARITHMETIC:
        other = copy.deepcopy(node)
        other.op = _ARITHMETIC[type(node.op)]()
        yield other
    if isinstance(node.op, ast.Mod):
        yield copy.deepcopy(node.left)


def _choice(node: ast.IfExp) -> Iterator[ast.expr]:
    yield copy.deepcopy(node.body)
    yield copy.deepcopy(node.orelse)


def _fixed(node: ast.Name | ast.Attribute) -> Iterator[ast.expr]:
    """A number that is right on one rank, or for two ranks."""
    name = node.id if isinstance(node, ast.Name) else node.attr
    if name in _FIXED:
        yield ast.Constant(_FIXED[name])


def _call(node: ast.Call) -> Iterator[ast.expr]:
    if len(node.args) >= 2:
        other = copy.deepcopy(node)
        other.args[:2] = reversed(other.args[:2])
        yield other
    for index in range(len(node.keywords)):
        other = copy.deepcopy(node)
        del other.keywords[index]
        yield other
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr.endswith("_"):
        other = copy.deepcopy(node)
        other.func = ast.Attribute(called.value, called.attr.rstrip("_"), ast.Load())
        yield other
    if isinstance(called, ast.Attribute) and called.attr == "clone":
        yield copy.deepcopy(called.value)
    if isinstance(called, ast.Name) and called.id == "range":
        yield from _range(node)


def _range(node: ast.Call) -> Iterator[ast.expr]:
    stop = min(1, len(node.args) - 1)
    for operator in (ast.Add(), ast.Sub()):
        other = copy.deepcopy(node)
        other.args[stop] = ast.BinOp(other.args[stop], operator, ast.Constant(1))
        yield other
    if len(node.args) == 1:
        other = copy.deepcopy(node)
        other.args.insert(0, ast.Constant(1))
        yield other


_EXPRESSIONS: list[tuple[Any, Callable[[Any], Iterator[ast.expr]]]] = [
    (ast.Compare, _compare),
    (ast.Constant, _constant),
    (ast.BoolOp, _logic),
    (ast.UnaryOp, _unary),
    (ast.BinOp, _binary),
    (ast.IfExp, _choice),
    ((ast.Name, ast.Attribute), _fixed),
    (ast.Call, _call),
]


def instead_of_expression(node: ast.expr) -> Iterator[ast.expr]:
    """What might stand in place of an expression."""
    for kind, operator in _EXPRESSIONS:
        if isinstance(node, kind):
            yield from operator(node)


# ── statements ──────────────────────────────────────────────────────────────────────


def instead_of_statement(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """What might stand in place of a statement; an empty list: nothing at all."""
    is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    if not is_name:  # without a name of its own the next line would fail at once
        yield []
    if isinstance(node, ast.If | ast.While) and not _is_equality(node.test):
        other = copy.deepcopy(node)
        other.test = ast.UnaryOp(ast.Not(), other.test)
        yield [other]
    if isinstance(node, ast.For):
        yield from _loop(node)
    if isinstance(node, ast.With):
        yield copy.deepcopy(node.body)
    if isinstance(node, ast.AugAssign):
        yield from _augmented(node)


def _is_equality(test: ast.expr) -> bool:
    """Turned round already, by `_compare`."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    return not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def _loop(node: ast.For) -> Iterator[list[ast.stmt]]:
    for lower, upper in ((ast.Constant(1), None), (None, ast.Constant(-1))):
        other = copy.deepcopy(node)
        items = ast.Call(ast.Name("list", ast.Load()), [other.iter], [])
        other.iter = ast.Subscript(items, ast.Slice(lower, upper), ast.Load())
        yield [other]
    other = copy.deepcopy(node)
    other.body.append(ast.Break())
    yield [other]


def _augmented(node: ast.AugAssign) -> Iterator[list[ast.stmt]]:
    if type(node.op) in _ARITHMETIC:
        other = copy.deepcopy(node)
        other.op = _ARITHMETIC[type(node.op)]()
        yield [other]
    if isinstance(node.target, ast.Name):
        read = ast.Name(node.target.id, ast.Load())
        total = ast.BinOp(read, node.op, node.value)
        yield [ast.Assign([node.target], copy.deepcopy(total), lineno=node.lineno)]
    yield [ast.Assign([node.target], copy.deepcopy(node.value), lineno=node.lineno)]
