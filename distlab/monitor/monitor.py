"""Pass the ranks' records to the sinks; a sink that fails never stops a training.

ranks ── StepRecord ──► Monitor ── each record, and one row for all ranks ──► sinks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from distlab.monitor.records import StepRecord, Work, combined


class Sink(Protocol):
    """A destination for the figures of a training."""

    name: str

    def record(self, record: StepRecord) -> None:
        """Take the record of one rank."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Take figures of the whole run after `step` steps."""

    def close(self) -> None:
        """Finish, because nothing more will come."""


class Monitor:
    """Combines the records of `world_size` ranks, and gives both to all sinks.

    If a sink raises an error, for example because a disk is full or a server has gone,
    we call `warn` once and stop using that sink. The other sinks and the training
    continue.
    """

    def __init__(
        self,
        world_size: int,
        sinks: Sequence[Sink],
        *,
        work: Work | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._world_size, self._work, self._warn = world_size, work, warn
        self._sinks = list(sinks)
        self._heard: dict[int, list[StepRecord]] = {}

    def add(self, sinks: Sequence[Sink]) -> None:
        """Also send everything to these sinks from now on."""
        self._sinks += sinks

    def hear(self, record: StepRecord) -> None:
        """Take a rank's record; the record of the last rank completes the row."""
        self._each(lambda sink: sink.record(record))
        records = self._heard.setdefault(record.step, [])
        records.append(record)
        if len(records) == self._world_size:
            del self._heard[record.step]
            records.sort(key=lambda one: one.rank)
            self.figures(record.step, combined(records, self._work))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Pass on figures of the whole run, for example those of a validation."""
        self._each(lambda sink: sink.figures(step, figures))

    def close(self) -> None:
        """Close all sinks; safe to call twice."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, hand: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                hand(sink)
            except Exception as error:  # of a disk, a server, somebody else's library
                self._sinks.remove(sink)
                first = (str(error).splitlines() or [type(error).__name__])[0]
                self._warn(
                    f"{sink.name} failed and gets no more figures, the training goes "
                    f"on: {first}"
                )
