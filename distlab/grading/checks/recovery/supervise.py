"""Checks of 4.7, `recovery.supervise`: scripts of processes that fail."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from signal import SIGTERM
from types import ModuleType
from typing import Any, NamedTuple

from distlab.comm.services import Tick
from distlab.given.process_group import Begin, Interrupted
from distlab.given.recovery import (
    Completed,
    Ended,
    Form,
    Frozen,
    Ready,
    Signal,
    Start,
)
from distlab.grading.checks.recovery.contract import Due, SupervisorContract
from distlab.grading.checks.recovery.facts import facts
from distlab.grading.checks.recovery.faults import (
    BY_HAND,
    NUM_RANDOM,
    SIZES,
    RecoveringProcesses,
    Script,
    scripts,
)
from distlab.grading.checks.recovery.sentences import (
    difference,
    failed,
    no_signal,
    situation,
    used,
)
from distlab.grading.checks.recovery.words import evidence
from distlab.grading.clause import clauses
from distlab.grading.kit import launcher_actions
from distlab.grading.kit.histories import (
    History,
    Row,
    rows_of,
)
from distlab.grading.kit.launcher_actions import (
    END,
    Fact,
    common_fact,
    expect_no_fault,
    first_faults,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "recovery.supervise"
_EVENTS: dict[str, Any] = {
    "begin": Begin,
    "ready": Ready,
    "ended": Ended,
    "frozen": Frozen,
    "completed": Completed,
    "tick": Tick,
    "interrupted": Interrupted,
}


def play_faults(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[int, History]]:
    """The first script that breaks each clause: its number, and the actions."""
    return first_faults(
        scripts(seed), lambda script: play_supervisor(unit, script), faults
    )


def play_supervisor(unit: ModuleType, script: Script) -> History:
    """The events of a script with the supervisor's actions, until all is over."""
    supervisor = unit.Supervisor(
        script.world_size,
        script.num_standbys,
        max_restarts=script.max_restarts,
        window_s=script.window_s,
        max_failures=script.max_failures,
        grace_s=script.grace_s,
    )
    can_act = partial(_can_act, script.world_size)
    return launcher_actions.play_actions(
        supervisor, RecoveringProcesses(script), _EVENTS, _fact, can_act
    )


def _can_act(world_size: int, actions: list[Fact]) -> bool:
    """Whether the script can go on: no Form of other ranks than 0 … n - 1."""
    forms = [action[2] for action in actions if action[0] == "form"]
    ranks = list(range(world_size))
    return all([r for r, _ in members] == ranks for members in forms)


def _fact(action: Any) -> Fact:
    match action:
        case Start(process):
            return "start", int(process)
        case Signal(process, number):
            return "signal", int(process), int(number)
        case Form(generation, members):
            return "form", int(generation), sorted(dict(members).items())
    return common_fact(action)


# ── verdicts ────────────────────────────────────────────────────────────────────────


def faults(script: Script, history: History) -> dict[str, NotYetError]:
    """The first event with other actions than the contract's, and its clause."""
    contract, rows = SupervisorContract(script), rows_of(history)
    for place, row in enumerate(rows):
        event, actions = tuple(row.request), [tuple(a) for a in row.reply]
        is_late = contract.is_late(row.time_s)
        restarts_s, events_s = list(contract.restarts_s), list(contract.events_s)
        happened = situation(contract, event, row.time_s)
        short = happened.partition(" with code ")[0]
        due = contract.due(event, row.time_s)
        unknown = [a[1] for a in actions if a[0] == "unknown"]
        part = "late" if is_late else contract.fault(due, actions)
        if not part and not unknown:
            continue
        before = rows[: place + (event != END and not is_late)]
        counts = restarts_s, events_s
        seen = _Fault(contract, due, part, actions, before, *counts, row.time_s)
        slug, rule = _diagnosis(seen)
        rule = rule or facts(contract, due, part)
        fault = NotYetError(
            _sentence(seen, short if seen.counted else happened, unknown),
            slug=slug,
            rule=rule,
            played=script.world_size,
            evidence=evidence(script, before, seen.cause),
        )
        return {_clause(seen): fault}
    return {}


def _sentence(seen: _Fault, happened: str, unknown: Sequence[str]) -> str:
    """The headline: the event, with what decides, and the part that is wrong."""
    if seen.part == "late":
        return no_signal(seen.contract)
    if unknown:
        return f"{happened}, the supervisor returned {unknown[0]}"
    is_up = seen.is_given_up
    told = difference(seen.contract, seen.due, seen.part, seen.actions, gives_up=is_up)
    return f"{happened}{seen.counted}, {told}"


