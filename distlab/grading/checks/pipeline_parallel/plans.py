"""Checks of the schedules, tasks 2.10, 2.14 and 2.21: lists, laid side by side.

How long all ranks take with them is judged in `plan_times`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from distlab.grading.checks.pipeline_parallel.clock import (
    Entry,
    Schedules,
    in_words,
    lead,
    named,
    peak,
)
from distlab.grading.clause import Judge, clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

_SHOWN = 14  # entries in one line of a table
_LIMIT = 5000
PLAIN = tuple(
    (n, m, 1)
    for n, m in ((4, 8), (3, 8), (2, 5), (4, 2), (5, 7), (1, 3), (3, 1), (8, 32))
)
CHUNKED = ((2, 4, 2), (3, 6, 2), (4, 8, 3), (2, 2, 2), (4, 4, 2), (1, 2, 2), (8, 32, 2))
ODD = ((2, 3, 2), (4, 6, 2), (3, 1, 2), (2, 3, 1))  # no multiple


@dataclass(frozen=True)
class SchedulePlan:
    """All ranks' schedules for m microbatches and v chunks."""

    schedules: Schedules
    m: int
    v: int

    @property
    def n(self) -> int:
        """How many ranks."""
        return len(self.schedules)

    @property
    def setting(self) -> str:
        """In words."""
        ranks = "1 rank" if self.n == 1 else f"{self.n} ranks"
        microbatches = "1 microbatch" if self.m == 1 else f"{self.m} microbatches"
        chunks = f", {self.v} chunks" if self.v > 1 else ""
        return f"{ranks}, {microbatches}{chunks}"

    @property
    def said(self) -> str:
        """How a headline about it begins."""
        *most, last = self.setting.split(", ")
        return f"with {', '.join(most)} and {last},"

    def table(self) -> tuple[Evidence, ...]:
        """Each rank's list."""
        lines = []
        for rank, schedule in enumerate(self.schedules):
            more = " …" if len(schedule) > _SHOWN else ""
            text = " ".join(map(named, schedule[:_SHOWN])) + more
            lines.append(Evidence(rank, f"{len(schedule)}:", text))
        return tuple(lines)


def make_schedules(
    context: RankContext, unit: ModuleType, seed: int, name: str
) -> dict[str, Any]:
    """Every rank's schedule in each setting; and what comes of settings to refuse."""
    settings = CHUNKED if name == "interleaved" else PLAIN
    found: list[Any] = []
    for n, m, v in settings:
        schedules = []
        for rank in range(n):
            values = (rank, n, m, v) if name == "interleaved" else (rank, n, m)
            with in_call(f"{name}{values}"):
                schedules.append(_read(getattr(unit, name)(*values)))
        found.append(schedules)
    refused = []
    for n, m, v in ODD if name == "interleaved" else ():
        try:
            unit.interleaved(0, n, m, v)
            refused.append("raises nothing")
        except Exception as error:
            refused.append(f"raises {type(error).__name__}")
    return {"found": found, "refused": refused}


def clause_of(name: str, clause_id: str) -> Callable[[Judge], Judge]:
    """Register a check of the function `name`, as `clause` does."""
    runs = [on_ranks(make_schedules, name=name)]
    return clause(f"pipeline_parallel.{name}", clause_id, worlds=(1,), runs=runs)


def _read(schedule: Any) -> list[Entry] | str:
    if not isinstance(schedule, list | tuple):
        return f"is {schedule!r:.24}, expected a list of Actions"
    entries = []
    for entry in schedule[:_LIMIT]:
        try:
            kind, number, chunk = (*entry, 0) if len(entry) == 2 else entry
            entries.append((kind, operator.index(number), operator.index(chunk)))
        except (TypeError, ValueError):
            return f"contains {entry!r:.40}, which is not an Action"
        if kind not in ("F", "B"):
            return f'contains {kind!r:.20}: an Action\'s kind is "F" or "B"'
    return entries


def _plans(runs: Runs, name: str) -> Iterator[SchedulePlan]:
    settings = CHUNKED if name == "interleaved" else PLAIN
    found = _worked_out(runs, name)["found"]
    for (n, m, v), schedules in zip(settings, found, strict=True):
        for rank, schedule in enumerate(schedules):
            if isinstance(schedule, str):
                raise NotYetError(
                    f"with {n} ranks and {m} microbatches, the schedule of rank {rank} "
                    f"{schedule}",
                    rule='a list of Action("F", number) and Action("B", number)',
                    fatal=True,
                )
        yield SchedulePlan([[tuple(e) for e in s] for s in schedules], m, v)


def _worked_out(runs: Runs, name: str) -> dict[str, Any]:
    told: dict[str, Any] = worked_out(runs, make_schedules, name=name).values[0]
    return told


# ── every microbatch, once there and once back ──────────────────────────────────────


