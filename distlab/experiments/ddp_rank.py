"""The training of `distlab ddp` on one rank: the course's loader and `fit`, watched.

The loader and the loss function are wrapped to see how far it is. What is trained, and
how, is the units' own doing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.experiments.ddp_config import DdpConfig
from distlab.experiments.ddp_data import (
    Split,
    make_model,
    make_optimizer,
    read_split,
)
from distlab.experiments.digits_rank import in_a_row
from distlab.runner import RankContext

NUM_FIRST = 5  # how many of its samples a rank names
REPORT_S = 0.2  # between two signs of life
_HELD_OUT_BATCH = 500

Batch = tuple[Tensor, ...]


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
    _report_shard(context, loader)
    model = make_model(config, comm.rank).to(comm.device)
    watch = _Watch(context, model)
    history = trainer.fit(
        comm,
        model,
        make_optimizer(config, model),
        watch.loss_fn,
        _WatchedLoader(loader, watch),
        _held_out(data, comm.rank, comm.world_size, comm.device),
        config.epochs,
        log=lambda line: context.report({"log": str(line)}),
    )
    return {
        "history": _as_numbers(history, config.epochs),
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

    def begin_epoch(self) -> Epoch:
        self.epochs.append(Epoch())
        self._sum = 0.0
        return self.epochs[-1]

    def end_step(self) -> None:
        if self.first_weights is None:
            self.first_weights = in_a_row(self.model).cpu().clone()

    def end_epoch(self) -> None:
        epoch = self.epochs[-1]
        epoch.loss_sum = float(self._sum)
        self.context.report({"epoch": len(self.epochs) - 1, **vars(epoch)})

    def loss_fn(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy; in a training step it is noted down."""
        loss = cross_entropy(outputs, targets)
        if torch.is_grad_enabled():  # evaluation asks for none
            self._sum += loss.detach() * len(targets)
            if time.monotonic() >= self._reported + REPORT_S:
                self._tell(float(loss))
        return loss

    def _tell(self, loss: float) -> None:
        self._reported = time.monotonic()
        epoch = len(self.epochs) - 1
        self.context.report({"step": self.num_steps, "epoch": epoch, "loss": loss})


class _WatchedLoader:
    """The loader itself, except that its batches are counted and on the device."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader, self._watch = loader, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        watch, traffic = self._watch, self._watch.context.traffic
        epoch = watch.begin_epoch()
        device = watch.context.comm.device
        started, in_calls_s = time.perf_counter(), traffic.in_calls_s
        sent_bytes = traffic.sent_bytes
        batches = iter(self._loader)
        while (batch := self._next(batches, epoch)) is not None:
            epoch.samples += len(batch[0])
            watch.num_steps += 1
            yield tuple(column.to(device) for column in batch)
            watch.end_step()
        epoch.seconds = time.perf_counter() - started
        epoch.communication_s = traffic.in_calls_s - in_calls_s
        watch.sent_bytes += traffic.sent_bytes - sent_bytes
        watch.end_epoch()

    @staticmethod
    def _next(batches: Iterator[Batch], epoch: Epoch) -> Batch | None:
        asked = time.perf_counter()
        batch = next(batches, None)
        epoch.data_wait_s += time.perf_counter() - asked
        return batch


def _unit(parts: dict[str, Any]) -> Any:
    source, reference = arrived(parts["source"]), arrived(parts["reference"])
    return load_graft(source, reference, parts["grafts"])


def _report_shard(context: RankContext, loader: Any) -> None:
    batches = loader.batches()
    mine = [int(place) for batch in batches for place in batch]
    context.report(
        {
            "pid": os.getpid(),
            "first": tuple(mine[:NUM_FIRST]),
            "count": len(mine),
            "num_steps": len(batches),
        }
    )


def _held_out(
    data: Split, rank: int, world_size: int, device: torch.device
) -> list[Batch]:
    inputs = data.held_out_inputs[rank::world_size].to(device)
    targets = data.held_out_targets[rank::world_size].to(device)
    pairs = zip(
        inputs.split(_HELD_OUT_BATCH), targets.split(_HELD_OUT_BATCH), strict=True
    )
    return list(pairs)


def _as_numbers(history: Any, epochs: int) -> tuple[tuple[float, float], ...]:
    """What `fit` returned, as (loss, accuracy) after each epoch.

    Raises:
        ValueError: it is something else.
    """
    try:
        rows = tuple((float(loss), float(accuracy)) for loss, accuracy in history)
    except (TypeError, ValueError):
        rows = ()
    if len(rows) != epochs:
        what = f"a {type(history).__name__}"
        if isinstance(history, list | tuple):
            what += f" of {len(history)}"
        raise ValueError(
            f"fit returned {what}, not a list of {epochs}: the Metrics after each epoch"
        )
    return rows
