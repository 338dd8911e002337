"""The standing clauses: judged for every task when its own clauses have passed.

    S1  costs no more than the reference: bytes and collectives of the busiest rank,
        and the work of the one that computes most
    S2  changes nothing that the reference does not change
    S3  is right a second time, in the same process and with other numbers

Both sides play the same scenarios, see bills.py. A task that one of them does not fit
is excused from it in the manifest, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

from distlab.curriculum import Task
from distlab.grading.clause import Check, checks_of, planned_runs
from distlab.grading.differential.bills import (
    Bill,
    played_twice,
    reference_bills,
)
from distlab.grading.differential.fingerprints import GRADIENT
from distlab.grading.harness import PlayedRuns
from distlab.grading.kit.again import is_played_once
from distlab.grading.runs import Records, Runs, RunSpec, Scenario
from distlab.grading.verdict import STANDING, NotJudgedError, NotYetError
from distlab.runner import Run

MARGIN = 1.1
FEW_BYTES, FEW_OPERATIONS = 64, 1000  # a flag or a count more is not worth a verdict
ASPECTS = BYTES, CALLS, OPERATIONS = "bytes", "collectives", "floating-point operations"
"""Of the cost: a task may be excused from one of them."""
STATE_KEPT, SIDE_EFFECT = "state-kept", "side-effect"


def best_size(task: str) -> int:
    """The world size with the most scenarios, of those that a laptop has cores for."""
    checks = checks_of(task)
    sizes = {n for check in checks for n in check.worlds}
    few = [n for n in sizes if 1 < n <= 4] or [min(sizes)]
    return max(few, key=lambda n: (len(specs_of(checks, n)), -n))


def sizes_beside(task: str) -> tuple[int, ...]:
    """The world sizes that have all scenarios between them, the best size first."""
    checks, best = checks_of(task), best_size(task)
    others = {n for check in checks for n in check.worlds} - {best}
    found: list[int] = []
    there: set[Scenario] = set()
    for size in (best, *sorted(others)):
        new = {spec.scenario for spec in specs_of(checks, size)} - there
        if new:
            found.append(size)
            there |= new
    return tuple(found)


def specs_of(checks: Sequence[Check], world_size: int) -> tuple[RunSpec, ...]:
    """What these checks play on ranks at this world size, and can play again."""
    own = [check for check in checks if world_size in check.worlds]
    return tuple(
        spec
        for spec in planned_runs(own, world_size)
        if spec.is_on_ranks and not is_played_once(spec.scenario)
    )


def first_fault(task: Task, runs: PlayedRuns) -> tuple[str, NotYetError] | None:
    """The first standing clause that is not fulfilled, with the verdict on it.

    Raises:
        RunnerError: the ranks could not be started, or the reference fails itself.
    """
    checks = checks_of(task.id)
    specs = specs_of(checks, runs.world_size)
    asked = [clause for clause in STANDING if clause not in task.excused]
    if not asked or not specs:
        return None
    right, played = reference_bills(task.id, runs, specs)
    is_reference = runs.source.digest == runs.impl.reference.digest
    try:
        twice = played if played and is_reference else played_twice(runs, specs)
    except NotYetError as failure:
        # Ranks may be in different scenarios: it counts if one by itself fails too.
        # That time ran out says nothing: all scenarios together have one's limit.
        is_told = "S3" in asked and failure.kind != "TIME"
        confirmed = _confirmed(checks, runs, specs) if is_told else None
        return ("S3", confirmed) if confirmed else None
    wrong = "S3" in asked and _again(checks, runs, twice.records)
    if wrong and (confirmed := _confirmed(checks, runs, specs)):
        return "S3", confirmed
    cost = partial(no_more_cost, excused=task.excused)
    for clause, judge in (("S1", cost), ("S2", no_other_change)):
        if clause in asked and (fault := _first(judge, twice.bills, right)):
            return clause, fault
    return None


def _first(
    judge: Judge, mine: dict[RunSpec, Bill], right: dict[RunSpec, Bill]
) -> NotYetError | None:
    for spec, bill in mine.items():
        try:
            judge(bill, right[spec])
        except NotYetError as fault:
            return fault
    return None


def _confirmed(
    checks: Sequence[Check], runs: PlayedRuns, specs: tuple[RunSpec, ...]
) -> NotYetError | None:
    """The fault in a second time: where each scenario has a run of its own.

    If none of these fails, what one scenario left behind may be wrong in another one:
    then the fault is one that shows again when all are played together.
    """
    alone = _played_again(checks, runs, [(spec,) for spec in specs])
    return alone or (_played_again(checks, runs, [specs]) if len(specs) > 1 else None)


def _played_again(
    checks: Sequence[Check],
    runs: PlayedRuns,
    batches: Sequence[tuple[RunSpec, ...]],
) -> NotYetError | None:
    records: Records = {}
    for specs in batches:
        try:
            records |= played_twice(runs, specs).records
        except NotYetError as failure:
            # A busy machine runs out of time, too: that is no fault.
            return None if failure.kind == "TIME" else _second_time(failure)
    return _again(checks, runs, records)


def _again(
    checks: Sequence[Check], runs: PlayedRuns, records: Records
) -> NotYetError | None:
    """What the task's own judges say of the records of the second time."""
    second = SecondRuns(runs, records)
    for check in checks:
        if runs.world_size not in check.worlds:
            continue
        try:
            check.judge(second)
        except NotJudgedError:
            continue
        except NotYetError as failure:
            if failure.kind == "TIME":
                continue  # that time ran out says nothing
            return _second_time(failure)
    return None


