"""Run the lab of phase 4 on recovery: recorded runs, and replaced processes."""

from __future__ import annotations

from collections.abc import Mapping

from distlab.given.recovery import RecordedRun
from distlab.walkthroughs import phase4_recovery_rank as rank
from distlab.walkthroughs.base import Ranks
from distlab.walkthroughs.tables import Cells

UNIT = "recovery"
LISTS = ("dead", "frozen", "slow")


class Recovery(Ranks):
    """Experiments with `detect` and `Supervisor`."""

    def conditions(self, run: str) -> Cells:
        """Return each change in the answers of the learner's detect."""
        found = self.run(UNIT, 1, rank.conditions, run=run).values[0]
        return {
            f"{time_s:.2f} s": {
                name: ", ".join(map(str, ranks)) or "–"
                for name, ranks in zip(LISTS, lists, strict=True)
            }
            for time_s, lists in found
        } or {"at any time": dict.fromkeys(LISTS, "–")}

    def waits_for(self, run: str) -> Cells:
        """Return seconds and steps from a SIGKILL until the run continued."""
        recorded = RecordedRun.read(run)
        ((fault_s, dead, _),) = recorded.faults
        messages = recorded.messages
        own = [m[0] for m in messages if m[1:3] == (dead, "step") and m[0] < fault_s]
        step_s = (own[-1] - own[0]) / (len(own) - 1)
        later = [m for m in messages if m[0] > fault_s and m[1] == dead]
        rows = {}
        for what, label in (
            ("started", "the new process runs"),
            ("wait", "it joins the group"),
            ("step", "its first step"),
        ):
            time_s = next(m[0] for m in later if m[2] == what) - fault_s
            rows[label] = {"s": time_s, "steps": round(time_s / step_s)}
        return rows

    def supervised(
        self, num_ranks: int, num_standbys: int, deaths: Mapping[int, float]
    ) -> list[rank.Bar]:
        """Return what each process is over time, decided by the learner's Supervisor.

        `deaths` maps processes to seconds after their start. Times are virtual.
        """
        run = self.run(
            UNIT,
            1,
            rank.supervised,
            num_ranks=num_ranks,
            num_standbys=num_standbys,
            deaths=tuple(deaths.items()),
        )
        bars: list[rank.Bar] = [tuple(bar) for bar in run.values[0]]
        return bars
