"""The register of checks: which function judges which clause, at which world sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.grading.harness import Implementation, RankHarness

Judge = Callable[["Implementation", "RankHarness"], str | None]
Wishes = Callable[[int], Sequence[tuple[Callable[..., Any], dict[str, Any]]]]
"""By world size: scenarios with their values."""


def nothing_more(world_size: int) -> tuple[()]:
    """The wishes of a check that needs one run."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: returns nothing, or a note for the learner, or raises NotYetError.

    `also` is what it runs after its first run, so that it can be played with that.
    """

    task: str
    clause: str
    worlds: tuple[int, ...]
    judge: Judge
    also: Wishes = nothing_more


_CHECKS: dict[str, list[Check]] = {}


def clause(
    task: str,
    clause_id: str,
    *,
    worlds: tuple[int, ...],
    also: Wishes = nothing_more,
) -> Callable[[Judge], Judge]:
    """Register a function `(impl, cluster) -> note` as a check of a task's clause.

    It runs at each world size of `worlds` in the order given; the first that fails
    ends the clause, so the world size that tells most comes first.
    """

    def register(judge: Judge) -> Judge:
        check = Check(
            task=task, clause=clause_id, worlds=worlds, judge=judge, also=also
        )
        _CHECKS.setdefault(task, []).append(check)
        return judge

    return register


def checks_of(task: str) -> list[Check]:
    """The checks of a task by id, in the order of its clauses."""
    unit = task.partition(".")[0]
    importlib.import_module(f"distlab.grading.checks.{unit}")
    return sorted(_CHECKS.get(task, []), key=lambda check: check.clause)
