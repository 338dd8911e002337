"""Show a training on the digits: a moving line, and a table at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from distlab.terminal import screen_width
from distlab.training.digits import Moment, Shard

_PLAIN_EVERY = 5  # epochs between two lines where a line cannot move
_ROWS = 8  # of the table of ranks
_ERASE_REST = "\x1b[K"  # of the line, to the right of the cursor


class Trained(Protocol):
    """The result of a training that we show, with an entry for each rank."""

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Return each rank's accuracy on the held-out samples."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digest of each rank's weights."""

    @property
    def epoch_s(self) -> float:
        """Return how long an epoch took."""


class LiveLine:
    """A line that updates on a terminal, or a plain line now and then elsewhere."""

    def __init__(self, epochs: int = 0, *, quiet: bool = False) -> None:
        self._epochs = epochs
        self._quiet = quiet
        self._moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._started = time.monotonic()
        self._shown = -1

    def say(self, text: str) -> None:
        """Show `text` until there is something else to show."""
        if self._quiet:
            return
        if self._moves:
            sys.stdout.write(f"\r{text[: screen_width() - 1]}{_ERASE_REST}")
        else:
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def show(self, moment: Moment) -> None:
        """Show the progress."""
        due = moment.epoch % _PLAIN_EVERY == 0 and moment.epoch != self._shown
        if not self._moves and not due:
            return
        self._shown = moment.epoch
        text = (
            f"  epoch {moment.epoch + 1:>2} of {self._epochs}   loss {moment.loss:.3f}"
        )
        if moment.accuracy is not None:
            text += f"   held-out accuracy {moment.accuracy:.3f}"
        self.say(f"{text}   {time.monotonic() - self._started:.1f} s")

    def clear(self) -> None:
        """Remove the moving line, or end plain lines with an empty one."""
        if self._quiet:
            return
        sys.stdout.write(f"\r{_ERASE_REST}" if self._moves else "\n")
        sys.stdout.flush()


def table(
    rows: Sequence[tuple[str, Trained, float | None]], *, timed: bool = True
) -> list[str]:
    """Show label, result and largest difference from the first row, side by side.

    Leave out the times if the learner still has to predict them.
    """
    head = f"{'epoch time':<12}" if timed else ""
    lines = [
        f"  {'':<10}{head}{'held-out accuracy':<19}"
        f"{'weights (digest)':<19}{'largest difference'}"
    ]
    for label, result, difference in rows:
        apart = "–" if difference is None else f"{difference:.1e}"
        took = f"{duration(result.epoch_s):<12}" if timed else ""
        lines.append(
            f"  {label:<10}{took}{accuracy(result):<19}{digests(result):<19}{apart}"
        )
    return [line.rstrip() for line in lines]


def shard_table(shards: Sequence[Shard], *, head: str) -> list[str]:
    """Show each rank and what it owns, with `head` above its first samples."""
    rows = [
        f"  {shard.rank:>4} {shard.pid:>9}    "
        f"{', '.join(map(str, shard.first))}, …".ljust(48)
        + f"{shard.count:>7,} an epoch"
        for shard in shards
    ]
    if len(rows) > _ROWS:
        rows = [*rows[: _ROWS - 2], "     …", rows[-1]]
    return [f"  rank       pid    {head}", *rows, ""]


def accuracy(result: Trained) -> str:
    """Format the held-out accuracy, as a range if the ranks' models differ."""
    lowest, highest = min(result.accuracies), max(result.accuracies)
    if lowest == highest:
        return f"{lowest:.3f}"
    return f"{lowest:.3f}–{highest:.3f}"


def digests(result: Trained) -> str:
    """Format the ranks' digests, or one if all are the same."""
    distinct = set(result.digests)
    num_ranks = len(result.digests)
    if len(distinct) > 1:
        return f"{len(distinct)} different ones"
    same = result.digests[0]
    return same if num_ranks == 1 else f"{same} on all {num_ranks}"


def duration(seconds: float) -> str:
    """Format seconds with two or three digits."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def times(ratio: float) -> str:
    """Say how many times as large something is."""
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def kilobytes(count: float) -> str:
    """Format bytes in thousands."""
    return f"{count / 1000:.0f} kB"
