"""Checks of task 1.17, a broadcast in ⌈log2 n⌉ rounds: values, messages, rounds.

A rank's messages take a round each, in the order of its calls. That holds for isend as
well: it does not wait, but the message still takes its turn on the rank's one link. So
a star is a star, however it is written, and every tree is judged by its shape alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.collectives.broadcasts import (
    Broadcast,
    any_from_2,
    broadcast_with,
    expect_everywhere,
    expect_few_messages,
    expect_it_again,
    finished,
    sources,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import calls_of_each, received
from distlab.grading.runs import Runs, in_rounds
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, RankRecord, Run
from distlab.runner.autopsy import Evidence

MANY = 200  # simulated ranks: enough to tell a tree from what is one up to 8 only
MANY_AFTER = 8  # real ranks: the largest number that is tried with processes
NUM_BYTES = 6 * 8  # of a scenario's tensor
SENDS = ("send", "isend", "sendrecv")


def tree_once(
    context: RankContext, unit: ModuleType, seed: int, src: int, again: bool = False
) -> dict[str, Any]:
    """One broadcast from `src`."""
    return broadcast_with(unit.tree_broadcast, context, seed, src, again)


def tree_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Broadcasts of tensors of other dtypes and shapes."""
    return any_from_2(unit.tree_broadcast, context, seed)


TREE = Broadcast(
    scenario=tree_once,
    with_any=tree_any,
    rule="only a rank that has the tensor can send it",
    rule_of_source="count offsets from src: (rank - src) % n is 0 at the source",
    rule_of_messages="every rank except src receives once; src does not receive",
)


@clause("collectives.tree_broadcast", "C1", worlds=(3, 2, 4, 7, 5, 1), runs=TREE.runs)
def everyone_has_it(runs: Runs) -> str | None:
    """Every rank has src's values, for every src and any number of ranks."""
    for src in sources(runs.world_size):
        run = finished(TREE, runs, src)
        first = run.values[0]["before"]
        from_0 = all(torch.equal(value["after"], first) for value in run.values)
        if any(map(received, run.ranks)) and not from_0:
            _expect_reached(run, src)
        expect_everywhere(TREE, run, src)
    if runs.world_size == 3:
        expect_it_again(TREE, runs)
    return None


def _expect_reached(run: Run, src: int) -> None:
    sent = run.values[src]["before"]
    for record in run.ranks:
        has_it = torch.equal(record.value["after"], sent)
        if record.rank != src and not has_it and not received(record):
            raise NotYetError(
                f"with src = {src} on {run.world_size} ranks, rank {record.rank} "
                f"received no message, expected one with rank {src}'s tensor",
                evidence=calls_of_each(run),
                rule="every rank except src receives once, for any number of ranks",
            )


@clause("collectives.tree_broadcast", "C2", worlds=(3, 2, 4, 7, 5), runs=TREE.runs)
def one_message_per_rank(runs: Runs) -> str | None:
    """Each rank but src receives once."""
    expect_few_messages(TREE, runs)
    return None


ON_MANY = in_rounds(tree_once, MANY, NUM_BYTES, src=1)


@clause(
    "collectives.tree_broadcast",
    "C3",
    worlds=(4, 7, 8),
    runs=TREE.runs,
    later=lambda world_size: [ON_MANY] if world_size == MANY_AFTER else [],
)
def in_few_rounds(runs: Runs) -> str | None:
    """The last rank is reached in round ⌈log2 n⌉, whatever the tree."""
    n, src = runs.world_size, runs.world_size // 2
    run = runs.finished(tree_once, src=src)
    sends = [_sends(record) for record in run.ranks]
    rounds = _rounds(sends, src)
    if len(rounds) < n or sum(map(len, sends)) != n - 1:
        raise NotJudgedError("the messages form no tree over all ranks: see C1 and C2")
    enough, needed = (n - 1).bit_length(), max(rounds.values())
    if needed > enough:
        raise NotYetError(
            f"with {n} ranks, the last one gets the tensor in round {needed}, expected "
            f"round {enough} at the latest{_shape(sends, src)}",
            slug="too-many-rounds",
            evidence=_timetable(sends, rounds, src),
            rule="in each round every rank that has the tensor sends it once",
        )
    if n == MANY_AFTER:
        _expect_few_on_many(runs)
    return (
        f"n = {MANY}, simulated: {(MANY - 1).bit_length()} rounds; a star: {MANY - 1}"
    )


def _expect_few_on_many(runs: Runs) -> None:
    """On more ranks than there are processors, in virtual time."""
    needed = runs.simulated(ON_MANY)["time_s"]
    enough = (MANY - 1).bit_length()
    if needed > enough:
        raise NotYetError(
            f"with {MANY} simulated ranks, the last one gets the tensor in round "
            f"{needed:.0f}, expected round {enough} at the latest",
            slug="too-many-rounds",
            rule="in each round every rank that has the tensor sends it once",
        )


def _sends(record: RankRecord) -> list[int]:
    return [call["dst"] for call in record.calls() if call["op"] in SENDS]


def _rounds(sends: list[list[int]], src: int) -> dict[int, int]:
    """For each rank that the tensor reaches, in which round; src has it in round 0."""
    reached = {src: 0}
    waiting = [src]
    while waiting:
        rank = waiting.pop()
        for turn, dst in enumerate(sends[rank], 1):
            if dst not in reached:
                reached[dst] = reached[rank] + turn
                waiting.append(dst)
    return reached


def _shape(sends: list[list[int]], src: int) -> str:
    if len(sends[src]) == len(sends) - 1:
        return f": rank {src} sends every copy itself"
    if max(map(len, sends)) == 1:
        return ": the ranks form a chain, each sending to at most one other"
    return ""


def _timetable(
    sends: list[list[int]], rounds: dict[int, int], src: int
) -> tuple[Evidence, ...]:
    lines = []
    for rank, own in enumerate(sends):
        has = (
            "has it from the start"
            if rank == src
            else f"has it in round {rounds[rank]}"
        )
        turns = [f"→ {dst} in {rounds[dst]}" for dst in own]
        text = f"{has}; sends {', '.join(turns)}" if own else f"{has}; sends nothing"
        lines.append(Evidence(rank, "finished", text))
    return tuple(lines)
