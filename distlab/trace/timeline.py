"""A run as lanes: a bar per call, an arrow per message, red where a rank waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.runner.autopsy import describe, describe_tensor, explain, place_of
from distlab.trace.canvas import Canvas
from distlab.trace.layout import Arrow, Bar, Schedule, schedule
from distlab.trace.palette import (
    CALL,
    FAILURE,
    FAILURE_TEXT,
    INK,
    LINK_BUSY,
    LINK_IDLE,
    MUTED,
    NEUTRAL,
)
from distlab.trace.story import Missing, missing

if TYPE_CHECKING:
    from distlab.comm import Event
    from distlab.runner import RankRecord, Run

_LEFT, _TOP, _BOTTOM, _RIGHT = 120, 60, 66, 40
_WIDTH = 760  # at least
_SLOTS = 120  # at most: the last ones of a long run
_ENDS = {"raised": "raised an error", "died": "died", "running": "busy, no call"}
_STYLES = {"done": CALL, "posted": NEUTRAL, "failed": FAILURE}


def draw_timeline(run: Run, *, name: str = "timeline", title: str = "") -> str:
    """The picture of a run as SVG, with a description in words."""
    plan = schedule(run)
    return _Picture(run, plan, name, title or _title(run)).svg()


def _title(run: Run) -> str:
    count = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    how = {"finished": "to the end", "deadlock": "until no rank could go on"}
    return f"What {count} did, {how.get(run.outcome, 'until it failed')}"


class _Picture:
    def __init__(self, run: Run, plan: Schedule, name: str, title: str) -> None:
        self._run, self._plan = run, plan
        self._first = max(0.0, plan.length - _SLOTS)
        slots = plan.length - self._first
        self._slot = min(150.0, max(24.0, (_WIDTH - _LEFT - _RIGHT) / slots))
        self._lane = 60 if run.world_size <= 8 else 30
        self._right = max(_WIDTH - _RIGHT, _LEFT + self._slot * slots)
        width = int(self._right + _RIGHT)
        height = _TOP + self._lane * (run.world_size - 1) + _BOTTOM
        self._height = height
        self._canvas = Canvas(
            name,
            width,
            height,
            title=title,
            desc=f"Lanes of {_lanes(run)} over time. {explain(run)}.",
        )

    def svg(self) -> str:
        for record in self._run.ranks:
            self._draw_lane(record)
        for bar in self._plan.bars:
            if bar.end >= self._first:
                self._draw_bar(bar)
        for arrow in self._plan.arrows:
            if arrow.start >= self._first:
                self._draw_arrow(arrow)
        self._draw_waits()
        color = INK if self._run.outcome == "finished" else FAILURE_TEXT
        words = explain(self._run)
        size = 14 if len(words) < 80 else 11
        middle, y = _WIDTH / 2, self._height - 14
        self._canvas.text(middle, y, words, size=size, color=color, bold=True)
        return self._canvas.svg()

    def _x(self, slot: float) -> float:
        return _LEFT + self._slot * max(0.0, slot - self._first)

    def _y(self, rank: int) -> float:
        return _TOP + self._lane * rank

    def _draw_lane(self, record: RankRecord) -> None:
        y = self._y(record.rank)
        self._canvas.text(65, y + 5, f"rank {record.rank}", size=15, bold=True)
        self._canvas.rect(
            _LEFT, y - 9, self._right - _LEFT, 18, fill=LINK_IDLE, stroke=MUTED
        )
        words = _ENDS.get(record.status, "")
        if record.status == "finished" and not record.calls():
            words = "finished: made no call"
        elif record.status == "finished" and self._run.outcome != "finished":
            words = "finished"
        if words and self._lane >= 60:
            color = FAILURE_TEXT if record.status in _ENDS else INK
            self._canvas.text(
                self._right, y + 22, words, size=11, color=color, anchor="end"
            )

    def _draw_bar(self, bar: Bar) -> None:
        left, right = self._x(bar.start), self._x(bar.end)
        y, wide = self._y(bar.rank), max(3.0, right - left - 3)
        with self._canvas.titled(f"rank {bar.rank}: {words_of(bar.call)}"):
            if bar.state == "waiting":
                self._canvas.hatch(left, y - 9, self._right - left, 18, color=FAILURE)
            else:
                ready = self._x(max(bar.start, bar.end - 1))
                if bar.state == "done" and ready > left:  # the other side came later
                    self._canvas.hatch(left, y - 9, ready - left, 18)
                    if self._lane >= 60 and ready - left > 50:
                        middle = (left + ready) / 2
                        self._canvas.text(middle, y - 14, "blocked", size=11)
                    left, wide = ready, max(3.0, right - ready - 3)
                fill = _STYLES[bar.state]
                self._canvas.rect(left, y - 9, wide, 18, fill=fill, stroke=LINK_BUSY)
        if self._lane < 60:
            return
        if bar.state == "waiting":
            words = f"waits in {describe(bar.call)}"
            x, anchor = self._right, "end"
            self._canvas.text(
                x, y - 14, words, size=12, color=FAILURE_TEXT, anchor=anchor
            )
        elif wide > 7 * len(describe(bar.call)):
            self._canvas.text(left + wide / 2, y + 4, describe(bar.call), size=11)

    def _draw_arrow(self, arrow: Arrow) -> None:
        down = 1 if arrow.dst > arrow.src else -1
        x, end = self._x(arrow.start + 0.15), self._x(arrow.start + 0.75)
        y, end_y = self._y(arrow.src) + 9 * down, self._y(arrow.dst) - 9 * down
        words = f"message of rank {arrow.src} to rank {arrow.dst}: "
        with self._canvas.titled(words + words_of(arrow.call)):
            self._canvas.arrow(x, y, end, end_y, color=LINK_BUSY, thick=2.5)

    def _draw_waits(self) -> None:
        """Red arrows: the messages that are waited for and never get on."""
        waiting = {b.rank: b for b in self._plan.bars if b.state == "waiting"}
        shown = [wait for wait in missing(self._run) if wait.waiter in waiting]
        for index, wait in enumerate(shown):
            both = (wait.waiter, wait.peer)
            x = self._x(max(waiting[r].start for r in both if r in waiting)) + 14
            x += (index * 37) % max(20.0, self._right - 160 - x)
            self._draw_wait(x, wait)

    def _draw_wait(self, x: float, wait: Missing) -> None:
        src, dst = wait.ends
        down = 1 if dst > src else -1
        y, end_y = self._y(src) + 9 * down, self._y(dst) - 9 * down
        words = f"a message from {src} to {dst} that never gets on"
        dash = "" if wait.in_cycle else "7 6"
        with self._canvas.titled(f"rank {wait.waiter} waits: {words}"):
            self._canvas.arrow(x, y, x + 34, end_y, color=FAILURE, thick=3, dash=dash)
        if not wait.in_cycle and self._lane >= 60:
            what = "never received" if wait.given else "never sent"
            self._canvas.text(
                x + 36,
                (y + end_y) / 2 + 4,
                what,
                size=11,
                color=FAILURE_TEXT,
                anchor="start",
            )


def words_of(call: Event) -> str:
    """`call #2 send → 1  [8] float32  template_collectives.py:41`."""
    facts = (f"call #{call['n']} {describe(call)}", describe_tensor(call))
    return "  ".join(filter(None, [*facts, place_of(call)]))


def _lanes(run: Run) -> str:
    return "rank 0" if run.world_size == 1 else f"ranks 0 to {run.world_size - 1}"