def _second_time(failure: NotYetError) -> NotYetError:
    again = "when called again in the same process"
    return failure.but(
        situation=", ".join(filter(None, (again, failure.situation))),
        slug=STATE_KEPT,
        rule="keep nothing from one call to the next: no global, no default argument "
        "that changes, no attribute of a function",
    )


class SecondRuns(Runs):
    """The records of the second time; what is played alone is read where it is."""

    def __init__(self, base: PlayedRuns, records: Records) -> None:
        super().__init__(base.source, base.world_size, base.seed)
        self._base, self._records = base, records

    def read(self, spec: RunSpec) -> Run:
        """The record of a run."""
        return self._records.get(spec) or self._base.read(spec)

    def reference(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        """The record of the reference: its second time is as its first."""
        return self._base.reference(scenario, **values)


Judge = Callable[[Bill, Bill], None]


def no_more_cost(mine: Bill, right: Bill, excused: Container[str] = ()) -> None:
    """S1, of one scenario.

    Raises:
        NotYetError: it costs more.
    """
    for what, verb, own, reference, least in (
        (BYTES, "sends", mine.sent_bytes, right.sent_bytes, FEW_BYTES),
        (CALLS, "calls", mine.collectives, right.collectives, 0),
        (OPERATIONS, "does", mine.operations, right.operations, FEW_OPERATIONS),
    ):
        if what in excused or own is None or reference is None:
            continue
        most = max(reference)
        limit = most if what == CALLS else most * MARGIN + least
        rank = max(range(len(own)), key=own.__getitem__)
        if own[rank] > limit:
            raise NotYetError(
                f"rank {rank} {verb} {own[rank]:,.0f} {what}, expected at most "
                f"{most:,.0f}, as in the reference",
                evidence=[
                    (r, what, f"{x:,.0f}   reference {y:,.0f}")
                    for r, (x, y) in enumerate(zip(own, reference, strict=True))
                ],
            )


def no_other_change(mine: Bill, right: Bill) -> None:
    """S2, of one scenario.

    Raises:
        NotYetError: a call changed what the reference leaves as it is.
    """
    allowed = {_kind(*change) for own in right.changes for change in own}
    for rank, own in enumerate(mine.changes):
        for function, aspect in sorted(own):
            if _kind(function, aspect) not in allowed:
                raise NotYetError(
                    f"{function} changed {_spoken(aspect)} on rank {rank}, expected no "
                    "change",
                    slug=SIDE_EFFECT,
                )


def _spoken(aspect: str) -> str:
    """`batch: its values` as one says it."""
    name, _, what = aspect.rpartition(": its ")
    return f"the {what} of {name}" if name else aspect


def _kind(function: str, aspect: str) -> tuple[str, str]:
    """What is free: which method of a class does it, and which gradients are None."""
    if aspect.endswith(GRADIENT):
        aspect = re.split(r"\W", aspect, maxsplit=1)[0] + GRADIENT
    return function.partition(".")[0], aspect
