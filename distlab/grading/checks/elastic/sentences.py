"""The headline of 4.9: the event, what the Membership did about it, and what is due.

Only the actions that differ are told, with the part of its state that decides. The
rest of the script is in the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.grading.checks.elastic.scripts import MembershipContract
from distlab.grading.checks.elastic.world import Fact
from distlab.grading.kit.histories import Row
from distlab.grading.kit.launcher_actions import asked_s
from distlab.terminal import enumerated

_ORDER = ("regroup", "form", "refuse", "stop", "wake")


def situation(contract: MembershipContract, event: Fact) -> str:
    """Describe an event by what the contract knows before it happens."""
    match event:
        case ("join", member, _, generation):
            return f"when {_joined(contract, member, generation)}"
        case ("lost", member, ended):
            how = "ended" if ended else "was lost without having ended"
            return f"when {_named_member(contract, member)} {how}"
        case ("end",):
            return "after the last event"
    return "at a Tick"


def _joined(contract: MembershipContract, member: str, generation: int) -> str:
    if member in contract.ended:
        return f"{member}, whose process has ended, sent a Join"
    if 0 < generation < contract.generation:
        what = f"a copy of {member}'s" if member in contract.members else f"{member}'s"
        after = f"after generation {contract.generation} had formed"
        return f"{what} Join from generation {generation} arrived {after}"
    if member in contract.joined:
        return f"a copy of {member}'s Join arrived"
    if generation == 0 and member in contract.members:
        return f"a copy of {member}'s first Join arrived"
    who = member if member in contract.members else f"new member {member}"
    now = "during a round"
    if not contract.is_round:
        num, most = len(contract.members), contract.own.max_members
        were = "member was" if num == 1 else "members were"
        now = f"while {num} {were} training (max_members={most})"
    return f"{who} joined {now}"


def _named_member(contract: MembershipContract, member: str) -> str:
    if member in contract.members or member in contract.joined:
        return f"member {member}"
    return f"{member}, which is not a member,"


@dataclass(frozen=True)
class Difference:
    """The actions of one event, and what a right Membership knew."""

    contract: MembershipContract  # after the event
    happened: str
    due: Sequence[Fact]
    got: Sequence[Fact]  # without WakeAt
    wakes: Sequence[Fact]
    rows: Sequence[Row]  # up to this event
    time_s: float

    def sentence(self) -> str:
        """The headline."""
        unknown = [action for action in self.got if action[0] == "unknown"]
        if unknown:
            return f"{self.happened}, the Membership returned {unknown[0][1]}"
        forms = [a for b in (self.due, self.got) for a in b if a[0] == "form"]
        if len(forms) == 2 and (found := self._form(*forms)):
            return f"{self.happened}, {found}"
        did, expected = self._other()
        when = self.happened if not self.contract.is_late else self._late()
        reason = self._reason(did, expected)
        told = f"the Membership returned {_words(did) or 'no action'}"
        if self.contract.is_late:
            asked = asked_s(self.rows)
            told = "the Membership had returned no WakeAt"
            if asked:
                told = f"the Membership had last returned WakeAt({asked[-1]:.4g})"
        wanted = self._wanted(expected)
        return f"{when}{reason}, {told}, expected {wanted}"

    def _wanted(self, expected: Sequence[Fact]) -> str:
        contract, wanted = self.contract, _words(expected) or "no action"
        if contract.is_late:
            return f"WakeAt({contract.seen.due_s:.4g}) and then {wanted}"
        if [action[0] for action in expected] == ["wake"]:
            return f"only {wanted}, a Tick when {self._wait} is over"
        return wanted

    @property
    def _wait(self) -> str:
        return "grace_s" if self.contract.could_form else "timeout_s"

    def _late(self) -> str:
        contract = self.contract
        if contract.seen.due_s == contract.since_s:
            return "at once"
        return f"when {self._wait} was over"

    def _other(self) -> tuple[list[Fact], list[Fact]]:
        """What was done and was not due, and the reverse."""
        due = [action for action in self.due if action[0] != "wake"]
        did = [a for a in self.got if _key(a) not in set(map(_key, due))]
        expected = [a for a in due if _key(a) not in set(map(_key, self.got))]
        if not did and not expected:
            return list(self.got), list(self.due)
        if not expected:
            expected += [a for a in self.due if a[0] == "wake" and self._is_new_wait()]
        return did, expected

    def _is_new_wait(self) -> bool:
        return any(a[0] in ("stop", "form") for a in self.got)

    # ── why ─────────────────────────────────────────────────────────────────────────

    def _reason(self, did: Sequence[Fact], expected: Sequence[Fact]) -> str:
        """What decides whether a Form or a Stop is due."""
        contract, seen = self.contract, self.contract.seen
        kinds = {action[0] for action in (*did, *expected)}
        if not contract.has_decided or not kinds & {"form", "stop"}:
            return ""
        if not seen.has_enough:
            num, least = len(seen.joined), contract.own.min_members
            starts_again = seen.due_s == contract.since_s + contract.own.timeout_s
            is_early = "stop" in kinds and self.time_s < seen.due_s
            is_early &= not (starts_again and contract.since_s == self.time_s)
            when = " before timeout_s was over" * is_early
            if "stop" in {action[0] for action in expected} and not contract.is_late:
                when = " after timeout_s was over"
            return f"{when}, with {num} of the required {least} members joined"
        if contract.is_late and not seen.is_disputed:
            return ""
        if seen.is_disputed or not seen.is_majority:
            return self._majority()
        is_early = any(action[0] == "form" for action in did)
        if not is_early:
            return " after grace_s was over"
        if contract.since_s == self.time_s and expected and expected[0][0] == "wake":
            return " and made a Form possible"
        unheard = self._unheard()
        if unheard and len(seen.joined) >= contract.own.max_members:
            return f" while {_names(unheard)} {_were(unheard)} unheard"
        return " before grace_s was over"

    def _unheard(self) -> list[str]:
        seen, ended = self.contract.seen, self.contract.ended
        return [m for m in seen.members if m not in {*seen.joined, *ended}]

    def _majority(self) -> str:
        """Who of the last generation has joined, and who could join elsewhere."""
        seen = self.contract.seen
        alive = [m for m in seen.members if m not in self.contract.ended]
        joined = [m for m in alive if m in seen.joined]
        if not alive:
            return " after every member of the last generation has ended"
        unheard = self._unheard()
        lowest = alive[0] if len(joined) == len(unheard) else ""
        heard, missing = (
            _names([f"{m} (lowest rank)" if m == lowest else m for m in side])
            for side in (joined, unheard)
        )
        return f" with {heard} joined and {missing} unheard"

    # ── two Forms ───────────────────────────────────────────────────────────────────

    def _form(self, due: Fact, given: Fact) -> str:
        """The first difference that explains the others, or nothing."""
        return next(self._differences(due, given), "")

    def _differences(self, due: Fact, given: Fact) -> Iterator[str]:
        _, generation, old, taken, sources, steps = due
        members = [str(member) for _, member in given[2]]
        form = f"Form({generation})"
        if found := self._members(taken, members):
            yield f"Form({given[1]}) {found}"
        if given[1] != generation:
            yield f"the Membership returned Form({given[1]}), expected {form}"
        ranks = [rank for rank, _ in given[2]]
        if ranks != [*range(len(ranks))]:
            wanted = _all(range(len(ranks)))
            yield f"{form} gave its members the ranks {_all(ranks)}, expected {wanted}"
        num = len(old)
        if {*members[:num]} != {*old} or members[num:] != taken[num:]:
            yield f"{form} {self._ordered(old, taken, members)}"
        if given[3] not in sources:
            yield f"{form} {self._source(given[3], sources)}"
        if given[4] != steps:
            own = self.contract.own
            size, n = own.global_batch_size, len(taken)
            yield (
                f"{form} has grad_accum_steps={given[4]}, expected {steps}: {size} "
                f"samples on {_ranks(n)} are up to {math.ceil(size / n)} each, and "
                f"microbatch_size is {own.microbatch_size}"
            )
        refused = [
            {a[1] for a in acts if a[0] == "refuse"} for acts in (self.due, self.got)
        ]
        most = self.contract.own.max_members
        if lack := sorted(refused[0] - refused[1]):
            yield (
                f"{form} left out {_names(lack)} (max_members={most}), expected "
                f"{_refuse(lack)} with it"
            )
        if more := sorted(refused[1] - refused[0]):
            yield f"{form} came with {_refuse(more)}, expected no Refuse"

    def _members(self, taken: Sequence[str], members: Sequence[str]) -> str:
        seen = self.contract.seen
        more = [m for m in members if m not in taken]
        less = [m for m in taken if m not in members]
        if more and less:
            instead = f"took {_names(more)}, expected {_names(less)}"
            return f"{instead}: {self._first_come(less[0])}"
        if less:
            return f"left out {_names(less)}, which had joined, expected all who joined"
        if not more:
            return ""
        if more[0] in seen.joined:
            most = self.contract.own.max_members
            return f"took {len(members)} members, expected {most} (max_members)"
        return f"took {_names(more)}, {self._gone(more[0])}"

    def _first_come(self, member: str) -> str:
        if member in self.contract.seen.members:
            return f"{member} was in the last generation"
        if self._num_joins(member) > 1:
            return f"{member} joined earlier, and its second Join is only a copy"
        return f"{member} joined earlier"

    def _gone(self, member: str) -> str:
        if member in self.contract.ended:
            if self._joined_after_end(member):
                return "whose process had ended before a late Join of it came"
            return "whose process has ended"
        if member in self.contract.lost:
            return "which was lost and has not joined again"
        return "which has not joined in this round"

    def _joined_after_end(self, member: str) -> bool:
        events = [tuple(row.request) for row in self.rows]
        own = [e for e in events if e[0] in ("join", "lost") and e[1] == member]
        return bool(own) and own[-1][0] == "join"

    def _num_joins(self, member: str) -> int:
        """How many of its Joins came since the last Form."""
        num = 0
        for row in self.rows:
            num += tuple(row.request)[:2] == ("join", member)
            if any(action[0] == "form" for action in row.reply) and row.reply:
                num = 0 if row is not self.rows[-1] else num
        return num

    def _ordered(
        self, old: Sequence[str], taken: Sequence[str], members: Sequence[str]
    ) -> str:
        given = f"ranks its members {_all(members)}, expected {_all(taken)}"
        if {*members[: len(old)]} != {*old}:
            return f"{given}: members of the last generation before new ones"
        return f"{given}: new members in the order of their first Joins"

    def _source(self, source: Any, sources: Sequence[str]) -> str:
        seen = self.contract.seen
        steps = seen.joined
        best = sources[0]
        if seen.members and source not in seen.members:
            return (
                f"names new member {source} as the source of the state, expected "
                f"{' or '.join(sources)} of the last generation"
            )
        return (
            f"names {source}, at step {steps.get(source, '?')}, as the source of the "
            f"state, expected {' or '.join(sources)} at the newest step, {steps[best]}"
        )


def _key(action: Fact) -> str:
    """What must be equal at first sight."""
    kind, what, *_ = (*action, "")
    return str(kind) if kind == "stop" else f"{kind} {what}"


def _names(members: Sequence[str]) -> str:
    return enumerated(members or ["no member"])


def _were(members: Sequence[str]) -> str:
    return "was" if len(members) == 1 else "were"


def _ranks(num: int) -> str:
    return f"{num} rank{'s' * (num != 1)}"


def _refuse(members: Sequence[str]) -> str:
    return f"Refuse({', '.join(members)})"


def _all(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


def _words(actions: Sequence[Fact]) -> str:
    kinds = sorted(actions, key=lambda action: _ORDER.index(action[0]))
    return " and ".join(map(_action, kinds))


def _action(action: Fact) -> str:
    match action:
        case ("regroup", members):
            return f"Regroup({', '.join(members)})"
        case ("form", generation, _, taken, _, _):
            return f"Form({generation}) of {_names(taken)}"
        case ("form", generation, pairs, _, _):
            return f"Form({generation}) of {_names([str(m) for _, m in pairs])}"
        case ("refuse", member, *_):
            return f"Refuse({member})"
        case ("wake", at_s):
            return f"WakeAt({at_s:.4g})"
    return "Stop"
