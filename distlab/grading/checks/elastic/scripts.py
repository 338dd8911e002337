"""Scripts for 4.9, by hand and of faults, and the contract of a `Membership`.

A script by hand is a list of events with their times: `7.2 join a 12 1` is a Join of
member a with step 12, of generation 1; `7 end b` a Lost whose process has ended, `7 cut
b` one whose process has not; `3 tick` a Tick that was not asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from distlab.grading.checks.elastic.world import (
    HORIZON_S,
    KINDS,
    NODES,
    Fact,
    Settings,
    World,
    event_of,
    read_actions,
    settings_of,
)
from distlab.grading.kit.histories import Model, Row
from distlab.sim import Faults, random_script
from distlab.sim.scripts import faults_of, without

NUM_RANDOM, SIZES = 120, (1, 2, 3, 4, 5)
END: Fact = ("end",)
"""The last row of a history, where nothing happens any more."""
Told = tuple[float, Fact, list[Fact]]
"""When, which event, and the actions."""
_END: list[Told] = [(math.inf, END, [])]
_LATE_S = 0.1


@dataclass(frozen=True)
class ByHand:
    """A list of events, and what the Membership is made with."""

    events: tuple[str, ...]
    settings: Settings = field(default_factory=Settings)
    late_s: float = 0.0  # from the time of a WakeAt to its Tick, below _LATE_S


Script = ByHand | Faults
_FOUR = ("0 join a", "0.1 join b", "0.2 join c", "0.3 join d")
_ONE = Settings(min_members=1)
_LATE_TICK = 0.06


def _four(*events: str, **own: int) -> ByHand:
    return ByHand((*_FOUR, *events), Settings(**own))


BY_HAND = (
    ByHand(("0 join a", "1 join b", "3 join c")),
    ByHand(("0 join a", "0 tick", "1 join b", "2 tick", "4 join b", "5.9 tick")),
    _four(),
    ByHand(_FOUR[:3], Settings(max_members=3, microbatch_size=1)),
    ByHand(("0 join a", "30 join b 4", "31 join c 9", "31.5 join d 2")),
    ByHand(("0 join a", "59 tick")),
    ByHand(("0 join a", "1 join b", "4 end b", "20 join c", "24 tick")),
    ByHand(("0 join a", "1 join b", "2 cut b", "3 join b", "7 join a")),
    # A member ends; the others have not completed the same step.
    _four("9 end a", "9.1 join b 7 1", "9.2 join c 8 1", "9.3 join d 7 1"),
    _four("9 join c 8 1", "9.1 join b 7 1", "9.2 end a", "9.3 join d 8 1"),
    _four("9 end b", "9.1 join e 0", "9.2 join a 7 1", "9.3 join c 8 1",
          "9.4 join d 8 1"),
    _four("9 end a", "9.1 join e 99", "9.2 join d 7 1", "9.3 join c 6 1",
          "9.4 join b 7 1", microbatch_size=5),
    _four("9 end a", "9.1 end b", "9.2 join c 7 1", "9.3 join d 7 1"),
    _four("9 end a", "9.1 join c 7 1", "9.2 end b", "9.3 join d 7 1"),
    _four("9 join d 7 1", "9.1 join b 8 1", "9.2 join c 7 1", min_members=3),
    _four("9 end b", "9.1 join c 7 1", "9.2 end c", "9.3 join a 7 1", "9.4 join d 7 1"),
    # New members.
    ByHand(("0 join a", "0.1 join b", "8 join c", "8.1 join a 5 1", "8.3 join b 5 1")),
    ByHand(("0 join a", "0.1 join b", "8 join c", "8.1 join d", "8.2 join e",
            "8.3 join a 5 1", "8.4 join b 5 1")),
    ByHand(("0 join a", "0.1 join b", "8 join c", "8.1 end c", "8.3 join b 5 1",
            "8.4 join a 5 1")),
    _four("8 join e", "9 end a", "9.1 join e", "9.2 join f", "9.3 join b 3 1",
          "9.4 join c 3 1", "9.5 join d 3 1"),
    # Stale ones, and copies.
    _four("9 cut b", "9.1 join a 7 1", "9.2 join c 7 1", "9.3 join d 7 1",
          "20 join b 7 1", "21 join a 7 1", "22 join b2 7"),
    _four("5 join a", "9 end b", "9.1 join a 7 1", "9.2 join c 7 1", "9.3 join d 7 1",
          "20 end c", "20.1 join a 7 1", "20.2 join d 9 2", "20.3 join a 9 2"),
    _four("9 end b", "9.1 join b 7 1", "9.2 join a 7 1", "9.3 join c 7 1"),
    _four("9 end b", "9.1 join c 7 1", "9.2 join d 7 1", "20 join a 7 1",
          "30 end z", "31 join z"),
    _four("9 end b", "9.1 join e", "9.2 join a 7 1", "9.4 join c 7 1", "9.5 join f"),
    # More than max_members join, while a member is unheard that may be ahead.
    ByHand((*_FOUR[:3], "9 cut a", "9.1 join b 7 1", "9.2 join c 7 1", "9.3 join d",
            "9.4 join d", "9.5 join e", "10 end d"), Settings(max_members=3)),
    # A copy of a Join changes neither its place nor anything else.
    ByHand(("0 join a", "0.1 join b", "8 join d", "8.1 join e", "8.2 join d",
            "8.3 join f", "8.4 join a 5 1", "8.5 join b 5 1"),
           Settings(max_members=3)),
    _four("9 end a", "9.1 join f", "9.2 join e", "9.3 join f", "9.4 join d 7 1",
          "9.5 join c 7 1", "9.6 join b 7 1", max_members=5),
    # At the deadline, or after it, something happens before the Tick comes.
    ByHand(("0 join a", "1 join b", "6 end b"), late_s=_LATE_TICK),
    ByHand(("0 join a", "1 join b", "6.03 cut b", "20 join b"), late_s=_LATE_TICK),
    ByHand(("0 join a", "60 join b"), late_s=_LATE_TICK),
    ByHand(("0 join a", "60.03 join b", "62 join c"), late_s=_LATE_TICK),
    ByHand(("0 join a", "1 join b", "6.03 join c"), late_s=_LATE_TICK),
    ByHand(("0 join a", "60.03 end z"), late_s=_LATE_TICK),
    ByHand((*_FOUR[:3], "9 cut a", "9.1 join b 7 1", "9.2 join c 7 1", "14.23 end b",
            "15 join a 7 1"), late_s=_LATE_TICK),
    # A divided job.
    _four("9 cut c", "9 cut d", "9.1 join a 7 1", "9.2 join b 7 1"),
    _four("9 cut a", "9 cut b", "9.1 join c 7 1", "9.2 join d 7 1"),
    _four("9 cut a", "9 cut b", "9.1 join d 7 1", "9.2 join c 7 1", "12 join b 7 1"),
    _four("9 cut a", "9 cut b", "9.1 join c 7 1", "9.2 join d 7 1", "12 end b"),
    # Half of those that are left, with the lowest rank that has not ended.
    ByHand((*_FOUR[:3], "9 end a", "9.1 join b 7 1", "9.2 cut c"), _ONE),
    _four("9 cut b", "9.1 cut c", "9.2 cut d", "9.3 join a 7 1", "9.4 join e",
          "9.5 join f", "9.6 join g"),
    ByHand((*_FOUR[:3], "9 cut a", "9 cut b", "9.3 join c 7 1"), _ONE),
    ByHand((*_FOUR[:3], "9 end a", "9 end b", "9.3 join c 7 1"), _ONE),
    _four("9 end a", "9 end b", "9 end c", "9 end d", "10 join e", "11 join f"),
)  # fmt: skip


@lru_cache(maxsize=4)
def scripts(seed: int) -> tuple[Script, ...]:
    """Those above, and some that depend on the seed."""
    drawn = (
        random_script(1000 * seed + k, NODES, HORIZON_S, kinds=KINDS)
        for k in range(NUM_RANDOM)
    )
    return (*BY_HAND, *drawn)


def settings(script: Script) -> Settings:
    """What the Membership is made with."""
    if isinstance(script, ByHand):
        return script.settings
    return settings_of(script.seed)


def event_in(text: str) -> tuple[float, Fact]:
    """The time and the event of a line."""
    at_s, kind, *words = text.split()
    match kind:
        case "join":
            member, *numbers = words
            step, generation = [*map(int, numbers), 0, 0][:2]
            return float(at_s), ("join", member, step, generation)
        case "tick":
            return float(at_s), ("tick",)
    return float(at_s), ("lost", words[0], kind == "end")


def play_agents(script: Script, unit: object) -> list[Row]:
    """The rows of each agent in turn; `peer` is the agent's number."""
    if isinstance(script, Faults):
        world = World(script, lambda own: own.make(unit))
        world.play()
        # One that was closed got no more Ticks: nothing is due at its end.
        histories = [agent.rows + _END * agent.is_open for agent in world.agents]
    else:
        histories = [_by_hand(script, unit) + _END]
    return [
        Row(at_s, number, event, actions)
        for number, rows in enumerate(histories)
        for at_s, event, actions in rows
    ]


