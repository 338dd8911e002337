"""Formulas that are data: numbers, names and the four operations, and nothing else.

`evaluate` reads the formulas of our files. People write `2(n - 1)B/n` on paper, so
`spelled_out` turns that into `2*(n-1)*B/n` first.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping

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
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[^\W\d]\w*)|(?P<sign>\*\*|//|[-+*/%(),]))"
)
_PAPER = {
    "×": "*", "·": "*", "−": "-", "÷": "/", "√": " sqrt", "^": "**", "²": "**2",
    "³": "**3", "⌈": " ceil(", "⌉": ")", "⌊": " floor(", "⌋": ")",
}  # fmt: skip


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


def spelled_out(formula: str, symbols: Collection[str] = ()) -> str:
    """Write a formula from paper with a sign for each operation: `2n` as `2*n`.

    A name that consists of one-letter `symbols` is their product: `nB` becomes `n*B`.

    Raises:
        FormulaError: it contains something else, or a product right after a division,
            such as `B/2n`, which has two readings.
    """
    for paper, sign in _PAPER.items():
        formula = formula.replace(paper, sign)
    formula = formula.strip()
    tokens: list[str] = []
    signs = [""]  # the last operation within each pair of open brackets
    for token in _tokens(formula, symbols):
        opens = token == "(" or _ends_operand(token) or token in _FUNCTIONS
        if opens and token != ")" and tokens and _ends_operand(tokens[-1]):
            if signs[-1] in ("/", "//", "%"):
                raise FormulaError(
                    "that has two readings; put brackets around what you divide by, "
                    f"or a * before {token}"
                )
            if token[0].isdigit() and tokens[-1][0].isdigit():
                raise FormulaError(f"a sign is missing before {token}")
            tokens.append("*")
            signs[-1] = "*"
        if token == "(":
            signs.append("")
        elif token == ")" and len(signs) > 1:
            signs.pop()
        elif not opens:
            signs[-1] = token
        tokens.append(token)
    return "".join(tokens)


def _tokens(formula: str, symbols: Collection[str]) -> Iterator[str]:
    place = 0
    while place < len(formula):
        match = _TOKEN.match(formula, place)
        if match is None:
            sign = formula[place:].strip()[0]
            raise FormulaError(f"{sign!r} can't be a part of a formula")
        place = match.end()
        name = match["name"]
        if name and name not in _FUNCTIONS and {*name} <= {*symbols}:
            yield from name
        else:
            yield match[match.lastgroup or 0]


def _ends_operand(token: str) -> bool:
    is_operation = not (token[-1].isalnum() or token[-1] in "._)")
    return not is_operation and token not in _FUNCTIONS


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
