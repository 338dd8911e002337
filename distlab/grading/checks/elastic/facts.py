"""What was known when a Membership of 4.9 decided otherwise than it is due.

No diagnosis: each sentence is true of the event, whatever the mistake is.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlab.grading.checks.elastic.scripts import MembershipContract
from distlab.grading.checks.elastic.world import Fact


def facts(
    contract: MembershipContract, event: Fact, expected: list[Fact], actual: list[Fact]
) -> str:
    """The rule that decides here, with its names and times, or nothing."""
    wanted, given = ({one[0] for one in acts} for acts in (expected, actual))
    if event[0] == "join" and (given - wanted) & {"refuse", "regroup"}:
        return _of_join(contract, event, wanted)
    if "regroup" in wanted:
        asked = next(members for kind, members, *_ in expected if kind == "regroup")
        return f"asked are the members that have not joined this round: {_named(asked)}"
    if event[0] == "lost" and "regroup" in given:
        return "a round begins once, and only for a lost member of this generation"
    if contract.has_decided and (wanted ^ given) & {"form", "stop"}:
        is_disputed = contract.seen.is_disputed and contract.seen.has_enough
        return _of_majority(contract) if is_disputed else _of_time(contract, given)
    return ""


def _of_join(contract: MembershipContract, event: Fact, wanted: set[str]) -> str:
    _, member, _, generation = event
    if "refuse" in wanted:
        why = f"; the process of {member} has ended" * (member in contract.ended)
        return f"a refused Join begins no round{why}"
    is_copy = generation < contract.generation and member in contract.members
    if is_copy:
        return f"{member} trains in this generation: no answer to a copy, and no round"
    if member in contract.lost - contract.ended:
        return f"{member} was lost, but its process has not ended: it may come back"
    if contract.is_round and member not in contract.members:
        return "in a round every new member is noted; the Form decides who is taken"
    return ""


def _of_majority(contract: MembershipContract) -> str:
    seen = contract.seen
    alive = [m for m in seen.members if m not in contract.ended]
    joined = [m for m in alive if m in seen.joined]
    unheard = [m for m in alive if m not in seen.joined]
    ended = [m for m in seen.members if m in contract.ended]
    found = [f"joined {_named(joined)}, unheard {_named(unheard)}"]
    if ended:
        found.append(f"ended, on neither side: {_named(ended)}")
    if len(joined) == len(unheard) and alive:
        has = "has joined" if alive[0] in joined else "has not"
        found.append(f"as many: {alive[0]} has the lowest rank of both, and {has}")
    return "; ".join(found)


def _named(members: Sequence[str]) -> str:
    return ", ".join(members) or "none"


def _of_time(contract: MembershipContract, given: set[str]) -> str:
    seen, most = contract.seen, contract.own.max_members
    can_form = seen.has_enough and seen.is_majority
    unheard = [m for m in seen.members if m not in {*seen.joined, *contract.ended}]
    since, due = f"{contract.since_s:.4g} s", f"{seen.due_s:.4g} s"
    if can_form and len(seen.joined) >= most and not unheard:
        return "max_members have joined and no member is unheard: form at once"
    if can_form and len(seen.joined) >= most and "form" in given:
        are = "are" if len(unheard) > 1 else "is"
        return f"{_named(unheard)} {are} unheard, and may be ahead: Form at {due}"
    if can_form:
        return f"a Form is possible since {since}: it is due grace_s later, {due}"
    return f"no Form is possible since {since}: Stop is due timeout_s later, {due}"
