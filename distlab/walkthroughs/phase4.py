"""What the lab of phase 4 measures: methods that run ranks and return rows of numbers.

Times of simulated runs are in virtual time: every machine gives the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlab.sim import AlphaBeta, Faults
from distlab.walkthroughs import phase4_rank as rank
from distlab.walkthroughs.base import Ranks
from distlab.walkthroughs.phase3 import LINK, Rows

__all__ = ["LINK", "AlphaBeta", "Rows", "Walkthrough"]


class Walkthrough(Ranks):
    """Ranks, and what they do in phase 4."""

    def __init__(self) -> None:
        super().__init__(4, (rank.__name__,))

    # ── monitoring ──────────────────────────────────────────────────────────────────

    def step_shares(self, n: int, stragglers: Mapping[int, float]) -> Rows:
        """Percent of each part by rank, in one step of n simulated ranks.

        `stragglers` maps ranks to how many times as long they take. The simulator
        records and reports with the learner's functions.
        """
        run = self._simulated(
            "monitoring",
            n,
            rank.recorded_step,
            {},
            net=LINK,
            faults=Faults(straggler=dict(stragglers)),
        )
        run.require_finished()
        shares: dict[int, dict[str, float]] = run.values[0]
        return {
            f"{number}": {part: 100 * value for part, value in own.items()}
            for number, own in sorted(shares.items())
        }