class _Fault(NamedTuple):
    """Actions that are not what is due, and what a right supervisor knew."""

    contract: SupervisorContract  # after the event, without what was done about it
    due: Due
    part: str  # of the actions
    actions: list[Fact]
    rows: Sequence[Row]
    restarts_s: list[float]  # before the event
    events_s: list[float]  # that were answered with restarts, before this one
    now_s: float

    @property
    def kinds(self) -> set[str]:
        """Of the actions."""
        return {a[0] for a in self.actions} - {"wake"}

    @property
    def num_recent(self) -> int:
        """Restarts that count."""
        since_s = self.now_s - self.contract.script.window_s
        return sum(at_s > since_s for at_s in self.restarts_s)

    @property
    def counted(self) -> str:
        """The counts that decide, in words; or nothing."""
        reason, contract = self.due.reason, self.contract
        is_about_ends = self.counts_all_ends or (
            self.is_given_up and contract.num_ever >= contract.script.max_failures
        )
        if reason == "loop" or is_about_ends:
            return failed(contract)
        num = self.num_recent
        if self.counts_decide:
            num_old = len(self.restarts_s) - num
            return used(contract, num, num_old, together=self.counts_events)
        return ""

    @property
    def counts_decide(self) -> bool:
        """Whether the number of restarts decides what is due."""
        is_limit = self.due.reason in ("limited", "limit") and self.part != "finish"
        return is_limit or self.counts_all_restarts

    @property
    def cause(self) -> Fact:
        """An event that is shown, however old it is."""
        return self.contract.late_step if self.due.reason == "loop" else ()

    @property
    def is_given_up(self) -> bool:
        """Whether all were stopped although processes had to be replaced."""
        to = {a[1] for a in self.actions if a[0] == "signal" and a[2] == SIGTERM}
        is_all = bool(to) and to == self.contract.alive and "start" not in self.kinds
        is_due = self.due.reason in ("failure", "limited")
        return is_due and (is_all or "finish" in self.kinds)

    @property
    def counts_all_restarts(self) -> bool:
        """Whether it started so few because it counts restarts before the window."""
        is_due = self.due.reason in ("failure", "limited")
        if not is_due or self.part not in ("starts", "signals", "finish"):
            return False
        script, num_alive = self.contract.script, len(self.contract.alive)
        missing = script.world_size + script.num_standbys - num_alive
        num = max(0, min(missing, script.max_restarts - len(self.restarts_s)))
        if num_alive + num < script.world_size:
            return self.is_given_up
        num_started = sum(bool(a[0] == "start") for a in self.actions)
        is_short = num_started < self.due.num_starts
        return is_short and num_started == num

    @property
    def forgets_restarts(self) -> bool:
        """Whether it started as many as are allowed if some kind doesn't count.

        These are the restarts before the newest Form, or those in a whole group. With
        one restart counted for each event, we can't tell.
        """
        script = self.contract.script
        since_s = self.now_s - script.window_s
        recent = [s for s in self.restarts_s if s > since_s]
        formed_s = [
            row.time_s
            for row in self.rows[:-1]
            if any(a[0] == "form" for a in row.reply)
        ]
        in_broken = [s for s in self.contract.in_broken_s if since_s < s < self.now_s]
        counts = {
            sum(s > max(formed_s, default=-inf) for s in recent),
            len(in_broken),
        }
        if self.counts_events:
            return False
        return any(map(self.allows, counts - {len(recent)}))

    @property
    def counts_events(self) -> bool:
        """Whether it counts processes that were started together as one restart."""
        since_s = self.now_s - self.contract.script.window_s
        num = sum(at_s > since_s for at_s in self.events_s)
        return num < self.num_recent and self.allows(num)

    def allows(self, num_restarts: int) -> bool:
        """Whether as many were started as are allowed after so many restarts."""
        script = self.contract.script
        missing = script.world_size + script.num_standbys - len(self.contract.alive)
        num_allowed = max(0, min(missing, script.max_restarts - num_restarts))
        num_started = sum(bool(action[0] == "start") for action in self.actions)
        return num_allowed == num_started

    @property
    def counts_all_ends(self) -> bool:
        """Whether it gave up as if it counted ends while the group is not whole.

        It may have counted old restarts instead: a script by hand tells that in C4.
        """
        contract, most = self.contract, self.contract.script.max_failures
        num = sum(map(bool, contract.failures))
        is_fewer = max(contract.num_failed, contract.num_ever) < most
        return self.is_given_up and is_fewer and most <= num


