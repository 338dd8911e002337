"""Run `distlab ddp` on one rank: the course's loader and `fit`, watched.

We wrap the loader and the loss function to see how far the rank is. The units alone
decide what is trained and how. Because `fit` needs equally many samples on every rank,
we leave out the part of a global batch that doesn't divide. At the end of an epoch, the
unit's `evaluate` measures the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from distlab.checkpoints.training_state import Run
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.digests import digest
from distlab.monitor.meter import StepMeter
from distlab.monitor.profile import StepProfiler
from distlab.runner import RankContext
from distlab.training.ddp_checkpoint import Checkpointing, Checkpoints
from distlab.training.ddp_config import IDX, DdpConfig
from distlab.training.ddp_data import (
    Split,
    make_model,
    make_optimizer,
    read_split,
)
from distlab.training.digits_rank import CONTROLS, Mode, in_a_row

NUM_FIRST = 5  # how many of its samples a rank names
REPORT_S = 0.2  # between two signs of life
_HELD_OUT_BATCH = 500

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """How often a rank records its steps, and the folder of its profile, if any."""

    log_every_n_steps: int
    profile: str = ""


@dataclass
class Epoch:
    """One pass over the data, as one rank saw it."""

    seconds: float = 0.0
    samples: int = 0
    loss_sum: float = 0.0
    communication_s: float = 0.0
    data_wait_s: float = 0.0


def train_as_rank(
    context: RankContext,
    settings: dict[str, Any],
    files: dict[str, str],
    units: dict[str, dict[str, Any]],
    monitored: dict[str, Any] | None = None,
    checkpointing: dict[str, Any] | None = None,
    mode: Mode = "averaged",
) -> dict[str, Any]:
    """Run the whole training on one rank; `files` and `units` are text."""
    config, comm = DdpConfig(**settings), context.comm
    trainer, data_loader = _unit(units["trainer"]), _unit(units["data_loader"])
    if mode in CONTROLS:
        trainer.train_step = CONTROLS[mode]
    data = read_split({name: Path(path) for name, path in files.items()} or None)
    loader = data_loader.DistributedDataLoader(
        TensorDataset(data.train_inputs, data.train_targets),
        config.global_batch_size,
        comm.rank,
        comm.world_size,
        shuffle=True,
        seed=config.seed,
        num_workers=0,
    )
    sizes = [config.equal_size(size) for size in _sizes(config, data)]
    _report_shard(context, loader, sizes)
    model = make_model(config, comm.rank).to(comm.device)
    optimizer = make_optimizer(config, model)
    watch = _Watch(context, model)
    if checkpointing is not None:
        watch.checkpoints = Checkpoints(
            context,
            _unit(units["fault_tolerance"]),
            Checkpointing(**checkpointing),
            config,
            Run(model=model, optimizer=optimizer, parts={"loader": loader}),
            _identity(config, data),
        )
    skipped = watch.resume()
    if monitored is not None:
        watch.attend(Monitored(**monitored), optimizer)
    held_out = _held_out(data, comm.rank, comm.world_size, comm.device)
    metrics = watch.metrics

    def evaluate() -> None:
        loss, accuracy = trainer.evaluate(comm, model, cross_entropy, held_out)
        metrics.append((float(loss), float(accuracy)))
        if monitored is not None and comm.rank == 0:
            context.report({"validation": (watch.num_steps, *metrics[-1])})

    epochs_left = config.epochs - len(metrics)
    losses = []
    if epochs_left > 0:
        losses = trainer.fit(
            comm,
            model,
            optimizer,
            watch.loss_fn,
            _WatchedLoader(loader, watch, sizes, evaluate, skipped),
            epochs_left,
            log=lambda line: context.report({"log": str(line)}),
        )
    watch.close()
    if len(metrics) != config.epochs:
        raise ValueError(
            f"fit read the batches of {len(metrics)} epochs to their end; there were "
            f"{config.epochs}"
        )
    return {
        "losses": _as_numbers(losses, max(0, epochs_left)),
        "metrics": tuple(metrics),
        "weights": in_a_row(model).cpu(),
        "first_weights": watch.first_weights,
        "epochs": [vars(epoch) for epoch in watch.epochs],
        "num_steps": watch.num_steps,
        "sent_bytes": watch.sent_bytes,
    }


@dataclass
class _Watch:
    """Sees each batch go in and each loss come out."""

    context: RankContext
    model: nn.Module
    epochs: list[Epoch] = field(default_factory=list)
    num_steps: int = 0
    sent_bytes: float = 0.0
    first_weights: Tensor | None = None  # after the first step
    _reported: float = 0.0
    _sum: Tensor | float = 0.0
    _loss: Tensor | float = 0.0  # of the newest batch
    metrics: list[tuple[float, float]] = field(default_factory=list)
    checkpoints: Checkpoints | None = None
    _resumed: bool = False  # the next epoch has begun already
    _meter: StepMeter | None = None
    _profiler: StepProfiler | None = None

    def attend(self, monitored: Monitored, optimizer: Optimizer) -> None:
        """Record the steps from now on, and report the records."""
        context, traffic = self.context, self.context.traffic
        self._meter = StepMeter(
            context.comm.rank,
            lambda record: context.report({"record": vars(record)}),
            log_every_n_steps=monitored.log_every_n_steps,
            in_communication_s=lambda: traffic.in_calls_s,
            optimizer=optimizer,
            device=context.comm.device,
        )
        traffic.before_call = self._meter.before_call
        if monitored.profile:
            self._profiler = StepProfiler(
                Path(monitored.profile), context.comm.rank, context.comm.device
            )

    def resume(self) -> int:
        """Continue from a checkpoint if asked to; return how many batches to skip."""
        found = self.checkpoints.resume() if self.checkpoints else None
        if found is None:
            return 0
        self.epochs = [Epoch(**epoch) for epoch in found["epochs"]]
        self.metrics = [(loss, accuracy) for loss, accuracy in found["metrics"]]
        self.num_steps = found["num_steps"]
        self.sent_bytes = found["sent_bytes"]
        self.first_weights = found["first_weights"]
        self._resumed = len(self.epochs) > len(self.metrics)
        return int(found["loader"]["num_delivered"]) if self._resumed else 0

    def save(self) -> None:
        """Begin to save a checkpoint of the current state."""
        assert self.checkpoints is not None
        progress = {
            "epochs": [vars(epoch) for epoch in self.epochs],
            "metrics": self.metrics,
            "num_steps": self.num_steps,
            "sent_bytes": self.sent_bytes,
            "first_weights": self.first_weights,
        }
        self.checkpoints.save(self.num_steps, progress)

    def begin_epoch(self) -> Epoch:
        if self._resumed:
            self._resumed = False
            self._sum = self.epochs[-1].loss_sum
        else:
            self.epochs.append(Epoch())
            self._sum = 0.0
        self._reported = 0.0  # however short the epoch is, its first loss is reported
        if self._meter:
            self._meter.begin_epoch()
        return self.epochs[-1]

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        asked = time.perf_counter()
        with self._meter.waiting_for_data() if self._meter else nullcontext():
            yield
        self.epochs[-1].data_wait_s += time.perf_counter() - asked

    def end_step(self, samples: int) -> None:
        if self.first_weights is None:
            self.first_weights = in_a_row(self.model).cpu().clone()
        if self._meter:
            self._meter.end_step(self._loss, samples=samples)
        if self._profiler:
            self._profiler.end_step()

    def close(self) -> None:
        if self._profiler:
            self._profiler.close()
        if self.checkpoints:
            self.checkpoints.close()

    def end_epoch(self) -> None:
        if self._meter:
            self._meter.end_epoch()
        epoch = self.epochs[-1]
        self.context.report({"epoch": len(self.epochs) - 1, **vars(epoch)})

    def loss_fn(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy; in a training step, also record it."""
        loss = cross_entropy(outputs, targets)
        if torch.is_grad_enabled():  # evaluation asks for none
            self._loss = loss.detach()
            self._sum += self._loss * len(targets)
            if time.monotonic() >= self._reported + REPORT_S:
                self._tell(float(loss))
        return loss

    def _tell(self, loss: float) -> None:
        self._reported = time.monotonic()
        self.context.report(
            {
                "step": self.num_steps,
                "epoch": len(self.epochs) - 1,
                "loss": loss,
                "accuracy": self.metrics[-1][1] if self.metrics else None,
            }
        )


