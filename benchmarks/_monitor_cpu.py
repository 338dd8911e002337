"""The processor time of monitoring in a real training, rank by rank.

In each rank the functions that a monitored training calls and a plain one does not are
timed with the thread's own processor clock, less what reading it takes: the meter's,
and what notes the call that the rank is in. The parent's part is what it needs more
than for a plain training.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from distlab.curriculum.choose import Choice
from distlab.data.idx_sets import Files
from distlab.monitor import Monitor
from distlab.monitor.jsonl import JsonLines
from distlab.monitor.meter import StepMeter
from distlab.runner import Cluster, RankContext
from distlab.runner.last_call import LastCall
from distlab.training import ddp, ddp_rank
from distlab.training.ddp_config import DdpConfig
from distlab.training.ddp_rank import Monitored

T = TypeVar("T")
_CALIBRATED = 2000  # calls
FIRST = 2  # the first epoch that counts: before it, much is done once
_MARK = "cpu "
_METER = ("begin_epoch", "end_epoch", "end_step", "_before_step", "before_call")


@dataclass
class Tally:
    """Seconds of this process's processor."""

    monitor_s: float = 0.0
    steps_s: float = 0.0  # all threads, monitoring included
    steps: int = 0
    clocked: int = 0  # how often the clock was read for a function


def train_timed(context: RankContext, *given: Any) -> dict[str, Any]:
    """A rank of the training; it logs its tally at the end."""
    tally = Tally()
    with _timed(tally):
        result = ddp_rank.train_as_rank(context, *given)
    tally.monitor_s -= tally.clocked * _clock_s()
    context.report({"log": _MARK + json.dumps(vars(tally))})
    return result


@contextmanager
def _timed(tally: Tally) -> Any:
    watch, data = ddp_rank._Watch, "waiting_for_data"
    begin, end = watch.begin_epoch, watch.end_epoch
    started = [0.0, 0]

    def begin_epoch(self: Any) -> Any:
        if len(self.epochs) + 1 == FIRST:
            tally.monitor_s = tally.steps_s = tally.steps = tally.clocked = 0
        epoch = begin(self)
        started[:] = time.process_time(), self.num_steps
        return epoch

    def end_epoch(self: Any) -> None:
        end(self)
        tally.steps_s += time.process_time() - started[0]
        tally.steps += self.num_steps - started[1]

    meter = [(StepMeter, name, getattr(StepMeter, name)) for name in _METER]
    called = [*meter, (LastCall, "__call__", LastCall.__call__)]
    timed: list[Any] = [(cls, name, _counted(tally, own)) for cls, name, own in called]
    timed += [(StepMeter, data, _data(tally)), (watch, "begin_epoch", begin_epoch)]
    with ExitStack() as stack:
        for owner, name, function in (*timed, (watch, "end_epoch", end_epoch)):
            stack.enter_context(patch.object(owner, name, function))
        yield


def _counted(tally: Tally, function: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(function)
    def timed(*given: Any, **named: Any) -> T:
        started = time.thread_time()
        try:
            return function(*given, **named)
        finally:
            tally.monitor_s += time.thread_time() - started
            tally.clocked += 1

    return timed


def _clock_s() -> float:
    """What timing a function that does nothing adds: it is not monitoring's."""
    nothing = Tally()
    function = _counted(nothing, lambda: None)
    for _ in range(_CALIBRATED):
        function()
    return nothing.monitor_s / _CALIBRATED


def _data(tally: Tally) -> Any:
    """`waiting_for_data` with its own time counted, and not that of the block."""

    @contextmanager
    def waiting_for_data(self: StepMeter) -> Any:
        started = time.thread_time()
        asked = time.perf_counter()
        tally.monitor_s += time.thread_time() - started
        yield
        started = time.thread_time()
        self._data_wait_s += time.perf_counter() - asked
        tally.monitor_s += time.thread_time() - started

    return waiting_for_data


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One training's processor time, a step's: of all ranks, and of their parent."""

    ranks_s: float  # monitoring included
    monitor_s: float  # in the ranks
    parent_s: float  # everything that the parent did meanwhile

    @property
    def total_s(self) -> float:
        """Of all processes."""
        return self.ranks_s + self.parent_s


def trained(
    cluster: Cluster,
    config: DdpConfig,
    files: Files,
    units: Mapping[str, Choice],
    folder: Path | None,
) -> Cost:
    """One training, monitored where there is a new `folder`."""
    tallies: list[Tally] = []
    parent_s = [0.0, 0.0]

    def on_epoch(epoch: int, _loss: float) -> None:
        if epoch + 1 >= FIRST - 1:
            place = 0 if epoch + 1 == FIRST - 1 else 1
            parent_s[place] = time.process_time()

    def on_log(_rank: int, line: str) -> None:
        if line.startswith(_MARK):
            tallies.append(Tally(**json.loads(line.removeprefix(_MARK))))

    sinks = [JsonLines(folder, {"world_size": config.world_size})] if folder else []
    monitor = Monitor(config.world_size, sinks) if folder else None
    try:
        with patch.object(ddp, "train_as_rank", train_timed):
            ddp.train(
                cluster,
                config,
                files,
                units,
                on_epoch=on_epoch,
                on_log=on_log,
                monitor=monitor,
                monitored=Monitored(log_every_n_steps=10) if folder else None,
                idle_s=600.0,
            )
    finally:
        if monitor:
            monitor.close()
    steps = tallies[0].steps
    return Cost(
        ranks_s=sum(tally.steps_s for tally in tallies) / steps,
        monitor_s=sum(tally.monitor_s for tally in tallies) / steps,
        parent_s=(parent_s[1] - parent_s[0]) / steps,
    )
