"""Report a training's progress: print lines, keep records of all ranks, and profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlab.checkpoints.files import exchange
from distlab.comm import ByteMeter, Comm
from distlab.given.imagenet_trainer import Job, Metrics, NoScaler
from distlab.monitor import Monitor, Sink, StepRecord
from distlab.monitor.meter import StepMeter
from distlab.monitor.profile import StepProfiler
from distlab.monitor.sinks import announced, expect_known, num_restarts, open_sinks
from distlab.monitor.view import duration
from distlab.recipe.options import Options


def say(comm: Comm, line: str) -> None:
    """Print a line, on rank 0 only."""
    if comm.rank == 0:
        print(line, flush=True)


def introduce(options: Options, job: Job) -> None:
    """Print what we're about to train: model, images, ranks and engine."""
    loader: Any = job.loader
    num_parameters = sum(one.numel() for one in job.model.parameters())
    device = job.comm.device.type
    backend = options.backend or ("nccl" if device == "cuda" else "gloo")
    num_ranks = job.comm.world_size
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    say(
        job.comm,
        f"model {options.model}, {num_parameters:,} parameters; data {options.data}, "
        f"{loader.loader.num_samples:,} images, {loader.num_full} steps an epoch",
    )
    say(
        job.comm,
        f"{ranks} on {device}, engine {options.engine} over {backend}, "
        f"{options.precision}, {options.global_batch_size} images a step",
    )


class Watch:
    """Reports progress, with a line and a record every `log_every` steps.

    `step` is where the training begins. If a run continues from its checkpoints, its
    records continue as well, without those of later steps, which it will repeat.

    Raises:
        ValueError: the folder for the records has those of another run.
        ModuleNotFoundError: a place for the records needs a library that isn't
            installed.
        OSError: the folder can't be written, or a port is taken.
    """

    def __init__(self, options: Options, job: Job, step: int) -> None:
        self.options, self.job, self.comm = options, job, job.comm
        loader: Any = job.loader
        self.first = self.step = step
        self.last = options.epochs * int(loader.num_full)
        if options.max_steps:
            self.last = min(self.last, options.max_steps)
        self.monitor: Monitor | None = None
        self.meter: StepMeter | None = None
        self.loader: MeteredLoader | None = None
        also = [one.strip() for one in options.also.split(",") if one.strip()]
        expect_known(also)  # on all ranks: none waits for one that has refused
        if options.records:
            if job.comm.rank == 0:
                self.monitor = self._open(Path(options.records), also)
            self.meter = self._meter()
            self.loader = job.loader = MeteredLoader(job.loader, self.meter)
        self.profiler: StepProfiler | None = None
        if options.profile:
            folder = Path(options.profile)
            folder.mkdir(parents=True, exist_ok=True)
            self.profiler = StepProfiler(folder, self.comm.rank, self.comm.device)
        self.began_s = self.said_s = time.perf_counter()
        self.said = step  # the step of the newest line
        self.rate = self._rate()  # of the step that comes now

    def _open(self, folder: Path, also: list[str]) -> Monitor:
        options, size = self.options, self.comm.world_size
        run = {"tool": "imagenet_trainer", "world_size": size, **vars(options)}
        same: dict[str, Any] | None = None
        if options.checkpoint:
            same = {"checkpoint": options.checkpoint}
        elif num_restarts():
            same = {"world_size": size}  # the folder is of its first start
        run["dataset"] = options.data
        sinks: list[Sink] = open_sinks(folder, run, also, same=same, after=self.step)
        for line in announced(folder, sinks):
            say(self.comm, f"figures: {line}")
        return Monitor(size, sinks)

    def _meter(self) -> StepMeter:
        comm: Any = self.comm
        is_metered = isinstance(comm, ByteMeter)
        meter = StepMeter(
            comm.rank,
            self._gather,
            log_every_n_steps=self.options.log_every,
            in_communication_s=lambda: comm.traffic.in_calls_s if is_metered else 0.0,
            optimizer=self.job.optimizer,
            device=comm.device,
        )
        meter.step, meter.epoch = self.step, int(self.job.loader.epoch)
        if is_metered:
            comm.traffic.before_call = meter.before_call
        return meter

    def _gather(self, record: StepRecord) -> None:
        """Give the monitor the records of all ranks; collective."""
        own = dict(vars(record))
        if not isinstance(self.job.scaler, NoScaler):
            own["nonfinite_step"] = None  # a loss scaler tries until nothing overflows
        for row in exchange(self.comm, own):
            if self.monitor:
                self.monitor.hear(StepRecord(**row))

    def _rate(self) -> float:
        return float(self.job.optimizer.param_groups[0]["lr"])

    def end_step(self, step: int, epoch: int, loss: float) -> None:
        """Report the end of a step; collective if we keep records."""
        rate, self.rate, self.step = self.rate, self._rate(), step
        if self.profiler:
            self.profiler.end_step()
        if self.meter and self.loader:
            self.meter.end_step(loss, samples=self.loader.num_newest)
        if step % self.options.log_every and step != self.last:
            return
        now_s = time.perf_counter()
        step_s = (now_s - self.said_s) / (step - self.said)
        left_s = (now_s - self.began_s) / (step - self.first) * (self.last - step)
        options = self.options
        self.say(
            f"step {step}/{self.last}  epoch {epoch + 1}/{options.epochs}  "
            f"loss {loss:.4f}  {options.global_batch_size / step_s:,.0f} images/s  "
            f"{1000 * step_s:.0f} ms a step  lr {rate:.4g}  ETA {duration(left_s)}"
        )
        self.said, self.said_s = step, now_s

    def end_epoch(self, epoch: int, metrics: Metrics) -> None:
        """Report the end of an epoch and its evaluation."""
        self.say(
            f"epoch {epoch + 1}/{self.options.epochs}  "
            f"accuracy {metrics.accuracy:.4f}  loss {metrics.loss:.4f}"
        )
        if self.monitor:
            figures = {"validation_loss": metrics.loss}
            figures["validation_accuracy"] = metrics.accuracy
            self.monitor.figures(self.step, figures)

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        say(self.comm, line)

    def close(self) -> None:
        """Report the end of the training; collective if we keep records."""
        if self.profiler:
            self.profiler.close()
        if self.meter:
            self.meter.end_epoch()  # of which a limit of steps may have left some
        if self.monitor:
            self.monitor.close()


class MeteredLoader:
    """Reports a loader's epochs and waits to a meter."""

    def __init__(self, loader: Any, meter: StepMeter) -> None:
        self.loader, self.meter = loader, meter
        self.num_newest = 0  # samples of the newest batch

    @property
    def epoch(self) -> int:
        """Implement `Loader.epoch`."""
        return int(self.loader.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Implement `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Implement `Loader.__iter__`."""
        self.meter.begin_epoch()
        batches = iter(self.loader)
        while True:
            with self.meter.waiting_for_data():
                batch = next(batches, None)
            if batch is None:
                self.meter.end_epoch()
                return
            self.num_newest = len(batch[0])
            yield batch

    def state_dict(self) -> Any:
        """Implement `Stateful.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Implement `Stateful.load_state_dict`."""
        self.loader.load_state_dict(state)