class _WatchedLoader:
    """A loader whose batches are also counted, cut, and moved to the device.

    `sizes` says how many samples of each batch this rank's `fit` gets. If it gets none,
    all ranks skip the batch. `skipped` is how many batches of the first epoch were
    trained on before this training was resumed.
    """

    def __init__(
        self,
        loader: Any,
        watch: _Watch,
        sizes: list[int],
        at_end: Callable[[], None],
        skipped: int = 0,
    ) -> None:
        self._loader, self._watch = loader, watch
        self._sizes, self._at_end, self._skipped = sizes, at_end, skipped
        self._first_epoch = len(watch.metrics)  # fit counts from 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return sum(size > 0 for size in self._sizes)

    def set_epoch(self, epoch: int) -> None:
        """Call the loader's own set_epoch."""
        self._loader.set_epoch(self._first_epoch + epoch)

    def __iter__(self) -> Iterator[Batch]:
        watch = self._watch
        account = _Account(watch)
        sizes, self._skipped = self._sizes[self._skipped :], 0
        num_left = sum(size > 0 for size in sizes)
        checkpoints, is_due = watch.checkpoints, False
        batches = iter(self._loader)
        for size in sizes:
            with watch.waiting_for_data():
                batch: Batch | None = next(batches, None)
            if batch is None:
                break
            batch = tuple(column[:size] for column in batch)
            if not len(batch[0]):
                continue
            account.epoch.samples += len(batch[0])
            watch.num_steps += 1
            num_left -= 1
            yield tuple(column.to(watch.context.comm.device) for column in batch)
            watch.end_step(len(batch[0]))
            if checkpoints:
                is_due = checkpoints.is_due(watch.num_steps)
                if is_due and num_left:  # the last one waits for the evaluation
                    account.settle()
                    watch.save()
        next(batches, None)  # run to the end, so the next loop starts over
        account.settle()
        watch.end_epoch()
        self._at_end()
        if checkpoints and (is_due or checkpoints.is_due_after(len(watch.metrics))):
            watch.save()


