"""What a training says of itself: lines, records of all ranks, a profiler's trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlab.comm import ByteMeter
from distlab.distributed.parts import running, unit
from distlab.given.monitoring import Record
from distlab.given.trainer import Job
from distlab.monitor.jsonl import JsonLines
from distlab.monitor.profile import StepProfiler
from distlab.recipe.options import Options


class Watch:
    """Sees each step end; a record every `log_every` steps, with the unit of 4.1.

    `step` is where the training begins. The records of a run that goes on from its
    checkpoints go on as well: those of later steps, which come again, are left out.

    Raises:
        ValueError: the folder of the records has those of another run.
    """

    def __init__(self, options: Options, job: Job, step: int) -> None:
        self.comm, self.every = job.comm, options.log_every
        self.is_first = job.comm.rank == 0
        self.sink: JsonLines | None = None
        if options.records and self.is_first:
            settings = {"world_size": self.comm.world_size, **vars(options)}
            goes_on = {"checkpoint": options.checkpoint} if options.checkpoint else None
            self.sink = JsonLines(
                Path(options.records), settings, same=goes_on, after=step
            )
        self.records = bool(options.records)
        self.timed = job.loader = TimedLoader(job.loader)
        self.profiler: StepProfiler | None = None
        if options.profile:
            folder = Path(options.profile)
            folder.mkdir(parents=True, exist_ok=True)
            self.profiler = StepProfiler(folder, self.comm.rank, self.comm.device)
        self._begin()

    def _begin(self) -> None:
        self.started_s, self.num_steps = time.perf_counter(), 0
        self.timed.wait_s, self.timed.num_samples = 0.0, 0
        self.communicated_s = self._in_calls_s()

    def _in_calls_s(self) -> float:
        comm: Any = self.comm
        return float(comm.traffic.in_calls_s) if isinstance(comm, ByteMeter) else 0.0

    def end_step(self, step: int, epoch: int, loss: float) -> None:
        """A step is done; collective where records are kept."""
        self.num_steps += 1
        if self.profiler:
            self.profiler.end_step()
        if step % self.every:
            return
        seconds = time.perf_counter() - self.started_s
        figures = {"loss": loss, "step_s": seconds / self.num_steps}
        if self.records:
            figures |= self._of_all_ranks(seconds, loss)
        if self.sink:
            self.sink.figures(step, {"epoch": epoch, **figures})
        self.say(
            f"step {step}  loss {loss:.4f}  {1000 * figures['step_s']:.0f} ms a step"
        )
        self._begin()

    def _of_all_ranks(self, seconds: float, loss: float) -> dict[str, float]:
        data_s = min(seconds, self.timed.wait_s)
        communication_s = min(
            seconds - data_s, self._in_calls_s() - self.communicated_s
        )
        record = Record(
            rank=self.comm.rank,
            data_s=data_s,
            compute_s=seconds - data_s - communication_s,
            communication_s=communication_s,
            loss=loss,
            num_samples=self.timed.num_samples,
        )
        monitoring = unit("monitoring")
        with running():
            records = monitoring.gather_records(self.comm, record)
            report = monitoring.step_report(records)
        shares = report.shares.values()
        return {
            "samples_per_s": report.samples_per_s,
            "data_share": max(share.data for share in shares),
            "communication_share": max(share.communication for share in shares),
        }

    def say(self, line: str) -> None:
        """Print it, on rank 0."""
        if self.is_first:
            print(line, flush=True)

    def close(self) -> None:
        """The training is over."""
        if self.profiler:
            self.profiler.close()
        if self.sink:
            self.sink.close()


class TimedLoader:
    """A loader that notes how long it was waited for, and how many samples it gave."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.wait_s, self.num_samples = loader, 0.0, 0

    @property
    def epoch(self) -> int:
        """See Loader."""
        return int(self.loader.epoch)

    def set_epoch(self, epoch: int) -> None:
        """See Loader."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """See Loader."""
        batches = iter(self.loader)
        while True:
            asked_s = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - asked_s
            if batch is None:
                return
            self.num_samples += len(batch[0])
            yield batch

    def state_dict(self) -> Any:
        """See Stateful."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """See Stateful."""
        self.loader.load_state_dict(state)
