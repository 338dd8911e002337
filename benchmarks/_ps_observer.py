"""Judges of what the workers of `benchmarks/ps.py` noted; they know of no server.

A worker's clock at a pull is the number of its latest push that is in the weights which
came back. The reader's lead is its own number less the lowest clock of those that
count: all but those whose processes had been killed when the reply came. A frozen
process counts; a finished one too, for its clock is the highest there is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from benchmarks._ps_work import (
    ACKED,
    FINAL,
    PULLED,
    STARTED,
    Plan,
    Row,
    counts,
)


class Lead(NamedTuple):
    """How far a reader was ahead when a pull was answered."""

    rank: int
    server: int
    number: int
    lead: int
    clocks: list[int]

    def __str__(self) -> str:
        """In words."""
        return (
            f"worker {self.rank} was answered by server {self.server} after push "
            f"{self.number}: {self.lead} ahead; the clocks were {self.clocks}"
        )


def leads(rows: Sequence[Row], plan: Plan, killed: Mapping[int, float]) -> list[Lead]:
    """The lead at each pull; `killed` are times of deaths by rank."""
    found = []
    for _, rank, server, number, time_s, weights in _of(PULLED, rows):
        clocks = clocks_in(plan, weights)
        counted = [
            clock
            for worker, clock in enumerate(clocks)
            if worker == rank or time_s < killed.get(worker, float("inf"))
        ]
        found.append(Lead(rank, server, number, number - min(counted), clocks))
    return found


def clocks_in(plan: Plan, weights: Sequence[float]) -> list[int]:
    """By worker: the latest push that these weights have."""
    return [
        max((k for k, count in enumerate(own, 1) if count), default=0)
        for own in counts(plan, weights)
    ]


def violations(found: Sequence[Lead], bound: int) -> list[str]:
    """The pulls that the bound forbids, in words."""
    return [str(lead) for lead in found if lead.lead > bound]


def miscounted(rows: Sequence[Row], plan: Plan, killed: Collection[int]) -> list[str]:
    """The pushes that a server has not once, at the end, in words.

    An acknowledged push counts once. Of a killed worker the one push that was under way
    may count once or not at all. All others do not count.
    """
    acked: dict[tuple[int, int], int] = {}
    for _, rank, server, number, _, _ in _of(ACKED, rows):
        acked[server, rank] = max(number, acked.get((server, rank), 0))
    wrong = []
    for server in range(len(plan["servers"])):
        finals = [row[5] for row in _of(FINAL, rows) if row[2] == server]
        if not finals or any(weights != finals[0] for weights in finals):
            several = "different weights" if finals else "no weights"
            wrong.append(f"{several} were read from server {server} at the end")
            continue
        try:
            by_rank = counts(plan, finals[0])
        except ValueError as error:
            wrong.append(f"server {server}: {error}")
            continue
        for rank, own in enumerate(by_rank):
            last = acked.get((server, rank), 0)
            may_be = last + 1 if rank in killed else 0
            wrong += [
                f"push {number} of worker {rank} to server {server} "
                f"{'was' if number <= last else 'was not'} acknowledged, and the "
                f"weights have it {count} times"
                for number, count in enumerate(own, 1)
                if count != (number <= last) and (number != may_be or count > 1)
            ]
    return wrong


def num_acked(rows: Sequence[Row]) -> int:
    """How many pushes were acknowledged, on all servers."""
    return len({tuple(row[1:4]) for row in _of(ACKED, rows)})


def rate(rows: Sequence[Row], ranks: Collection[int], plan: Plan) -> float:
    """Pushes per second of these workers together, each until its last push.

    A push is done when every server has acknowledged it.

    Raises:
        ValueError: one of them did not make all its pushes.
    """
    began = {row[1]: row[4] for row in _of(STARTED, rows)}
    last = len(plan["servers"]) - 1
    ended = {
        row[1]: row[4]
        for row in _of(ACKED, rows)
        if row[2] == last and row[3] == plan["pushes"][row[1]]
    }
    if missing := [rank for rank in ranks if rank not in ended]:
        raise ValueError(f"workers {missing} did not make all their pushes")
    return float(sum(plan["pushes"][r] / (ended[r] - began[r]) for r in ranks))


def longest_pause_s(rows: Sequence[Row], ranks: Collection[int]) -> float:
    """The longest time between two acknowledged pushes of one of these workers."""
    pauses = [0.0]
    for rank in ranks:
        times = [row[4] for row in _of(ACKED, rows) if row[1:3] == [rank, 0]]
        pauses += [b - a for a, b in pairwise(times)]
    return max(pauses)


def unfinished(rows: Sequence[Row], plan: Plan, killed: Collection[int]) -> list[int]:
    """The workers that lived and did not come to their last pull."""
    last = len(plan["servers"]) - 1
    done = {
        row[1]
        for row in _of(PULLED, rows)
        if row[2] == last and row[3] == plan["pushes"][row[1]]
    }
    everyone = range(len(plan["pushes"]))
    return [rank for rank in everyone if rank not in done and rank not in killed]


def _of(kind: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row[0] == kind]
