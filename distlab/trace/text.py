"""A run as lines of text: a row for each rank, its calls from left to right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.runner.autopsy import describe
from distlab.trace.layout import Bar, Schedule, schedule

if TYPE_CHECKING:
    from distlab.comm import Event
    from distlab.runner import Run

LEGEND = "── a call   ·· until the other side comes   ~~ waits forever   ! failed"
_MOST_RANKS = 16
_TAIL = 9  # columns that a wait goes on beyond the last call
_SLOT = (4, 14)  # columns, at least and at most


def draw_text(run: Run, *, width: int = 80) -> list[str]:
    """The calls of `run` in logical time, at most `width` columns; the end of it.

    Of a long run the last calls are drawn, of many ranks the first ones.
    """
    plan = schedule(run)
    names = [f"rank {record.rank}" for record in run.ranks[:_MOST_RANKS]]
    left = max(map(len, names)) + 2
    picture = _Text(plan, width - left)
    rows = [f"{name:<{left}}{picture.row(rank)}" for rank, name in enumerate(names)]
    hidden = run.world_size - len(rows)
    if hidden > 0:
        rows.append(f"… and {hidden} ranks more")
    if picture.first > 0 or plan.left_out:
        rows.insert(0, "(the last calls; what came before is left out)")
    return [row.rstrip() for row in [*rows, LEGEND]]


class _Text:
    def __init__(self, plan: Schedule, room: int) -> None:
        self._plan, self._room = plan, room
        longest = max([len(_word(bar.call)) for bar in plan.bars], default=0)
        least, most = _SLOT
        self._slot = min(most, max(least, longest + 2))
        self.first = max(0.0, plan.length - room // self._slot)

    def row(self, rank: int) -> str:
        """One rank's calls."""
        cells = [" "] * self._room
        for bar in self._plan.bars:
            if bar.rank == rank and bar.end > self.first:
                self._put(cells, bar)
        return "".join(cells)

    def _put(self, cells: list[str], bar: Bar) -> None:
        start, end = self._column(bar.start), self._column(bar.end)
        if bar.state == "waiting":
            end = min(self._room, end + _TAIL)
        # What it met came later: until then it waited.
        ready = self._column(max(bar.start, bar.end - 1))
        if bar.state in ("waiting", "posted"):
            ready = start
        rest = "~" if bar.state == "waiting" else "─"
        cells[start:ready] = "·" * (ready - start)
        room = max(0, end - ready - 1)  # a gap before the next call
        mark = "!" if bar.state == "failed" else ""
        cells[ready : ready + room] = f"{mark}{_word(bar.call)}"[:room].ljust(
            room, rest
        )

    def _column(self, slot: float) -> int:
        return min(self._room, round(self._slot * max(0.0, slot - self.first)))


def _word(call: Event) -> str:
    return describe(call).replace(" → ", "→").replace(" ← ", "←")
