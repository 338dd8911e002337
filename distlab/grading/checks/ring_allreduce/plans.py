"""Checks of 3.4: the plans of all ranks, side by side; no tensor is sent."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.grading.checks.ring_allreduce.clock import (
    RECEIVED,
    SENT,
    Entry,
    Misuse,
    Plans,
    Played,
    adds_without,
    misuses,
    named,
)
from distlab.grading.checks.ring_allreduce.counts import in_words, what_is_off
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

KINDS = ("irecv", "isend", "wait", "add")
SETTINGS = ((3, 2), (3, 1), (2, 1), (2, 3), (4, 1), (4, 3), (5, 2), (8, 1), (3, 8))
"""World size, segments per chunk."""
ALL_IN_ONE = (3, 8)  # the setting that is timed
WIRE_S, ADD_S = 1.0, 0.75  # of one segment
MOST = 1.2  # times what the messages alone take; without overlap it is 1.375 times
EARLY_IRECV = "start the next irecv before the add, into the other buffer"
EARLY_ISEND = (
    "call the next isend before the add: its message moves while the rank adds"
)
_SHOWN = 4  # lines of a plan
_LIMIT = 5000
RULE = 'a list of Op(kind, segment, buffer); kind is "irecv", "isend", "wait" or "add"'


@dataclass(frozen=True)
class Setting:
    """All ranks' plans for one world size and number of segments."""

    plans: Plans
    num_segments: int  # per chunk

    @property
    def n(self) -> int:
        """The world size."""
        return len(self.plans)

    @property
    def total(self) -> int:
        """Segments of the tensor."""
        return self.n * self.num_segments

    @property
    def words(self) -> str:
        """`3 ranks, 2 segments per chunk`."""
        plural = "s" if self.num_segments > 1 else ""
        return f"{self.n} ranks, {self.num_segments} segment{plural} per chunk"

    @property
    def situation(self) -> str:
        """`with 3 ranks and 2 segments per chunk`."""
        return "with " + self.words.replace(", ", " and ")

    def call(self, rank: int) -> str:
        """`in segment_plan(0, 3, 2)`."""
        return f"in segment_plan({rank}, {self.n}, {self.num_segments})"

    def misuse(self) -> tuple[int, Misuse] | None:
        """The first of them, and whose plan it is in."""
        for rank, plan in enumerate(self.plans):
            for misuse in misuses(plan):
                return rank, misuse
        return None


