"""Formulas that are data: numbers, names and the four operations, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

_MOST_CHARACTERS = 200
_MOST = 1e30  # a number beyond that is a mistake, and a power of it takes forever
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "log2": math.log2,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}


class FormulaError(ValueError):
    """A formula cannot be worked out; one sentence."""


def evaluate(formula: str, names: Mapping[str, float] | None = None) -> float:
    """The value of `formula`, in which `names` may occur.

    Raises:
        FormulaError: it is no formula, names something unknown, or has no value.
    """
    if len(formula) > _MOST_CHARACTERS:
        raise FormulaError(f"a formula has at most {_MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(formula.strip(), mode="eval").body, names or {})
    except (SyntaxError, RecursionError, MemoryError):
        raise FormulaError(f"{formula!r} is no formula") from None
    except FormulaError as error:
        raise FormulaError(f"{formula!r}: {error}") from None
    except (ArithmeticError, ValueError, TypeError):
        raise FormulaError(f"{formula!r} has no value") from None
    return value


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if value is not True and (
            value is not False
        ):
            return _bounded(value)
        case ast.Name(id=name):
            if name not in names:
                raise FormulaError(f"there is no {name}")
            return names[name]
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(inner, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(type(op), _value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in _FUNCTIONS:
                raise FormulaError(f"there is no function {name}")
            return _bounded(_FUNCTIONS[name](*[_value(arg, names) for arg in args]))
    raise FormulaError("only numbers, names, + - * / // % ** and brackets are allowed")


def _apply(kind: type[ast.operator], left: float, right: float) -> float:
    is_large = abs(right) > 64 or (abs(left) > 1e6 and abs(right) > 1)
    if kind is ast.Pow and is_large:
        raise FormulaError("that power is too large")
    return _bounded(_BINARY[kind](left, right))


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not abs(value) < _MOST:
        raise FormulaError("that number is too large")
    return value
