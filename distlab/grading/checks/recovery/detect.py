"""Checks of 4.6, `recovery.detect`: reports of recorded runs, and drawn ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distlab.given.recovery import COMPUTE, SAVE, WAIT
from distlab.given.recovery import Report as Row
from distlab.grading.checks.recovery.formulas import known_as
from distlab.grading.checks.recovery.reports import (
    LEAST,
    SLOW,
    Ranks,
    ReportsCase,
    cases,
    idle,
    ranks_of,
    right,
    usual,
)
from distlab.grading.clause import clause, clauses
from distlab.grading.kit.apart import apart, said
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.terminal import enumerated

TASK = "recovery.detect"
_LISTS = ("dead", "frozen", "slow")
_CLOSE = 1e-6


def find_usual(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What usual_step_s returns for each case."""
    found = []
    for case in cases(seed):
        with in_call(f"usual_step_s, {case.what}"):
            told = unit.usual_step_s(list(case.rows))
        is_number = isinstance(told, int | float)
        found.append(float(told) if is_number else f"{told!r:.50}")
    return found


def find_conditions(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What detect returns for each case."""
    found = []
    for case in cases(seed):
        with in_call(f"detect, {case.what}"):
            told = unit.detect(list(case.rows), case.now_s, patience=case.patience)
            found.append(_read(told))
    return found


def _read(told: Any) -> Any:
    if told is None:
        return "returned None: is a return missing?"
    try:
        return [
            [operator.index(rank) for rank in getattr(told, name)] for name in _LISTS
        ]
    except (AttributeError, TypeError):
        return f"returned {told!r:.50}, expected a Condition of three lists of ranks"


# ── mistakes ────────────────────────────────────────────────────────────────────────


def _silent(row: Row, case: ReportsCase) -> float:
    return case.now_s - row.beat_s


def _limit(case: ReportsCase) -> float:
    return case.patience * usual(case.rows)


class Mistake(NamedTuple):
    """A known misconception: which ranks of a case it takes for frozen."""

    slug: str
    sentence: str
    rule: str
    freezes: Callable[[Row, ReportsCase], bool]

    def explains(self, case: ReportsCase, frozen: list[int]) -> bool:
        """Whether it names these ranks; a process in its first step may be spared."""
        alive = [row for row in case.rows if not row.has_ended]
        named = [row for row in alive if self.freezes(row, case)]
        spared = [row for row in named if row.steps]
        return frozen in (ranks_of(named), ranks_of(spared))


MISTAKES = (
    Mistake(
        "heartbeat-not-progress",
        "heartbeats alone decided",
        "decide from steps: the heartbeat goes on while the trainer hangs",
        lambda row, case: _silent(row, case) > _limit(case),
    ),
    Mistake(
        "heartbeat-not-progress",
        "a recent heartbeat excused every rank",
        "decide from steps: the heartbeat goes on while the trainer hangs",
        lambda row, case: min(_silent(row, case), idle(row, case.now_s)) > _limit(case),
    ),
    Mistake(
        "waits-for-the-frozen",
        "ranks that only wait were blamed",
        "a rank in WAIT, with a heartbeat, waits for the rank that is at fault",
        lambda row, case: (
            idle(row, case.now_s) > _limit(case)
            and (row.doing != SAVE or _silent(row, case) > _limit(case))
        ),
    ),
    Mistake(
        "waits-for-the-frozen",
        "every rank without a recent step was blamed",
        "a rank in WAIT, with a heartbeat, waits for the rank that is at fault",
        lambda row, case: idle(row, case.now_s) > _limit(case),
    ),
    Mistake(
        "",
        "a recent heartbeat did not excuse SAVE",
        "in SAVE a rank is frozen only if its heartbeat has stopped, too",
        lambda row, case: (
            idle(row, case.now_s) > _limit(case)
            and (row.doing != WAIT or _silent(row, case) > _limit(case))
        ),
    ),
    Mistake(
        "",
        "WAIT and SAVE were ignored",
        "in WAIT or SAVE a rank is frozen if its heartbeat has stopped, too",
        lambda row, case: row.doing == COMPUTE and idle(row, case.now_s) > _limit(case),
    ),
    Mistake(
        "heartbeat-not-progress",
        "a late heartbeat was enough",
        "decide from steps: a heartbeat may be late while a rank trains",
        lambda row, case: (
            _silent(row, case) > _limit(case)
            or (row.doing == COMPUTE and idle(row, case.now_s) > _limit(case))
        ),
    ),
    Mistake(
        "",
        "it ignored `since_s`",
        "a rank is idle since the later of since_s and its newest step",
        lambda row, case: (
            bool(row.steps)
            and case.now_s - row.steps[-1].time_s > _limit(case)
            and (row.doing == COMPUTE or _silent(row, case) > _limit(case))
        ),
    ),
    Mistake(
        "",
        "it ignored the time of the newest step",
        "a rank is idle since the later of since_s and its newest step",
        lambda row, case: (
            case.now_s - row.since_s > _limit(case)
            and (row.doing == COMPUTE or _silent(row, case) > _limit(case))
        ),
    ),
    *(
        Mistake(
            "limit-in-seconds",
            f"the limit was {seconds:g} s in every run",
            "a limit is a multiple of the run's own usual step: usual_step_s",
            lambda row, case, seconds=seconds: (  # type: ignore[misc]
                idle(row, case.now_s) > seconds
                and (row.doing == COMPUTE or _silent(row, case) > seconds)
            ),
        )
        for seconds in (0.5, 1, 2, 3, 5, 10, 15, 20, 30, 60)
    ),
)


# ── verdicts ────────────────────────────────────────────────────────────────────────


def _list_words(
    case: ReportsCase, name: str, actual: list[int], expected: list[int]
) -> str:
    """The state of the first rank that a list wrongly has or lacks."""
    more = [rank for rank in actual if rank not in expected]
    lack = [rank for rank in expected if rank not in actual]
    row = next((row for row in case.rows if row.rank in (lack or more)[:1]), None)
    if row is None:
        return f"`detect` returned {name}={actual}, expected {expected}"
    told = f"rank {row.rank}{_state(case, name, row)}, but `detect`"
    if more and lack:
        s = "s" * (len(more) > 1)
        return f"{told} called rank{s} {enumerated(more)} {name} instead"
    return f"{told} {'called it' if more else 'did not call it'} {name}"


def _state(case: ReportsCase, name: str, row: Row) -> str:
    """What decides about a rank, as the rest of a clause."""
    if row.has_ended:
        return "'s process has ended"
    if name == "dead":
        return "'s process has not ended"
    if not row.steps:
        return " is in its first step, which may take any time"
    unit_s = usual(case.rows)
    if unit_s == math.inf:
        return f" was idle, and there were fewer than {LEAST} durations to judge by"
    idle_s = idle(row, case.now_s) / unit_s
    told = f" was in {row.doing.upper()} for {idle_s:.3g} times the usual step time"
    if row.doing != COMPUTE and name == "frozen":
        silent = _silent(row, case) / unit_s
        told += f" and without a heartbeat for {silent:.2g}"
    return told


def _limit_words(fault: tuple[str, list[int], list[int]], case: ReportsCase) -> str:
    """What `frozen` or `slow` asks for, with the number it compares with."""
    name, actual, expected = fault
    more = [rank for rank in actual if rank not in expected]
    lack = [rank for rank in expected if rank not in actual]
    row = next((row for row in case.rows if row.rank in (lack or more)[:1]), None)
    if row is None:
        return ""
    if row.has_ended:
        return ", expected dead only" if more and name != "dead" else ""
    if name == "dead" or not row.steps or usual(case.rows) == math.inf:
        return ""
    is_idle = idle(row, case.now_s) > _limit(case)
    limit, name_of = (case.patience, "`patience`") if is_idle else (SLOW, "SLOW")
    if name == "frozen":
        limit, name_of = case.patience, "`patience`"
    if lack:
        return f", although {name_of} is {limit:g}"
    if name == "slow" and row.doing != COMPUTE:
        return ", expected slow only for a rank in COMPUTE"
    if name == "slow" and is_idle:
        return f", expected frozen, as {name_of} is {limit:g}"
    if name == "frozen" and row.doing != COMPUTE:
        return f", although both must exceed {name_of} = {limit:g}"
    return f", expected that only above {name_of} = {limit:g}"


def _why(
    fault: tuple[str, list[int], list[int]],
    case: ReportsCase,
    mistake: Mistake | None,
) -> str:
    return f": {mistake.sentence}" if mistake else _limit_words(fault, case)


def _words(case: ReportsCase) -> tuple[Evidence, ...]:
    unit_s, lines = usual(case.rows), []
    limit = f"{case.patience:g} usual steps of {unit_s:.4g} s, idle since the later "
    limit += "of since_s and the newest step"
    if unit_s < math.inf:
        lines.append(Evidence(NOBODY, "limit", limit))
    name = "usual steps" if unit_s < math.inf else "s"
    unit_s = unit_s if unit_s < math.inf else 1.0
    for row in sorted(case.rows):
        idle_s, silent_s = idle(row, case.now_s), _silent(row, case)
        text = f"idle for {idle_s / unit_s:.1f} {name}, heartbeat "
        text += f"{silent_s / unit_s:.1f} ago" + ", no step yet" * (not row.steps)
        state = "ended" if row.has_ended else row.doing.upper()
        lines.append(Evidence(row.rank, state, text))
    return tuple(lines)


def _faults(
    case: ReportsCase, told: Any
) -> dict[str, tuple[str, list[int], list[int]]]:
    """By clause: which list is not the expected one, and both lists."""
    found: dict[str, tuple[str, list[int], list[int]]] = {}
    new = {row.rank for row in case.rows if not row.steps and not row.has_ended}
    for name, actual, expected in zip(_LISTS, told, right(case), strict=True):
        actual = sorted(actual)
        if actual == expected:
            continue
        ended = {row.rank for row in case.rows if row.has_ended}
        is_new = new & (set(actual) ^ set(expected))
        which = "C2" if name == "dead" or ended & set(actual) else "C3"
        which = "C4" if (name == "slow" and which == "C3") or is_new else which
        found.setdefault(which, (name, actual, expected))
    return found


def _judge(clause_id: str, runs: Runs) -> None:
    known = cases(runs.seed)
    told = worked_out(runs, find_conditions).values[0]
    wrong = next((one for one in told if isinstance(one, str)), None)
    if wrong:
        raise NotYetError(f"`detect` {wrong}")
    for case, ranks in zip(known, told, strict=True):
        fault = _faults(case, ranks).get(clause_id)
        if fault is None:
            continue
        name, actual, expected = fault
        mistake = _mistake(known, told) if name == "frozen" else None
        message = _list_words(case, name, actual, expected)
        if clause_id == "C4" and name == "frozen":
            rule = "a first step may take long: it compiles, or fills its caches"
            raise NotYetError(
                message, slug="first-step", rule=rule, evidence=_words(case)
            )
        doing = {row.rank: row.doing for row in case.rows}
        waits = [r for r in actual if r not in expected and doing.get(r) != COMPUTE]
        is_not_slow = name == "slow" and bool(waits)
        rule = "only a rank in COMPUTE is slow: the others wait, or save" * is_not_slow
        raise NotYetError(
            message + _why(fault, case, mistake),
            slug=mistake.slug if mistake else "",
            rule=mistake.rule if mistake else rule,
            evidence=_words(case),
        )


def _mistake(known: Sequence[ReportsCase], told: Sequence[Ranks]) -> Mistake | None:
    """The one that explains what was named as frozen in every case, if one does."""
    pairs = [(case, sorted(t[1])) for case, t in zip(known, told, strict=True)]
    fits = (m for m in MISTAKES if all(m.explains(*pair) for pair in pairs))
    return next(fits, None)


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(find_usual)])
def the_usual_step(runs: Runs) -> str | None:
    """The median and the jitter of all durations; numbers may be missing."""
    found = worked_out(runs, find_usual).values[0]
    wrong: list[tuple[ReportsCase, float]] = []
    for case, told in zip(cases(runs.seed), found, strict=True):
        if isinstance(told, str):
            raise NotYetError(f"`usual_step_s` returned {told}, expected seconds")
        expected = usual(case.rows)
        if told != expected and not math.isclose(told, expected, rel_tol=_CLOSE):
            wrong.append((case, told))
    if wrong:
        rule, words = known_as([(case.rows, told) for case, told in wrong])
        raise NotYetError(_usual_words(*wrong[0], words), rule=rule)
    return f"{len(found)} sets of reports"


def _usual_words(case: ReportsCase, told: float, formula: str) -> str:
    expected = usual(case.rows)
    num = sum(max(len(row.steps) - 1, 0) for row in case.rows)
    of = f"for {num} duration{'s' * (num != 1)}, `usual_step_s` returned"
    if expected == math.inf:
        return f"{of} {said(told)} s, expected inf for fewer than {LEAST}"
    got, wanted = apart(told, expected)
    if formula:
        return f"{of} {got} s, expected {wanted} s: {formula}"
    return f"{of} {got} s, expected {wanted} s, their median plus their jitter"


CONDITIONS = on_ranks(find_conditions)
BOTH = [CONDITIONS, on_ranks(find_usual)]
clauses(TASK, ("C2",), _judge, worlds=(1,), runs=[CONDITIONS])
clauses(TASK, ("C3",), _judge, worlds=(1,), runs=BOTH, after=("C1",))
clauses(
    TASK, ("C4",), _judge, worlds=(1,), runs=BOTH, after=("C1", "C3"), own="first-step"
)
