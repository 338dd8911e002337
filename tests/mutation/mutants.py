"""Small mistakes in the lines of `distlab`, for mutation.py."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LEFT_OUT = ("distlab/grading/checks/", "distlab/walkthroughs/")
SEED = 4


@dataclass(frozen=True)
class Mutant:
    """A small mistake, and how to find its place again after edits elsewhere."""

    file: str
    function: str
    statement: str
    node: str
    kind: str
    nth: int  # of those that are equal otherwise


@dataclass(frozen=True)
class Place:
    """Where a mutant is: the bytes to replace, and by what."""

    mutant: Mutant
    line: int
    start: int
    end: int
    text: str


_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NO_CODE = {"annotation", "returns", "decorator_list"}
_NO_CHOICE = re.compile("TYPE_CHECKING|__name__")
_LOGGING = re.compile(r"(_?log(ger|ging)?|warnings)\.")


def _adds_texts(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _adds_texts(node.left) or _adds_texts(node.right)
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def _swapped(node: Any) -> Iterator[tuple[str, ast.AST, str]]:
    if isinstance(node, ast.Compare):
        ops = [_SWAPS[type(node.ops[0])](), *node.ops[1:]]
        new = ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
        yield "comparison", node, ast.unparse(new)
    elif isinstance(node, ast.BoolOp):
        new_op: Any = _SWAPS[type(node.op)]()
        yield "and/or", node, ast.unparse(ast.BoolOp(new_op, node.values))
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        if not _adds_texts(node):
            op: Any = _SWAPS[type(node.op)]()
            yield "+/-", node, ast.unparse(ast.BinOp(node.left, op, node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        is_bool = isinstance(node.value, bool)
        new_value = not node.value if is_bool else node.value + 1
        yield "boolean" if is_bool else "integer", node, repr(new_value)


def _changed(node: Any) -> Iterator[tuple[str, ast.AST, str]]:
    """The mutants of a node: kind, what is replaced, and by what."""
    yield from _swapped(node)
    if isinstance(node, ast.Return) and node.value is not None:
        if ast.unparse(node.value) != "None":
            yield "return None", node.value, "None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call deleted", node, "pass"
    elif isinstance(node, (ast.If, ast.IfExp)) and not _NO_CHOICE.search(
        ast.unparse(node.test)
    ):
        yield "if True", node.test, "True"
        yield "if False", node.test, "False"


class _Finder:
    """Walks through a file and gathers its mutants."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self.found = file, list[Place]()
        self._equal: Counter[Mutant] = Counter()
        self._starts = [0, 0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit(self, node: ast.AST, scope: str, function: str, statement: str) -> None:
        """Gather those of a node and below, but of no text, type or log."""
        if isinstance(node, ast.stmt):
            lines = ast.unparse(node).splitlines()
            heads = [text for text in lines if not text.startswith("@")]
            statement = heads[0] if hasattr(node, "body") else "\n".join(lines)
        if isinstance(node, ast.JoinedStr) or _LOGGING.match(statement):
            return
        for kind, target, text in _changed(node):
            mutant = Mutant(self._file, function, statement, "", kind, 0)
            self._keep(node, mutant, target, text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, scope = scope + node.name, f"{scope}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            scope = f"{scope}{node.name}."
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for child in children if name not in _NO_CODE else []:
                if isinstance(child, ast.AST):
                    self.visit(child, scope, function, statement)

    def _keep(self, node: ast.AST, mutant: Mutant, target: Any, text: str) -> None:
        mutant = replace(mutant, node=ast.unparse(node))
        nth = self._equal[mutant]
        self._equal[mutant] += 1
        start = self._starts[target.lineno] + target.col_offset
        end = self._starts[target.end_lineno] + target.end_col_offset
        new = text if text == "pass" else f"({text})"
        place = Place(replace(mutant, nth=nth), target.lineno, start, end, new)
        self.found.append(place)


def places(file: str, source: bytes) -> list[Place]:
    """All the mutants of a file."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source), "", "<module>", "")
    return finder.found


def all_places(repo: Path) -> list[Place]:
    """All the mutants of the package, without what is left out."""
    files = sorted(p.relative_to(repo).as_posix() for p in repo.glob("distlab/**/*.py"))
    kept = [file for file in files if not file.startswith(LEFT_OUT)]
    return [place for f in kept for place in places(f, (repo / f).read_bytes())]


def draw(every: list[Place], count: int) -> list[Place]:
    """So many mutants, on as many lines."""
    lines: dict[tuple[str, int], list[Place]] = defaultdict(list)
    for place in every:
        lines[place.mutant.file, place.line].append(place)
    chance = random.Random(SEED)
    return [chance.choice(lines[at]) for at in chance.sample(sorted(lines), count)]


def mutant_of(record: dict[str, Any]) -> Mutant:
    """The mutant that a record speaks of."""
    return Mutant(**{name: record[name] for name in Mutant.__dataclass_fields__})