class _Account:
    """Adds the time and the bytes since its beginning to an epoch."""

    def __init__(self, watch: _Watch) -> None:
        self._watch, self._traffic = watch, watch.context.traffic
        self.epoch = watch.begin_epoch()
        self._mark()

    def _mark(self) -> None:
        self._started = time.perf_counter()
        self._in_calls_s = self._traffic.in_calls_s
        self._sent_bytes = self._traffic.sent_bytes

    def settle(self) -> None:
        """Add the time and the bytes since the last call."""
        self.epoch.seconds += time.perf_counter() - self._started
        self.epoch.communication_s += self._traffic.in_calls_s - self._in_calls_s
        self.epoch.loss_sum = float(self._watch._sum)
        self._watch.sent_bytes += self._traffic.sent_bytes - self._sent_bytes
        self._mark()


def _unit(parts: dict[str, Any]) -> Any:
    source, reference = arrived(parts["source"]), arrived(parts["reference"])
    return load_graft(source, reference, parts["grafts"])


def _report_shard(context: RankContext, loader: Any, sizes: list[int]) -> None:
    pairs = zip(loader.batches(), sizes, strict=False)
    batches = [batch[:size] for batch, size in pairs if size]
    mine = [int(index) for batch in batches for index in batch]
    context.report(
        {
            "pid": os.getpid(),
            "first": tuple(mine[:NUM_FIRST]),
            "count": len(mine),
            "num_steps": len(batches),
        }
    )


def _identity(config: DdpConfig, data: Split) -> str:
    """Identify your own files by a digest; a known set just by its name."""
    if config.dataset != IDX:
        return ""
    return f"of the SHA-256 {digest(data.train_inputs, data.train_targets)}…"


def _sizes(config: DdpConfig, data: Split) -> list[int]:
    """Return the sizes of an epoch's global batches."""
    num_samples, size = len(data.train_targets), config.global_batch_size
    starts = range(0, num_samples, size)
    return [min(size, num_samples - start) for start in starts]


def _held_out(
    data: Split, rank: int, world_size: int, device: torch.device
) -> list[Batch]:
    inputs = data.held_out_inputs[rank::world_size].to(device)
    targets = data.held_out_targets[rank::world_size].to(device)
    pairs = zip(
        inputs.split(_HELD_OUT_BATCH), targets.split(_HELD_OUT_BATCH), strict=True
    )
    return list(pairs)


def _as_numbers(history: Any, epochs: int) -> tuple[float, ...]:
    """Return the mean training loss of each epoch, as `fit` returned it.

    Raises:
        ValueError: `fit` returned something else.
    """
    try:
        rows = tuple(float(loss) for loss in history)
    except (TypeError, ValueError):
        rows = ()
    if len(rows) != epochs:
        what = f"a {type(history).__name__}"
        if isinstance(history, list | tuple):
            what += f" of {len(history)}"
        raise ValueError(
            f"fit returned {what}; expected a list of {epochs}, the mean training loss "
            "of each epoch"
        )
    return rows
