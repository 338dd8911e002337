"""The training of `distlab ddp` on one rank: the course's loader and `fit`, watched.

The loader and the loss function are wrapped to see how far it is. What is trained, and
how, is the units' own doing. `fit` wants equally many samples on every rank: what of a
global batch does not divide is left out. After an epoch's batches the unit's `evaluate`
measures the model.
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

from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.monitor.meter import StepMeter
from distlab.monitor.profile import StepProfiler
from distlab.runner import RankContext
from distlab.training.ddp_config import DdpConfig
from distlab.training.ddp_data import (
    Split,
    make_model,
    make_optimizer,
    read_split,
)
from distlab.training.digits_rank import in_a_row

NUM_FIRST = 5  # how many of its samples a rank names
REPORT_S = 0.2  # between two signs of life
_HELD_OUT_BATCH = 500

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """How often a rank records its steps; the folder of its profile, if one is due."""

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
) -> dict[str, Any]:
    """The whole training, as one rank lives it; `files` and `units` as text."""
    config, comm = DdpConfig(**settings), context.comm
    trainer, data_loader = _unit(units["trainer"]), _unit(units["data_loader"])
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
    if monitored is not None:
        watch.attend(Monitored(**monitored), optimizer)
    held_out = _held_out(data, comm.rank, comm.world_size, comm.device)
    metrics: list[tuple[float, float]] = []

    def evaluate() -> None:
        loss, accuracy = trainer.evaluate(comm, model, cross_entropy, held_out)
        metrics.append((float(loss), float(accuracy)))
        if monitored is not None and comm.rank == 0:
            context.report({"validation": (watch.num_steps, *metrics[-1])})

    losses = trainer.fit(
        comm,
        model,
        optimizer,
        watch.loss_fn,
        _WatchedLoader(loader, watch, sizes, evaluate),
        config.epochs,
        log=lambda line: context.report({"log": str(line)}),
    )
    watch.close()
    if len(metrics) != config.epochs:
        raise ValueError(
            f"fit read the batches of {len(metrics)} epochs to their end; there were "
            f"{config.epochs}"
        )
    return {
        "losses": _as_numbers(losses, config.epochs),
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
    _meter: StepMeter | None = None
    _profiler: StepProfiler | None = None

    def attend(self, monitored: Monitored, optimizer: Optimizer) -> None:
        """From now on, record the steps and report the records."""
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

    def begin_epoch(self) -> Epoch:
        self.epochs.append(Epoch())
        self._sum = 0.0
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

    def end_epoch(self) -> None:
        if self._meter:
            self._meter.end_epoch()
        epoch = self.epochs[-1]
        epoch.loss_sum = float(self._sum)
        self.context.report({"epoch": len(self.epochs) - 1, **vars(epoch)})

    def loss_fn(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy; in a training step it is noted down."""
        loss = cross_entropy(outputs, targets)
        if torch.is_grad_enabled():  # evaluation asks for none
            self._loss = loss.detach()
            self._sum += self._loss * len(targets)
            if time.monotonic() >= self._reported + REPORT_S:
                self._tell(float(loss))
        return loss

    def _tell(self, loss: float) -> None:
        self._reported = time.monotonic()
        epoch = len(self.epochs) - 1
        self.context.report({"step": self.num_steps, "epoch": epoch, "loss": loss})


class _WatchedLoader:
    """The loader itself, except that its batches are counted, cut and on the device.

    `sizes` says how many samples of each batch this rank's `fit` gets; a batch of which
    it gets none is passed over, on all ranks alike.
    """

    def __init__(
        self,
        loader: Any,
        watch: _Watch,
        sizes: list[int],
        at_end: Callable[[], None],
    ) -> None:
        self._loader, self._watch = loader, watch
        self._sizes, self._at_end = sizes, at_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return sum(size > 0 for size in self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        watch, traffic = self._watch, self._watch.context.traffic
        epoch = watch.begin_epoch()
        device = watch.context.comm.device
        started, in_calls_s = time.perf_counter(), traffic.in_calls_s
        sent_bytes = traffic.sent_bytes
        batches = iter(self._loader)
        for size in self._sizes:
            with watch.waiting_for_data():
                batch: Batch | None = next(batches, None)
            if batch is None:
                break
            batch = tuple(column[:size] for column in batch)
            if not len(batch[0]):
                continue
            epoch.samples += len(batch[0])
            watch.num_steps += 1
            yield tuple(column.to(device) for column in batch)
            watch.end_step(len(batch[0]))
        epoch.seconds = time.perf_counter() - started
        epoch.communication_s = traffic.in_calls_s - in_calls_s
        watch.sent_bytes += traffic.sent_bytes - sent_bytes
        watch.end_epoch()
        self._at_end()


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


def _sizes(config: DdpConfig, data: Split) -> list[int]:
    """The sizes of an epoch's global batches."""
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
    """What `fit` returned: the mean training loss of each epoch.

    Raises:
        ValueError: it is something else.
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
