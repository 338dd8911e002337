"""A run as tables: its calls, its messages, and why it did not go on if it did not.

The same for real ranks and for simulated ones. A run of 1,024 ranks has two million
messages, so a table is a set of columns, not of objects; `row` makes one row readable.

Symbols: ps = picoseconds since the first event; -1 = none, in every column of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distlab.runner.record import Outcome

Column = NDArray[np.int64]
NONE = -1
STATES = ("done", "waiting", "failed", "posted")
"""How a call stands; `posted` returned at once, and its `wait` has a row."""

CALL_COLUMNS = (
    *("rank", "number", "op", "dst", "src", "tag", "num_bytes", "label", "site"),
    *("state", "start_ps", "ready_ps", "end_ps", "last", "step", "step_end"),
)
MESSAGE_COLUMNS = (
    *("src", "dst", "num_bytes", "start_ps", "end_ps", "tag"),
    *("sent", "received", "sent_end", "received_end", "step", "lost"),
)


@dataclass(frozen=True)
class Table:
    """Columns of whole numbers, all of one length.

    Calls, rank by rank in the order in which they began: `number` on its rank; `op`,
    `label` and `site` as positions in the names of the Trace; `state` in STATES; from
    `start_ps` to `ready_ps` it waited for the other side, then data moved until
    `end_ps`; `last` is the row of the call whose rank came last. `step` and `step_end`
    are hundredths of steps in logical time.

    Messages: `sent` and `received` are the rows of the calls that posted the two ends,
    `sent_end` and `received_end` those in which the ranks waited for it to be through;
    `lost` is 1 for one that never arrived.
    """

    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def row(self, index: int) -> dict[str, int]:
        """One row by the names of its columns."""
        return {name: int(column[index]) for name, column in self.columns.items()}

    def only(self, rows: Any) -> Table:
        """The same table with some rows, by their positions or by a mask."""
        return Table({name: column[rows] for name, column in self.columns.items()})


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place in a program, with the line that stands there, if it can be read."""

    file: str
    line: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way of data. `busy` is its share of use in equal parts of the run, 0 to 1."""

    name: str
    busy: NDArray[np.float64]
    bytes_per_s: float | None = None  # what it can carry, where that is known

    @property
    def mean(self) -> float:
        """Its share of use over the whole run."""
        return float(self.busy.mean()) if len(self.busy) else 0.0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What is drawn, measured and exported."""

    world_size: int
    clock: Literal["virtual", "wall"]
    outcome: Outcome
    end_ps: int
    calls: Table
    messages: Table
    ops: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    sites: tuple[Site, ...] = ()
    num_steps: float = 0.0  # 0: too long for logical time
    sentence: str = ""
    cycle: tuple[int, ...] = ()
    waits_for: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stuck: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Each rank that waits forever: since when, in picoseconds and in steps."""
    links: Mapping[str, int] = field(default_factory=dict)
    """Picoseconds for which each link of the network was busy, where that is known."""
    notes: tuple[str, ...] = ()


def table(names: tuple[str, ...], rows: list[tuple[int, ...]]) -> Table:
    """A table of these rows, in which a value stands for each name."""
    if not rows:
        return Table({name: np.zeros(0, np.int64) for name in names})
    matrix = np.array(rows, dtype=np.int64)
    return Table({name: matrix[:, i].copy() for i, name in enumerate(names)})
