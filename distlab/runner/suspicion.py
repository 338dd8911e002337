"""Ranks that seem to be stuck are looked at twice before anybody says so.

first look ── CONFIRM_S ── second look: the same waits, all asleep, hardly any
processor time since: then it is a deadlock
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.processes.tree import cpu_s, sleeps
from distlab.runner.board import Board
from distlab.runner.record import RankRecord

CONFIRM_S = 0.1  # between the two looks
BUSY = 0.2  # of the time between the looks on a processor: then a rank is not stuck

Waits = dict[int, tuple[int, ...]]
"""Of each blocked rank the ranks that would have to act."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The ranks as they stood when they seemed to be stuck."""

    at: float
    waits_for: Waits
    asking: list[tuple[int, int]]
    cpu_s: dict[int, float]
    asleep: bool


class Suspicion:
    """Whether the ranks of `records` are stuck, and since when it seems so."""

    def __init__(self, records: Sequence[RankRecord], board: Board) -> None:
        self._records, self._board = records, board
        self._first: _Look | None = None

    @property
    def until(self) -> float:
        """When to look again, as `time.monotonic` counts; without a suspicion never."""
        return self._first.at + CONFIRM_S if self._first else math.inf

    def confirmed(self, stuck: Waits | None, now: float) -> bool:
        """Whether the same ranks were stuck at the last look and have not moved since.

        `stuck` is who waits for whom, or None where a rank can go on.
        """
        if stuck is None:
            self._first = None
            return False
        first = self._first
        asking = self._board.asking(stuck)
        if first is None or (first.waits_for, first.asking) != (stuck, asking):
            self._first = self._look(stuck, now)
            return False
        if now < first.at + CONFIRM_S:
            return False
        second = self._first = self._look(stuck, now)
        most_s = BUSY * (now - first.at)
        return second.asleep and all(
            second.cpu_s[rank] - first.cpu_s[rank] <= most_s for rank in stuck
        )

    def _look(self, stuck: Waits, now: float) -> _Look:
        pids = {rank: self._records[rank].pid for rank in stuck}
        return _Look(
            at=now,
            waits_for=stuck,
            asking=self._board.asking(stuck),
            cpu_s={rank: cpu_s(pid) for rank, pid in pids.items()},
            asleep=all(pid and sleeps(pid) for pid in pids.values()),
        )