def expect_complete(plan: SchedulePlan) -> None:
    """Each rank does each entry once, forward before backward.

    Raises:
        NotYetError: it does not.
    """
    for rank, flaw, slug in _flaws(plan):
        raise NotYetError(
            f"{plan.said} rank {rank} {flaw}",
            slug=slug,
            evidence=plan.table(),
            rule="each microbatch one forward, and later one backward",
        )


def _flaws(plan: SchedulePlan) -> Iterator[tuple[int, str, str]]:
    """Rank, what is wrong with its list, and the name of that."""
    wanted = [(number, chunk) for number in range(plan.m) for chunk in range(plan.v)]
    for rank, schedule in enumerate(plan.schedules):
        flaw, slug = _flaw(schedule, wanted)
        if flaw:
            yield rank, flaw, slug


def _flaw(schedule: list[Entry], wanted: list[tuple[int, int]]) -> tuple[str, str]:
    every = {(kind, *pair) for pair in wanted for kind in "FB"}
    counts = Counter(schedule)
    for entry in schedule:
        if entry not in every:
            return f"runs {in_words(entry)}, which does not exist", ""
        if counts[entry] > 1:
            often = f"{counts[entry]} times, expected once"
            return f"runs {in_words(entry)} {often}", ""
    missing = sorted(every - set(schedule), key=lambda entry: (entry[0] != "F", *entry))
    if missing:
        return f"never runs {in_words(missing[0])}", "schedule-incomplete"
    place = {entry: index for index, entry in enumerate(schedule)}
    for pair in wanted:
        if place[("B", *pair)] < place[("F", *pair)]:
            first = in_words(("B", *pair))
            return f"runs {first} before its forward", "backward-before-forward"
    return "", ""


def _judge_complete(name: str, runs: Runs) -> None:
    for plan in _plans(runs, name):
        expect_complete(plan)


def complete_plans(runs: Runs, name: str) -> Iterator[SchedulePlan]:
    """The plans, for a clause that needs complete ones."""
    for plan in _plans(runs, name):
        if any(_flaws(plan)):
            raise NotJudgedError("the schedules are not complete: see C1")
        yield plan


for _name in ("gpipe", "one_f_one_b"):
    clause_of(_name, "C1")(partial(_judge_complete, _name))


@clause_of("interleaved", "C1")
def interleaved_is_complete(runs: Runs) -> str | None:
    """The same through every chunk; m that n does not divide is refused."""
    _judge_complete("interleaved", runs)
    told = _worked_out(runs, "interleaved")["refused"]
    for (n, m, _), what in zip(ODD, told, strict=True):
        if what != "raises ValueError":
            does = what.replace("raises", "raised")
            raise NotYetError(
                f"with {m} microbatches on {n} ranks, interleaved {does}, expected a "
                f"ValueError because {m} isn't a multiple of {n}",
                rule="look at num_microbatches % world_size first",
            )
    return None


# ── what kind of schedule it is ─────────────────────────────────────────────────────


@clause_of("gpipe", "C2")
def forwards_come_first(runs: Runs) -> str | None:
    """No forward after a backward."""
    for plan in complete_plans(runs, "gpipe"):
        for rank, schedule in enumerate(plan.schedules):
            if lead(schedule) < plan.m:
                first, late = schedule[lead(schedule)], schedule[lead(schedule) :]
                forward = next(entry for entry in late if entry[0] == "F")
                raise NotYetError(
                    f"{plan.said} rank {rank} runs {in_words(first)} before "
                    f"{in_words(forward)}, expected all forwards first",
                    evidence=plan.table(),
                    rule="GPipe: all forwards of the batch, then all backwards",
                )
    return None


def _bound(plan: SchedulePlan, rank: int) -> int:
    if plan.v == 1:
        return plan.n - rank
    return (plan.v - 1) * plan.n + 2 * (plan.n - 1 - rank) + 1


def _judge_peaks(name: str, runs: Runs) -> str:
    note = ""
    for plan in complete_plans(runs, name):
        peaks = [peak(schedule) for schedule in plan.schedules]
        for rank, most in enumerate(peaks):
            bound = _bound(plan, rank)
            if most <= bound:
                continue
            total = plan.m * plan.v
            disguised = all(lead(s) == total for s in plan.schedules)
            one_more = max(p - _bound(plan, r) for r, p in enumerate(peaks)) <= 1
            slug = "warmup-too-long" if one_more and bound < total else ""
            raise NotYetError(
                f"{plan.said} rank {rank} has {most} forwards in flight at once, "
                f"expected at most {bound}",
                slug="gpipe-in-disguise" if disguised else slug,
                evidence=plan.table(),
                rule="the activations of each forward are kept until its backward",
            )
        note = f"{plan.setting}: {' '.join(map(str, peaks))} in flight at most"
    return note


for _name in ("one_f_one_b", "interleaved"):
    clause_of(_name, "C3")(partial(_judge_peaks, _name))