def _clause(seen: _Fault) -> str:
    contract, due, part = seen.contract, seen.due, seen.part
    if not part or due.reason in ("begin", "done", "some done"):
        return "C1"
    if part == "late" or due.reason in ("loop", "interrupted", "kill", "tick"):
        return "C5"
    if due.reason in ("stopping", "stopped"):
        return "C5" if contract.stop_code else "C1"
    if due.reason in ("stale", "frozen", "step"):
        return "C3"
    if due.reason == "limit":
        return "C5" if part == "finish" and due.finish is not None else "C4"
    if _ended_survivors(seen):
        return "C2"
    if {"finish", "signal"} & seen.kinds:
        is_loop = contract.num_ever >= contract.script.max_failures
        return "C5" if is_loop or seen.counts_all_ends else "C4"
    if part == "starts":
        return "C4" if due.reason == "limited" or seen.restarts_s else "C2"
    return "C2" if contract.generation or contract.failures else "C1"


def _ended_survivors(seen: _Fault) -> bool:
    """Whether members got a signal although the group goes on."""
    to = {a[1] for a in seen.actions if a[0] == "signal"}
    is_due = seen.due.reason in ("failure", "limited")
    is_some = bool(to) and not seen.is_given_up
    return is_due and is_some and to <= set(seen.contract.members.values())


def _diagnosis(seen: _Fault) -> tuple[str, str]:
    """The misconception and what to do, where both are sure."""
    contract, due, part, kinds = seen.contract, seen.due, seen.part, seen.kinds
    if due.reason == "stale" and kinds:
        return "stale-event", "events come late and twice: look at what is alive now"
    if part == "survivors":
        rule = "a member that is alive keeps its rank, and its state"
        return "survivor-renumbered", rule
    if due.reason in ("ready", "frozen", "failure", "limited", "limit"):
        slug, rule = _of_replacing(seen)
        if rule:
            return slug, rule
    if due.reason == "loop" and (not kinds or kinds & {"start", "form"}):
        return _of_loop(contract)
    is_of_failures = contract.stop_reason in ("loop", "limit")
    if part == "finish" and due.finish and is_of_failures and "finish" in kinds:
        code = next(a[1] for a in seen.actions if a[0] == "finish")
        ends = [row.request[2] for row in seen.rows if row.request[0] == "ended"]
        codes = [code if code >= 0 else 128 - code for code in ends]
        if code in _only_after(due.finish, codes) - {0}:
            return "code-of-the-last", "the first failure is the cause"
    return "", ""


def _only_after(code: int, codes: Sequence[int]) -> set[int]:
    """The codes that come only after the last one that is `code`."""
    if code not in codes:
        return set()
    place = len(codes) - codes[::-1].index(code)
    return {*codes[place:]} - {*codes[:place]}


def _of_replacing(seen: _Fault) -> tuple[str, str]:
    """The same where processes are replaced, or may not be."""
    due, kinds = seen.due, seen.kinds
    if due.reason == "frozen":
        is_early = {"start", "form"} & kinds
        return "", "SIGKILL first: it is replaced at its Ended" * bool(is_early)
    if _ended_survivors(seen):
        return "", "survivors keep their processes: replace only those that have ended"
    if seen.counts_all_restarts:
        return "", "only restarts within the last window_s count"
    if seen.counts_all_ends:
        return "", "a group fails once: ends while it is not whole are not counted"
    if due.reason != "failure" and seen.part == "starts" and "start" in kinds:
        if not seen.forgets_restarts:
            return "", "each process that is started in place of another is a restart"
        rule = "keep the times of all restarts; only those older than window_s go"
        return "limit-reset", rule
    return "", ""


def _of_loop(contract: SupervisorContract) -> tuple[str, str]:
    """A crash loop that went on: a new step was seen that there was not."""
    if contract.late_step and not contract.has_repeated:
        _, step, generation = contract.late_step
        late = f"step {step} of generation {generation} came late"
        return "stale-event", f"{late}: only this generation's steps count"
    rule = "count the failures since a step with a higher number than any before"
    return "crash-loop", rule


PLAYED = on_ranks(play_faults)


def _judge(clause_id: str, runs: Runs) -> str | None:
    expect_no_fault(runs, PLAYED, clause_id, scripts(runs.seed), faults)
    first = f"{len(BY_HAND) + NUM_RANDOM} scripts of processes that fail"
    return first if clause_id == "C1" else None


clauses(
    TASK,
    ("C1", "C2", "C3", "C4", "C5"),
    _judge,
    worlds=(1,),
    plays=SIZES,
    runs=[PLAYED],
)
