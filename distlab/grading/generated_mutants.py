"""Generated mutants: every region of a solution with one thing changed."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from distlab.curriculum.regions import Region, find_regions, functions_of
from distlab.grading.catalogue import Entry
from distlab.grading.mutations import instead_of_expression, instead_of_statement

_OTHER_END = {"src": "dst", "dst": "src"}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One slip, in line `line` of the solution; `body` takes the region's place."""

    task: str
    function: str
    line: int
    what: str
    body: str

    @property
    def id(self) -> str:
        """A name that stays the same as long as the slip does."""
        digest = hashlib.sha256(f"{self.task} {self.what}".encode()).hexdigest()
        return f"G{digest[:7]}"

    def applied_to(self, solution: str) -> str:
        """The solution's text with the slip in it."""
        entry = Entry(
            id=self.id,
            task=self.task,
            title=self.what,
            body=self.body,
            function=self.function,
        )
        return entry.applied_to(solution)


@functools.cache
def mutations_of(solution: str, task: str) -> tuple[Mutation, ...]:
    """Every slip in the regions of a task, in the order of the text.

    Worked out once: the reasons of all survivors are read against the mutants of all
    tasks, some thousands, again and again.
    """
    regions = [r for r in find_regions(solution) if r.id == task]
    names = functions_of(solution)[task]
    tree = ast.parse(solution)
    found: list[Mutation] = []
    for region, name in zip(regions, names, strict=True):
        found += _Surgery(tree, task, name, region).mutations()
    return tuple(found)


class _Surgery:
    """Changes the parsed region in place, one slip at a time, and puts it back."""

    def __init__(
        self, tree: ast.Module, task: str, function: str, region: Region
    ) -> None:
        self._task, self._function = task, function
        inside = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and region.first < node.lineno < region.last
        ]
        nested = {id(child) for node in inside for child in _below(node)}
        self._top = [node for node in inside if id(node) not in nested]
        self._nodes = [n for statement in self._top for n in ast.walk(statement)]
        self._names = {node.id for node in self._nodes if isinstance(node, ast.Name)}
        self._seen = {_dump(self._top)}

    def mutations(self) -> list[Mutation]:
        """Each slip once."""
        found = [*self._in_lists(self._top)]
        for node in self._nodes:
            for name, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    found += self._in_lists(value)
                elif isinstance(value, list):
                    for index, item in enumerate(value):
                        found += self._in_place(value, index, item)
                else:
                    found += self._in_place(node, name, value)
        found.sort(key=lambda mutation: mutation.line)
        return _told_apart(found)

    def _in_place(self, holder: Any, key: Any, node: Any) -> Iterator[Mutation]:
        if not isinstance(node, ast.expr) or isinstance(
            getattr(node, "ctx", None), ast.Store | ast.Del
        ):
            return
        for other in self._instead_of(node):
            yield from self._swapped(holder, key, other, node.lineno)

    def _instead_of(self, node: ast.expr) -> Iterator[ast.expr]:
        yield from instead_of_expression(node)
        if isinstance(node, ast.Name) and _OTHER_END.get(node.id) in self._names:
            yield ast.Name(_OTHER_END[node.id], ast.Load())

    def _in_lists(self, body: list[ast.stmt]) -> Iterator[Mutation]:
        """Slips in whole statements: left out, turned round, ended early."""
        for index in range(len(body)):
            statement = body[index]
            for others in instead_of_statement(statement):
                yield from self._replaced(body, index, others, statement.lineno)
        if body is self._top and len(body) > 1:
            early = [ast.Return(), body[-1]]
            yield from self._replaced(body, len(body) - 1, early, body[-1].lineno)

    def _swapped(
        self, holder: Any, key: Any, new: Any, line: int
    ) -> Iterator[Mutation]:
        is_list = isinstance(holder, list)
        old = holder[key] if is_list else getattr(holder, key)
        before = self._texts()
        put: Callable[[Any, Any], None] = (
            holder.__setitem__ if is_list else lambda k, v: setattr(holder, k, v)
        )
        put(key, new)
        yield from self._mutation(before, line)
        put(key, old)

    def _replaced(
        self, body: list[ast.stmt], index: int, others: list[ast.stmt], line: int
    ) -> Iterator[Mutation]:
        before, old = self._texts(), body[:]
        body[index : index + 1] = others
        if not body:
            body.append(ast.Pass())
        yield from self._mutation(before, line)
        body[:] = old

    def _mutation(self, before: list[str], line: int) -> Iterator[Mutation]:
        dump = _dump(self._top)
        if dump in self._seen:
            return
        self._seen.add(dump)
        tree = ast.Module(copy.deepcopy(self._top), [])
        body = ast.unparse(ast.fix_missing_locations(tree))
        after = self._texts()
        yield Mutation(
            task=self._task,
            function=self._function,
            line=line,
            what=f"{self._function}: {_difference(before, after)}",
            body=body,
        )

    def _texts(self) -> list[str]:
        return ast.unparse(
            ast.fix_missing_locations(ast.Module(copy.deepcopy(self._top), []))
        ).splitlines()


def _below(node: ast.AST) -> Iterator[ast.AST]:
    return (other for other in ast.walk(node) if other is not node)


def _told_apart(mutations: list[Mutation]) -> list[Mutation]:
    """The same with a number after what is said of more than one of them."""
    seen: Counter[str] = Counter()
    found = []
    for mutation in mutations:
        seen[mutation.what] += 1
        number = seen[mutation.what]
        what = f"{mutation.what} ({number})" if number > 1 else mutation.what
        found.append(replace(mutation, what=what))
    return found


def _dump(body: list[ast.stmt]) -> str:
    return ast.dump(ast.Module(body, []))


def _difference(before: list[str], after: list[str]) -> str:
    """What a slip changes, as `old → new`, without what is the same on both sides."""
    old, new, above = before[:], after[:], "the start"
    while old and new and old[0] == new[0]:
        above = old.pop(0).strip()
        del new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    was, now = (" ⏎ ".join(line.strip() for line in lines) for lines in (old, new))
    if not was:
        return f"{now} after {above}"
    return f"{was} → {now or 'nothing'}"
