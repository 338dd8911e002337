"""The register of checks: which function judges which clause, from which runs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps

from distlab.grading.runs import Plan, Runs, RunSpec
from distlab.grading.verdict import NotJudgedError, NotYetError

Judge = Callable[[Runs], str | None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. Its judge returns nothing, or a note for the learner, or raises.

    `runs` are played together with those of the task's other clauses, before the first
    judge reads any; `later` one at a time, when they are read: what is looked at only
    where something is wrong, or takes long. At world size 1 the one process may play
    several ranks: `plays` lists how many each time; () if what it plays has no ranks,
    None if it plays none and is the one rank itself.
    """

    task: str
    clause: str
    worlds: tuple[int, ...]
    judge: Judge
    runs: Plan
    later: Plan
    plays: tuple[int, ...] | None = None

    def sizes(self, world_size: int) -> tuple[int, ...]:
        """The numbers of ranks that a learner meets at one world size."""
        return (world_size,) if self.plays is None or world_size > 1 else self.plays

    def size_of(self, failure: NotYetError, world_size: int) -> int | None:
        """The number of ranks that a failure is about, if it is known."""
        sizes = self.sizes(world_size)
        return failure.played or (sizes[0] if len(sizes) == 1 else None)


_CHECKS: dict[str, list[Check]] = {}


def clause(
    task: str,
    clause_id: str,
    *,
    worlds: tuple[int, ...],
    runs: Plan | Sequence[RunSpec] = (),
    later: Plan | Sequence[RunSpec] = (),
    plays: tuple[int, ...] | None = None,
    after: Sequence[str] = (),
    own: str = "",
) -> Callable[[Judge], Judge]:
    """Register a function `(runs) -> note` as a check of a task's clause.

    It judges at each world size of `worlds` in the order given; the first that fails
    ends the clause, so the world size that tells most comes first. If a clause in
    `after` fails too, its mistake explains this failure: see `judged_after`, also for
    `own`.
    """

    def register(judge: Judge) -> Judge:
        if after:
            judge = _ordered(judge, task, after, own)
        check = Check(
            task=task,
            clause=clause_id,
            worlds=worlds,
            judge=judge,
            runs=_plan(runs),
            later=_plan(later),
            plays=plays,
        )
        _CHECKS.setdefault(task, []).append(check)
        return judge

    return register


def clauses(
    task: str,
    clause_ids: Iterable[str],
    judge: Callable[[str, Runs], str | None],
    *,
    worlds: tuple[int, ...],
    runs: Plan | Sequence[RunSpec] = (),
    plays: tuple[int, ...] | None = None,
    after: Sequence[str] = (),
    own: str = "",
) -> None:
    """Register one function `(clause id, runs) -> note` for several clauses."""
    for clause_id in clause_ids:
        clause(
            task,
            clause_id,
            worlds=worlds,
            runs=runs,
            plays=plays,
            after=after,
            own=own,
        )(partial(judge, clause_id))


@contextmanager
def judged_after(other: Judge, runs: Runs, where: str, own: str = "") -> Iterator[None]:
    """Let a failure in this block count only if `other`, the check of `where`, passes.

    "C3 fails too" would send a learner to look for a second mistake where the mistake
    that C1 names explains both. A failure whose slug is `own` counts all the same.

    Raises:
        NotJudgedError: `other` fails too.
        NotYetError: it passes, or the failure is this clause's own.
    """
    try:
        yield
    except NotYetError as failure:
        _expect_own(failure, own, other, runs, where)
        raise


def _ordered(judge: Judge, task: str, after: Sequence[str], own: str) -> Judge:
    @wraps(judge)
    def judged(runs: Runs) -> str | None:
        try:
            return judge(runs)
        except NotYetError as failure:
            for other in checks_of(task):
                if other.clause in after:
                    _expect_own(failure, own, other.judge, runs, other.clause)
            raise

    return judged


def _expect_own(
    failure: NotYetError, own: str, other: Judge, runs: Runs, where: str
) -> None:
    if own and failure.slug == own:
        return
    try:
        other(runs)
    except (NotYetError, NotJudgedError):
        raise NotJudgedError(f"see {where}") from failure


def _plan(runs: Plan | Sequence[RunSpec]) -> Plan:
    return runs if callable(runs) else lambda _: runs


@cache
def _load(unit: str) -> None:
    for module in modules_of(unit):
        importlib.import_module(module)


@cache
def modules_of(unit: str) -> tuple[str, ...]:
    """Where the checks of a unit are: the names of its modules."""
    package = importlib.import_module(f"distlab.grading.checks.{unit}")
    modules = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return tuple(module.name for module in modules)


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


def sizes_of(task: str, world_sizes: Iterable[int]) -> tuple[int, ...]:
    """The numbers of ranks that a task's clauses were judged at, at these world sizes.

    Those themselves, and in place of 1 what one process plays, where a clause says so.
    """
    there = set(world_sizes)
    if 1 in there:
        alone = [check.sizes(1) for check in checks_of(task) if 1 in check.worlds]
        there = there - {1} | {size for sizes in alone for size in sizes}
    return tuple(sorted(there))