def _by_hand(script: ByHand, unit: object) -> list[Told]:
    membership, wake_at_s = script.settings.make(unit), math.inf
    rows: list[Told] = []
    coming = [event_in(line) for line in script.events]
    while len(rows) < 100:
        at_s, event = coming[0] if coming else (math.inf, ("tick",))
        if wake_at_s + script.late_s <= at_s:
            at_s, event = wake_at_s + script.late_s, ("tick",)
            wake_at_s = math.inf
        elif coming:
            coming.pop(0)
        if at_s == math.inf:
            break
        now_s = max([at_s, *(row[0] for row in rows[-1:])])
        actions = read_actions(membership.on(event_of(event), now_s))
        rows.append((now_s, event, actions))
        wake_at_s = next((a[1] for a in actions if a[0] == "wake"), wake_at_s)
        if {"stop", "unknown"} & {action[0] for action in actions}:
            break
    return rows


def shorter(script: Script) -> list[Script]:
    """The same without one of its events, or of its faults."""
    if isinstance(script, ByHand):
        events = script.events
        return [
            replace(script, events=events[:k] + events[k + 1 :])
            for k in range(len(events))
        ]
    return [without(script, fault) for fault in faults_of(script)]


# ── what must come of a script ──────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seen:
    """What a right Membership knew when it decided on an event."""

    joined: dict[str, int]
    members: list[str]  # of the last generation
    is_majority: bool
    has_enough: bool
    due_s: float  # of a Form or a Stop
    is_disputed: bool  # in this round another count of the majority says otherwise


