"""Name and count problems in a data set's files instead of raising errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A file or folder that we can't use as it is, with the kind of problem and why."""

    name: str
    kind: str
    why: str = ""

    def __str__(self) -> str:
        # A name's bytes may be no text: then no terminal and no log takes them as such.
        name = os.fsencode(self.name).decode("utf-8", "backslashreplace")
        return f"{name}: {self.kind}" + (f", {self.why}" if self.why else "")


class DataError(ValueError):
    """A data set is unusable, or has problems although you allowed none."""


def counted(problems: Iterable[Problem]) -> dict[str, int]:
    """Count the problems of each kind, the most frequent first."""
    return dict(Counter(problem.kind for problem in problems).most_common())


def summary(problems: Sequence[Problem]) -> str:
    """Count the problems by kind and name the first; there must be at least one."""
    kinds = ", ".join(f"{n} × {kind}" for kind, n in counted(problems).items())
    return f"{kinds}; the first is {problems[0]}"


def refuse(problems: Sequence[Problem], where: object) -> None:
    """Raise an error if there is any problem.

    Raises:
        DataError: there is one; the message counts the kinds, and names the first.
    """
    if problems:
        raise DataError(f"{where} has problems: {summary(problems)}")
