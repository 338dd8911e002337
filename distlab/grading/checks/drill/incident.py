"""Checks of 4.12, `drill.incident`: what went wrong first, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from distlab.given import drill as given
from distlab.given.drill import Incident
from distlab.grading.checks.drill.histories import Drill, drills, lines_of
from distlab.grading.clause import clauses
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.terminal import enumerated

TASK = "drill.incident"
_NAMES = Incident._fields
Told = Incident | str


def analyze(context: RankContext, unit: ModuleType, seed: int, name: str) -> list[Told]:
    """What incident returns for each drill of a clause."""
    results = []
    for drill in drills(seed)[name]:
        with in_call(f"incident when {drill.what}"):
            answer = unit.incident(list(drill.run.reports), list(drill.run.events))
            results.append(_read(answer))
    return results


def _read(answer: Any) -> Told:
    if answer is None:
        return "returned None: is a return missing?"
    try:
        what, rank, step, action, lost = answer
        return Incident(str(what), int(rank), int(step), str(action), int(lost))
    except (TypeError, ValueError):
        return f"returned {answer!r:.60}, expected an Incident"


# ── mistakes ────────────────────────────────────────────────────────────────────────


class Mistake(NamedTuple):
    """A known misconception: when an answer shows it, and what is said of it."""

    slug: str
    rule: str
    shows: Callable[[Drill, Incident], bool]


def _lost_by(drill: Drill) -> set[int]:
    return {event.rank for event in drill.run.events if event.kind == given.LOST}


def _blames_a_victim(drill: Drill, told: Incident) -> bool:
    kinds = (given.KILLED, given.DATA_WORKER)
    if drill.expected.what not in kinds or told.what not in (*kinds, given.FROZEN):
        return False
    return told.rank != drill.expected.rank and told.rank in _lost_by(drill)


def _blames_a_waiting_rank(drill: Drill, told: Incident) -> bool:
    kinds = (given.KILLED, given.DATA_WORKER, given.FROZEN)
    is_other = told.rank != drill.expected.rank
    return drill.expected.what == given.FROZEN and is_other and told.what in kinds


_DAMAGE = (given.NAN, given.DESYNC)


def _is_damaged(drill: Drill) -> bool:
    return drill.expected.what in _DAMAGE


def _is_later(drill: Drill, told: Incident) -> bool:
    is_damage = _is_damaged(drill) and told.what in _DAMAGE
    return is_damage and told.step > drill.expected.step


def _calls_a_pause_slow(drill: Drill, told: Incident) -> bool:
    return drill.expected.what == given.NOTHING and told.what == given.SLOW


def _lost_from(drill: Drill, *, refused: bool, damaged: bool) -> int:
    """The steps lost if refused or damaged checkpoints count as usable."""
    events = drill.run.events
    torn = set() if refused else {e.step for e in events if e.kind == given.REFUSED}
    saved = {e.step for e in events if e.kind == given.SAVED} - torn
    if _is_damaged(drill) and not damaged:
        saved = {step for step in saved if step < drill.expected.step}
    return min(_last_steps(drill)) - max(saved, default=0)


def _last_steps(drill: Drill) -> list[int]:
    """The newest step of each rank."""
    last = {report.rank: report.step for report in drill.run.reports}
    return list(last.values())


def _loads_damage(drill: Drill, told: Incident) -> bool:
    """From the newest checkpoint, or from that of the damaged step itself."""
    is_damage = _is_damaged(drill) and told.what in _DAMAGE
    if not is_damage or told.steps_lost == drill.expected.steps_lost:
        return False
    last, step = _lost_from(drill, refused=False, damaged=True), drill.expected.step
    has_own = (given.SAVED, step) in [(e.kind, e.step) for e in drill.run.events]
    own = min(_last_steps(drill)) - step if has_own else last
    return told.steps_lost in (last, own)


def _loads_refused(drill: Drill, told: Incident) -> bool:
    lost = _lost_from(drill, refused=True, damaged=False)
    is_restart = drill.expected.action == given.RESTART
    return is_restart and lost != drill.expected.steps_lost and told.steps_lost == lost


_ORDER = {given.NAN: 0, given.DESYNC: 0, given.TORN: 2, given.SLOW: 3, given.NOTHING: 4}


def _takes_a_later_one(drill: Drill, told: Incident) -> bool:
    """Something of this run, but not the first that `incident` asks for."""
    later, first = (_ORDER.get(one.what, 1) for one in (told, drill.expected))
    return told.what not in (given.NOTHING, drill.expected.what) and later > first


def _has_most(drill: Drill, told: Incident) -> bool:
    """The rank that was named has the checksum that most ranks have."""
    own = {r.rank: r.checksum for r in drill.run.reports if r.step == told.step}
    if told.what != given.DESYNC or told.rank not in own:
        return False
    return 2 * list(own.values()).count(own[told.rank]) > len(own)


def _is_right_but(drill: Drill, told: Incident, *wrong: str) -> bool:
    """Only these fields are wrong."""
    names = [name for name in _NAMES if getattr(told, name) != _right(drill, name)]
    return bool(names) and set(names) <= set(wrong)


def _right(drill: Drill, name: str) -> Any:
    return getattr(drill.expected, name)


def _dates_a_stop_otherwise(drill: Drill, told: Incident) -> bool:
    kinds = (given.KILLED, given.DATA_WORKER, given.FROZEN)
    return drill.expected.what in kinds and _is_right_but(drill, told, "step")


def _begins_late(drill: Drill, told: Incident) -> bool:
    is_later = told.step > drill.expected.step
    is_slow = drill.expected.what == given.SLOW
    return is_slow and is_later and _is_right_but(drill, told, "step")


def _counts_the_fastest(drill: Drill, told: Incident) -> bool:
    ahead = max(_last_steps(drill)) - min(_last_steps(drill))
    is_more = told.steps_lost == drill.expected.steps_lost + ahead
    return ahead > 0 and is_more and _is_right_but(drill, told, "steps_lost")


MISTAKES = (
    Mistake(
        "victim-blamed",
        "a rank that has LOST its peers is never the cause: which process stopped "
        "without that?",
        _blames_a_victim,
    ),
    Mistake(
        "waiting-rank-blamed",
        "all ranks that have ENTERED the step wait for the one that has not",
        _blames_a_waiting_rank,
    ),
    Mistake(
        "damage-found-late",
        "walk forward from the first step: the first one that shows it is the cause",
        _is_later,
    ),
    Mistake(
        "pause-called-slow",
        "a rank is slow if it is late in each of the last PATIENCE steps",
        _calls_a_pause_slow,
    ),
    Mistake(
        "checkpoint-after-damage",
        "a checkpoint of the step of the damage, or of a later one, has it, too",
        _loads_damage,
    ),
    Mistake(
        "refused-checkpoint-used",
        "a checkpoint with a REFUSED shard cannot be loaded: take the one before it",
        _loads_refused,
    ),
    Mistake(
        "",
        "the first of damage, stopped_process, TORN and straggler is the cause",
        _takes_a_later_one,
    ),
    Mistake(
        "",
        "this rank has the checksum that most ranks have in that step",
        _has_most,
    ),
    Mistake(
        "",
        "the step is the one after the last report of the rank that is the cause",
        _dates_a_stop_otherwise,
    ),
    Mistake(
        "",
        "the step is the first one since which the rank is late without a break",
        _begins_late,
    ),
    Mistake(
        "",
        "only steps that all ranks have completed count: one rank is ahead",
        _counts_the_fastest,
    ),
)


def _sentence(what: str, expected: Incident, answer: Incident) -> str:
    """What is wrong; if it is the cause, then no more, as the rest follows from it."""
    wrong = list(_differences(expected, answer))
    if answer.what != expected.what:
        wrong = wrong[:1]
    if [name for name, _, _ in wrong] == ["rank"] and expected.rank >= 0:
        (_, right, told), *_ = wrong
        return f"when {what}, `incident` blamed rank {told}, expected rank {right}"
    got = enumerated(f"{name}={told!r}" for name, _, told in wrong)
    due = enumerated(f"{name}={right!r}" for name, right, _ in wrong)
    return f"when {what}, `incident` returned {got}, expected {due}"


def _judge(name: str, runs: Runs) -> str | None:
    """Judge the incident of each drill of a clause.

    Raises:
        NotYetError: another one was returned.
    """
    results = worked_out(runs, on_ranks(analyze, name=name)).values[0]
    for drill, answer in zip(drills(runs.seed)[name], results, strict=True):
        if isinstance(answer, str):
            raise NotYetError(f"when {drill.what}, `incident` {answer}")
        answer = Incident(*answer)  # a named tuple comes from a rank as a plain one
        if answer == drill.expected:
            continue
        mistake = next((m for m in MISTAKES if m.shows(drill, answer)), None)
        raise NotYetError(
            _sentence(drill.what, drill.expected, answer),
            slug=mistake.slug if mistake else "",
            rule=mistake.rule if mistake else "",
            evidence=[(rank, kind, text) for rank, kind, text in lines_of(drill)],
        )
    return None


def _differences(
    expected: Incident, answer: Incident
) -> Iterator[tuple[str, object, object]]:
    """The name of a field, what it should be, and what it is."""
    for name, right, told in zip(_NAMES, expected, answer, strict=True):
        if right != told:
            yield name, right, told


for _name in ("C1", "C2", "C3", "C4", "C5"):
    clauses(TASK, (_name,), _judge, worlds=(1,), runs=[on_ranks(analyze, name=_name)])
