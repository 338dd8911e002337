"""The fault matrix: every fault at every moment in every mode, or why it's missing."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

MODES = ("restart", "standby", "elastic")
"""All ranks restart; a standby takes the rank's place; the others continue alone."""

MOMENTS = {
    "forward": "forward",
    "all-reduce": "mid-all-reduce",
    "optimizer": "optimizer step",
    "save": "during save",
    "epoch": "epoch edge",
}
"""The head of each column, by the name that a cell's id uses."""

ANYWHERE = tuple(MOMENTS)


@dataclass(frozen=True, kw_only=True)
class ChaosFault:
    """A fault, and how the job must respond to it: by restarting, or by continuing.

    `moments` are those at which it can happen, and `why_not` explains the others.
    """

    name: str
    title: str
    who: str = "worker"  # worker, rank 0, any; launcher and links have no rank
    moments: tuple[str, ...] = ANYWHERE
    why_not: str = ""
    refuses_in: tuple[str, ...] = ()  # modes that can't continue: one line, and an end
    goes_on_at: tuple[str, ...] = ()  # there it is no reason to stop anything
    requeued: bool = False  # the job ends, and a scheduler starts it again
    num_workers: int = 0  # data workers of each rank
    num_nodes: int = 1
    min_nodes: int = 0  # so few go on; 0: all must be there
    cut_s: float = 0.0
    modes: tuple[str, ...] = MODES  # where the training has data workers, or needs this


FAULTS = (
    # What raises while it saves costs a checkpoint, and nothing else.
    ChaosFault(name="exception", title="exception", who="any", goes_on_at=("save",)),
    ChaosFault(name="kill-worker", title="SIGKILL worker"),
    ChaosFault(name="kill-rank-0", title="SIGKILL rank 0", who="rank 0"),
    ChaosFault(name="freeze", title="SIGSTOP", who="any"),
    ChaosFault(name="notice", title="SIGTERM with notice", who="any", requeued=True),
    ChaosFault(name="kill-launcher", title="launcher killed", who="any", requeued=True),
    ChaosFault(name="truncate", title="newest checkpoint truncated", who="any"),
    ChaosFault(name="flip-bit", title="bit flipped in it", who="any"),
    ChaosFault(
        name="disk-full",
        title="disk full while saving",
        who="any",
        moments=("save",),
        why_not="only the rank that is saving notices a full disk",
        goes_on_at=ANYWHERE,
    ),
    ChaosFault(name="nan", title="NaN gradient", who="any"),
    ChaosFault(name="slow", title="rank 5× slow", who="any", goes_on_at=ANYWHERE),
    ChaosFault(
        name="kill-data-worker",
        title="data worker killed",
        who="any",
        num_workers=1,
        moments=("forward", "all-reduce", "optimizer", "save"),
        why_not="between two epochs there is no data worker",
        modes=("restart",),
    ),
    ChaosFault(
        name="cut-short",
        title="network partition, 5 s",
        who="any",
        num_nodes=2,
        cut_s=5.0,
        goes_on_at=ANYWHERE,
    ),
    ChaosFault(
        name="cut-for-good",
        title="network partition, for good",
        who="any",
        num_nodes=2,
        cut_s=1e6,
        refuses_in=("restart",),
    ),
    ChaosFault(
        name="cut-off",
        title="the same, --nnodes 1:2",
        who="any",
        num_nodes=2,
        min_nodes=1,
        cut_s=1e6,
        modes=("restart",),
    ),
)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    fault: ChaosFault
    moment: str
    mode: str

    @property
    def id(self) -> str:
        """The fault, moment and mode, in the form that `--only` accepts."""
        return f"{self.fault.name}@{self.moment}/{self.mode}"

    @property
    def refuses(self) -> bool:
        """True if the job can't continue, so that it must stop with one line."""
        return self.mode in self.fault.refuses_in

    @property
    def goes_on(self) -> bool:
        """True if nothing may have to restart."""
        return self.moment in self.fault.goes_on_at

    @property
    def is_resized(self) -> bool:
        """True if the run ends with a different number of ranks."""
        return self.mode == "elastic" or self.fault.min_nodes > 0

    @property
    def why_not(self) -> str:
        """The reason why this cell makes no sense; "" if it does."""
        return "" if self.moment in self.fault.moments else self.fault.why_not


def cells(only: str = "") -> list[Cell]:
    """Return all cells, or those whose id matches or contains `only`, row by row.

    Raises:
        ValueError: there is no such cell.
    """
    every = [
        Cell(fault, moment, mode)
        for mode in MODES
        for fault in FAULTS
        for moment in MOMENTS
        if mode in fault.modes
    ]
    chosen = [
        cell for cell in every if only in cell.id or fnmatch.fnmatch(cell.id, only)
    ]
    if not chosen:
        raise ValueError(
            f"no cell is called {only!r}: a cell is FAULT@MOMENT/MODE; faults are "
            f"{', '.join(fault.name for fault in FAULTS)}; moments "
            f"{', '.join(MOMENTS)}; modes {', '.join(MODES)}"
        )
    return chosen