def make_plans(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """Every rank's plan in each setting, as tuples, or what it is instead."""
    results: list[Any] = []
    for n, num_segments in SETTINGS:
        plans = []
        for rank in range(n):
            with in_call(f"segment_plan({rank}, {n}, {num_segments})"):
                plan = unit.segment_plan(rank, n, num_segments)
            plans.append(_read(plan, n * num_segments))
        results.append(plans)
    return results


def _read(plan: Any, total: int) -> list[Entry] | str:
    if plan is None:
        return "returned None, expected a list of Op: is a return missing?"
    if not isinstance(plan, list | tuple):
        return f"returned {plan!r:.40}, expected a list of Op"
    entries: list[Entry] = []
    for op in plan[:_LIMIT]:
        try:
            kind, segment, buffer = (*op, None) if len(op) == 2 else op
            segment = operator.index(segment)
            buffer = None if buffer is None else operator.index(buffer)
        except (TypeError, ValueError):
            return f"contains {op!r:.40}, expected an Op"
        if kind not in KINDS:
            kinds = ", ".join(KINDS)
            return f"contains the kind {kind!r:.20}, expected one of {kinds}"
        if not 0 <= segment < total:
            return f"contains segment {segment}, expected numbers from 0 to {total - 1}"
        if buffer not in (None, 0, 1):
            return f"contains receive buffer {buffer}, expected 0 or 1"
        if kind == "add" and buffer is None:
            return f"contains add {segment} without a buffer, expected the one to add"
        entries.append((kind, segment, buffer))
    return entries


def _settings(runs: Runs) -> Iterator[Setting]:
    results = worked_out(runs, make_plans).values[0]
    for (n, num_segments), plans in zip(SETTINGS, results, strict=True):
        for rank, plan in enumerate(plans):
            if isinstance(plan, str):
                call = f"segment_plan({rank}, {n}, {num_segments})"
                raise NotYetError(f"{call} {plan}", rule=RULE, fatal=True)
        yield Setting([[tuple(e) for e in plan] for plan in plans], num_segments)


def _around(rank: int, plan: list[Entry], index: int) -> tuple[Evidence, ...]:
    """The operations before and at this place."""
    first = max(0, index - _SHOWN + 1)
    lines = [
        Evidence(rank, f"op {number}", named(plan[number]))
        for number in range(first, index + 1)
    ]
    return tuple(lines)


# ── the clauses ─────────────────────────────────────────────────────────────────────


@clause("ring_allreduce.segment_plan", "C1", worlds=(1,), runs=[on_ranks(make_plans)])
def plans_add_up(runs: Runs) -> str | None:
    """Every rank's values exactly once, in each segment of each rank."""
    for setting in _settings(runs):
        played = Played(setting.plans, setting.total)
        _expect_order(setting, played)
        try:
            _expect_an_end(setting, played)
            _expect_sums(setting, played)
        except NotYetError:
            misuse = setting.misuse()
            if misuse and misuse[1].slug == "touched-in-flight":
                raise NotJudgedError("a buffer in flight is used: see C2") from None
            raise
    return None


def _expect_an_end(setting: Setting, played: Played) -> None:
    stuck = played.stuck()
    if stuck:
        rank, entry, kind = stuck[0]
        other = (rank + 1 if kind == SENT else rank - 1) % setting.n
        never = "irecv" if kind == SENT else "isend"
        in_sends = len(stuck) == setting.n and all(s[2] == SENT for s in stuck)
        what = (
            f"rank {rank} waits forever at `{named(entry)}`, because rank {other} has "
            f"not called the {never}"
        )
        if in_sends:
            what = (
                "every rank waits for an isend before its right neighbor calls irecv, "
                "so all wait forever"
            )
        raise NotYetError(
            f"{setting.situation}, {what}",
            slug="ring-of-sends" if in_sends else "",
            evidence=[
                (r, "waits", f"op {played.places[r]}: {named(e)}")
                for r, e, _ in stuck[:8]
            ],
            rule="every rank calls the irecv before it waits for its own isend",
        )
    for rank, link in enumerate(played.links):
        if len(link.sent) != len(link.received):
            right = (rank + 1) % setting.n
            raise NotYetError(
                f"{setting.situation}, rank {rank} sends {len(link.sent)} messages, "
                f"but rank {right} receives {len(link.received)}, expected as many",
                rule="each isend meets one irecv of the right neighbor",
            )


def _expect_order(setting: Setting, played: Played) -> None:
    if played.crossed:
        sender, _, segment, meant = played.crossed
        right = (sender + 1) % setting.n
        raise NotYetError(
            f"{setting.situation}, rank {sender} sends segment {segment}, but rank "
            f"{right} receives it as segment {meant}, expected the same number",
            rule="a rank receives the segments in the order in which its left neighbor "
            "sends them",
        )


def _expect_sums(setting: Setting, played: Played) -> None:
    every = (1,) * setting.n
    held = [played.segments(rank) for rank in range(setting.n)]
    for rank, segments in enumerate(held):
        for number, counts in enumerate(segments):
            if counts == every:
                continue
            done = [sum(c == every for c in own) for own in held]
            few = all(0 < count < setting.total for count in done)
            owned = all(
                any(own[s] == every for own in held) for s in range(len(held[0]))
            )
            sends = max(len(link.sent) for link in played.links)
            half = sends <= (setting.n - 1) * setting.num_segments
            raise NotYetError(
                f"{setting.situation}, once all plans have run, segment "
                f"{number} on rank {rank} " + what_is_off(list(counts)),
                slug="second-half-missing" if few and owned and half else "",
                evidence=[(r, "holds", _words(own)) for r, own in enumerate(held[:8])],
                rule="each rank's values must be added to each segment exactly once",
            )


def share_in_words(share: float) -> str:
    """`only 12%`, `none`."""
    return f"only {share:.0%}" if share >= 0.005 else "none"


def _words(segments: list[tuple[int, ...]]) -> str:
    words = [f"{s}: {in_words(list(counts))}" for s, counts in enumerate(segments[:6])]
    return "  ".join(words) + "  …" * (len(segments) > 6)


@clause("ring_allreduce.segment_plan", "C2", worlds=(1,), runs=[on_ranks(make_plans)])
def buffers_in_flight_are_left_alone(runs: Runs) -> str | None:
    """Between isend or irecv and its wait nothing else uses that buffer."""
    for setting in _settings(runs):
        misuse = setting.misuse()
        if misuse:
            rank, (number, what, slug) = misuse
            raise NotYetError(
                f"{setting.call(rank)}, {what}",
                slug=slug,
                evidence=_around(rank, setting.plans[rank], number),
                rule="after isend or irecv, wait once; only then use the buffer again",
            )
    return None


@clause("ring_allreduce.segment_plan", "C3", worlds=(1,), runs=[on_ranks(make_plans)])
def plans_send_little(runs: Runs) -> str | None:
    """2(n - 1) chunks of segments, no more."""
    for setting in _settings(runs):
        enough = 2 * (setting.n - 1) * setting.num_segments
        for rank, plan in enumerate(setting.plans):
            sends = sum(kind == SENT for kind, _, _ in plan)
            if sends > enough:
                raise NotYetError(
                    f"{setting.call(rank)}, the plan sends {sends} segments, expected "
                    f"at most {enough}",
                    slug="extra-messages",
                    rule="n - 1 steps until each segment is summed, n - 1 more until "
                    "every rank has it",
                )
    return None


@clause("ring_allreduce.segment_plan", "C4", worlds=(1,), runs=[on_ranks(make_plans)])
def additions_overlap(runs: Runs) -> str | None:
    """By the clock, not much longer than the messages alone."""
    settings = {(s.n, s.num_segments): s for s in _settings(runs)}
    setting = settings[ALL_IN_ONE]
    played = Played(setting.plans, setting.total, WIRE_S, ADD_S)
    adds = sum(kind == "add" for kind, _, _ in setting.plans[0])
    if played.stuck() or adds < (setting.n - 1) * setting.num_segments:
        raise NotJudgedError("the plans do not give the sum: see C1")
    alone_s = 2 * (setting.n - 1) * setting.num_segments * WIRE_S
    adding_s = (setting.n - 1) * setting.num_segments * ADD_S
    if played.time_s > MOST * alone_s:
        overlap = 1 - (played.time_s - alone_s) / adding_s
        idle_in, idle_out = played.idle_adds(0)
        # The last addition has no next irecv.
        unready = adds_without(RECEIVED, setting.plans[0])
        raise NotYetError(
            f"{setting.situation}, the plans take {played.time_s:.3g} s, expected at "
            f"most {MOST * alone_s:.3g} s: {share_in_words(overlap)} of the additions "
            "overlap with messages",
            slug="no-overlap" if overlap < 0.25 else "",
            evidence=[
                (
                    NOBODY,
                    "rank 0",
                    f"{adds} additions; no message moves to it during {idle_in} "
                    f"of them, none from it during {idle_out}",
                )
            ],
            rule=EARLY_IRECV if unready > 1 else EARLY_ISEND,
        )
    for setting in settings.values():  # the clock has looked at one
        _expect_isends(setting)
    return (
        f"{setting.words}: {played.time_s:.4g} s; the messages alone {alone_s:.4g}, "
        f"the additions {adding_s:.4g}"
    )


def _expect_isends(setting: Setting) -> None:
    for rank, plan in enumerate(setting.plans):
        idle = adds_without(SENT, plan)
        if idle:
            adds = sum(kind == "add" for kind, _, _ in plan)
            raise NotYetError(
                f"{setting.call(rank)}, no isend is in flight during {idle} of "
                f"{adds} additions, expected one during each",
                slug="no-overlap" if idle == adds else "",
                evidence=[(rank, "calls", ", ".join(map(named, plan[:_SHOWN])))],
                rule=EARLY_ISEND,
            )
