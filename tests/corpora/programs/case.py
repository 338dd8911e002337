"""How a program of the corpus says what must become of it, and where its mistake is.

    @right(2, 3, gives=lambda rank, n: [float(n)])      finishes with these values
    @hangs(3)                                           a deadlock
    @raises("KeyError", 2)                              a rank raises it
    @flawed("never-waited", 2)                          finishes, and is judged wrong
    @misfit("mismatched-buffers", 2)                    is judged so, however it ends

The numbers are those of ranks. A buggy program has a comment `# guilty` on the line
that a person would change: the call that is wrong or, where a call is missing, the one
that it leaves without an answer. On several lines: any of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.runner import RankContext

Program = Callable[[RankContext], Any]
Gives = Callable[[int, int], Any]
MARK = "# guilty"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program on so many ranks.

    `outcome` is "finished", "deadlock" or "raised"; or "anyhow" where bytes arrive for
    which there is no room: a transport may then do anything, gloo ends the process.
    `gives(rank, world_size)` is what a rank returns, its tensors as lists; None is not
    asked. `slug` is the misconception that a run must be judged by although it
    finishes, and `error` the type of the exception by which it must not.
    """

    program: Program
    world_size: int
    outcome: str
    gives: Gives | None = None
    slug: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        """`ring_of_sends`."""
        return self.program.__name__

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong with the program at this number of ranks."""
        return self.outcome == "finished" and not self.slug

    @property
    def expected(self) -> str:
        """`deadlock`, or more closely `finished, never-waited`."""
        return ", ".join(filter(None, (self.outcome, self.slug, self.error)))

    def guilty(self) -> list[str]:
        """`messages.py:41` for each marked line of the program."""
        lines, first = inspect.getsourcelines(self.program)
        file = self.program.__code__.co_filename.replace("\\", "/").rpartition("/")[2]
        marked = [number for number, text in enumerate(lines, first) if MARK in text]
        return [f"{file}:{number}" for number in marked]


Decorator = Callable[[Program], Program]


def right(*worlds: int, gives: Gives) -> Decorator:
    """The program finishes, and each rank returns what `gives` says."""
    return _expecting(worlds, outcome="finished", gives=gives)


def hangs(*worlds: int) -> Decorator:
    """The program is a deadlock."""
    return _expecting(worlds, outcome="deadlock")


def raises(error: str, *worlds: int) -> Decorator:
    """A rank raises an exception of this type, and it is the one that counts."""
    return _expecting(worlds, outcome="raised", error=error)


def flawed(slug: str, *worlds: int) -> Decorator:
    """The program finishes, and is judged wrong for `slug` all the same."""
    return _expecting(worlds, outcome="finished", slug=slug)


def misfit(slug: str, *worlds: int) -> Decorator:
    """However the program ends, on whatever transport, it is judged by `slug`."""
    return _expecting(worlds, outcome="anyhow", slug=slug)


def _expecting(worlds: Iterable[int], **facts: Any) -> Decorator:
    def add(program: Program) -> Program:
        cases = [Case(program=program, world_size=n, **facts) for n in worlds]
        known: list[Case] = program.__dict__.setdefault("cases", [])
        known += cases
        known.sort(key=lambda case: case.world_size)
        return program

    return add


def cases_of(*modules: ModuleType) -> list[Case]:
    """The cases of all programs of some modules, as they stand there."""
    return [
        case
        for module in modules
        for thing in vars(module).values()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__
        for case in thing.__dict__.get("cases", [])
    ]
