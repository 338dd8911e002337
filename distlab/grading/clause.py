"""The register of checks: which function judges which clause, from which runs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from distlab.grading.runs import Plan, Runs, RunSpec

Judge = Callable[[Runs], str | None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. Its judge returns nothing, or a note for the learner, or raises.

    `runs` are played together with those of the task's other clauses, before the first
    judge reads any; `later` one at a time, when they are read: what is looked at only
    where something is wrong, or takes long.
    """

    task: str
    clause: str
    worlds: tuple[int, ...]
    judge: Judge
    runs: Plan
    later: Plan


_CHECKS: dict[str, list[Check]] = {}


def clause(
    task: str,
    clause_id: str,
    *,
    worlds: tuple[int, ...],
    runs: Plan | Sequence[RunSpec] = (),
    later: Plan | Sequence[RunSpec] = (),
) -> Callable[[Judge], Judge]:
    """Register a function `(runs) -> note` as a check of a task's clause.

    It judges at each world size of `worlds` in the order given; the first that fails
    ends the clause, so the world size that tells most comes first.
    """

    def register(judge: Judge) -> Judge:
        check = Check(
            task=task,
            clause=clause_id,
            worlds=worlds,
            judge=judge,
            runs=_plan(runs),
            later=_plan(later),
        )
        _CHECKS.setdefault(task, []).append(check)
        return judge

    return register


def _plan(runs: Plan | Sequence[RunSpec]) -> Plan:
    return runs if callable(runs) else lambda _: runs


@cache
def _load(unit: str) -> None:
    package = importlib.import_module(f"distlab.grading.checks.{unit}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def checks_of(task: str) -> list[Check]:
    """The checks of a task by id, in the order of its clauses."""
    _load(task.partition(".")[0])
    return sorted(_CHECKS.get(task, []), key=lambda check: check.clause)


def planned_runs(checks: Iterable[Check], world_size: int) -> tuple[RunSpec, ...]:
    """What these checks play together at one world size, each run once."""
    specs = (spec for check in checks for spec in check.runs(world_size))
    return tuple(dict.fromkeys(specs))


def declared_runs(task: str, world_size: int) -> frozenset[RunSpec]:
    """All runs that the clauses of a task may read at one world size."""
    return frozenset(
        spec
        for check in checks_of(task)
        for plan in (check.runs, check.later)
        for spec in plan(world_size)
    )
