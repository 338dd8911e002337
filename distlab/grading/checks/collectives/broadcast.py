"""Checks of task 1.3, `collectives.broadcast`: values, and how many messages."""

from __future__ import annotations

from types import ModuleType
from typing import Any

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
from distlab.grading.kit.messages import WORLDS
from distlab.grading.runs import Runs
from distlab.runner import RankContext


def broadcast_once(
    context: RankContext, unit: ModuleType, seed: int, src: int, again: bool = False
) -> dict[str, Any]:
    """One broadcast from `src`."""
    return broadcast_with(unit.broadcast, context, seed, src, again)


def broadcast_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Broadcasts of tensors of other dtypes and shapes."""
    return any_from_2(unit.broadcast, context, seed)


BROADCAST = Broadcast(
    scenario=broadcast_once,
    with_any=broadcast_any,
    rule="rank src sends to every other rank; every other rank receives from src",
    rule_of_source="the source is the argument src: branch on comm.rank == src",
    rule_of_messages="every rank except src receives once",
)


@clause("collectives.broadcast", "C1", worlds=WORLDS, runs=BROADCAST.runs)
def everyone_has_it(runs: Runs) -> str | None:
    """After a broadcast from src every rank has src's values, for every src."""
    for src in sources(runs.world_size):
        expect_everywhere(BROADCAST, finished(BROADCAST, runs, src), src)
    if runs.world_size == 3:
        expect_it_again(BROADCAST, runs)
    return None


@clause("collectives.broadcast", "C2", worlds=(3, 2, 4, 7), runs=BROADCAST.runs)
def messages_of_broadcast(runs: Runs) -> str | None:
    """Each rank but src receives once."""
    expect_few_messages(BROADCAST, runs)
    return f"n = {runs.world_size}: {runs.world_size - 1} messages"
