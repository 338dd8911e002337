"""Show progress: a bar for each rank on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from distlab.cli.screen import cut
from distlab.grading.report import visible
from distlab.terminal import screen_width
from distlab.training.ddp import Moment

_MOST_BARS = 8


class Bars:
    """A context manager that shows events as they happen."""

    def __init__(
        self, label: str, world_size: int, epochs: int, *, quiet: bool
    ) -> None:
        self._label, self._epochs, self._quiet = label, epochs, quiet
        self._num_bars = min(world_size, _MOST_BARS)
        self._num_hidden = world_size - self._num_bars
        self._steps = 1  # of an epoch; known once the ranks are
        self._moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._started = time.monotonic()
        self._tasks: list[TaskID] = []
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[at]}", justify="left"),
            TimeElapsedColumn(),
            console=Console(highlight=False),
            disable=quiet or not self._moves,
        )

    def __enter__(self) -> Bars:
        if self._quiet:
            return self
        self._line(f"{self._label}: starting")
        if self._moves:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, steps: int) -> None:
        """Start the bars once the ranks run; an epoch has this many steps."""
        self._steps = max(1, steps)
        for rank in range(self._num_bars):
            is_last = rank == self._num_bars - 1 and self._num_hidden > 0
            hidden = f" (and {self._num_hidden} more)" if is_last else ""
            name = self._label if self._num_bars == 1 else f"rank {rank}{hidden}"
            total = self._steps * self._epochs
            self._tasks.append(self._progress.add_task(name, total=total, at=""))

    def moment(self, moment: Moment) -> None:
        """Show how far one rank has come."""
        if moment.rank < len(self._tasks):
            at = f"epoch {moment.epoch + 1} of {self._epochs}  loss {moment.loss:.3f}"
            task = self._tasks[moment.rank]
            self._progress.update(task, completed=moment.step, at=at)

    def epoch(self, index: int, loss: float) -> None:
        """Show the mean loss of an epoch that all ranks have ended."""
        for task in self._tasks:
            self._progress.update(task, completed=(index + 1) * self._steps)
        if not self._moves:
            spent = time.monotonic() - self._started
            self._line(
                f"{self._label}: epoch {index + 1} of {self._epochs}  training loss "
                f"{loss:.4f}  {spent:.1f} s"
            )

    def log(self, rank: int, line: str) -> None:
        """Show a line that a rank's `fit` logs."""
        text = visible(line.expandtabs(4))
        self._line(cut(f"rank {rank} logs: {text}", screen_width() - 2))

    def say(self, *lines: str) -> None:
        """Print plain lines above the bars."""
        for line in lines:
            self._line(line.removeprefix("  "))

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._progress.console.print(
                f"  {text}".rstrip(), markup=False, soft_wrap=True
            )