class MembershipContract(Model):
    """A right Membership; the order of survivors, and of equal sources, is open."""

    def __init__(self, own: Settings) -> None:
        self.own = own
        self.generation = 0
        self.members: list[str] = []
        self.ended: set[str] = set()
        self.lost: set[str] = set()  # these and others that were lost once
        self.joined: dict[str, int] = {}
        self.is_round, self.could_form, self.is_stopped = True, False, False
        self.is_disputed = False
        self.deadline_s = math.inf
        self.is_late = False  # nothing came at the deadline
        self.has_asked = True  # for a Tick, as the judge sees it
        self.asked_alone = False  # for the latest Tick, without a majority
        self.seen = Seen({}, [], False, False, math.inf, False)
        self.has_decided = False  # whether to form or to stop, at the last event
        self.since_s = 0.0  # when a Form became possible, or impossible
        self.newest: dict[str, int] = {}  # of which generation it was a member last
        self.told: set[Fact] = set()  # the Joins that came

    def could_happen(self, event: Fact) -> bool:
        """Whether an event refers to nothing that never was, as a Join may.

        A member sends the number of its newest generation; only a copy has an older
        one.
        """
        if event[0] != "join":
            return True
        newest = self.newest.get(event[1], 0)
        return event[3] == newest or (event[3] < newest and event in self.told)

    def is_overdue(self, now_s: float) -> bool:
        """Whether a Tick should have come before."""
        return now_s > self.deadline_s + _LATE_S

    def offer(self, row: Row) -> list[Fact]:
        """The actions that are due, see `Model`."""
        self.has_decided = False
        if self.is_stopped or row.request == END:
            return []
        due: list[Fact] = []
        match tuple(row.request):
            case ("join", member, step, generation):
                self.told.add(tuple(row.request))
                due = self._join(member, step, generation)
            case ("lost", member, ended):
                self.joined.pop(member, None)
                self.ended |= {member} if ended else set()
                self.lost.add(member)
                due = self._begin(member) if member in self.members else []
        return due + (self._end(row.time_s) if self.is_round else [])

    def _join(self, member: str, step: int, generation: int) -> list[Fact]:
        is_mine = member in self.members
        is_old = generation < self.generation
        if is_mine and is_old and member not in self.ended:
            return []
        is_full = not self.is_round and len(self.members) == self.own.max_members
        is_stale = is_old and generation > 0
        if member in self.ended or is_stale or (is_full and not is_mine):
            return [("refuse", member)]
        self.joined[member] = step
        return self._begin(member)

    def _begin(self, member: str) -> list[Fact]:
        if self.is_round:
            return []
        self.is_round, self.could_form, self.deadline_s = True, False, math.inf
        self.is_disputed = False
        asked = sorted({*self.unheard} - {member})
        return [("regroup", asked)] if asked else []

    @property
    def unheard(self) -> list[str]:
        """Members that may be alive and have not joined."""
        return [m for m in self.members if m not in {*self.joined, *self.ended}]

    @property
    def is_majority(self) -> bool:
        """Whether the other side of a partition cannot form a generation."""
        alive = [m for m in self.members if m not in self.ended]
        heard = sum(m in self.joined for m in alive)
        if 2 * heard != len(alive):
            return 2 * heard > len(alive)
        return alive[0] in self.joined if alive else not self.members

    def _is_disputed(self) -> bool:
        heard, unheard = sum(m in self.joined for m in self.members), len(self.unheard)
        counts = (
            *(heard > unheard, heard >= unheard, heard > 0),
            *(2 * heard > len(self.members), len(self.joined) > unheard),
        )
        return bool(self.members) and len({self.is_majority, *counts}) > 1

    def _end(self, now_s: float) -> list[Fact]:
        self.has_decided = True
        has_enough = len(self.joined) >= self.own.min_members
        can = has_enough and self.is_majority
        if can != self.could_form or self.deadline_s == math.inf:
            self.could_form, self.since_s = can, now_s
            self.deadline_s = now_s + (self.own.grace_s if can else self.own.timeout_s)
        self.is_disputed |= has_enough and self._is_disputed()
        self.seen = Seen(
            dict(self.joined), self.members, self.is_majority, has_enough,
            self.deadline_s, self.is_disputed,
        )  # fmt: skip
        is_all = len(self.joined) >= self.own.max_members and not self.unheard
        if now_s < self.deadline_s and not (can and is_all):
            return []
        return self._form() if can else self._stop()

    def _stop(self) -> list[Fact]:
        self.is_stopped, self.deadline_s = True, math.inf
        return [("stop",)]

    def _form(self) -> list[Fact]:
        old = [m for m in self.members if m in self.joined]
        new = [m for m in self.joined if m not in old]
        taken = (old + new)[: self.own.max_members]
        newest = max(self.joined[m] for m in old or taken)
        sources = [m for m in old or taken if self.joined[m] == newest]
        shard = math.ceil(self.own.global_batch_size / len(taken))
        steps = math.ceil(shard / self.own.microbatch_size)
        refused = [("refuse", m) for m in self.joined if m not in taken]
        self.generation, self.members = self.generation + 1, taken
        self.newest |= dict.fromkeys(taken, self.generation)
        self.joined, self.is_round, self.deadline_s = {}, False, math.inf
        return [("form", self.generation, old, taken, sources, steps), *refused]
