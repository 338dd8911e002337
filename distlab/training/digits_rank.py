"""The standard experiment on one rank: its share of the data, its steps, its controls.

This isn't part of `digits.py`, so that the process that forks the ranks doesn't have to
import more than this.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.comm import Comm
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.data.digits import Digits, load_digits_split
from distlab.models.mlp import make_mlp
from distlab.runner import RankContext

Mode = Literal["averaged", "alone", "summed"]
LossFn = Callable[[Tensor, Tensor], Tensor]

_REPORT_EVERY = 4  # steps between two signs of life
_NUM_FIRST = 3  # how many of its samples a rank names


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """The settings of a training; `code` is mine, reference or a path to a trainer.

    The mode "averaged" is correct data-parallel training, "alone" leaves out the
    averaging of gradients, and "summed" leaves out the division.
    """

    world_size: int = 4
    epochs: int = 20
    global_batch_size: int = 64
    learning_rate: float = 0.2
    seed: int = 0
    mode: Mode = "averaged"
    code: str = "reference"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"{self.epochs} epochs: choose at least 1")
        if self.world_size < 1 or self.global_batch_size % self.world_size:
            raise ValueError(
                f"a batch of {self.global_batch_size} samples cannot be shared equally "
                f"by {self.world_size} ranks"
            )


def train_as_rank(
    context: RankContext, settings: dict[str, Any], trainer_parts: dict[str, str]
) -> dict[str, Any]:
    """Run the whole training on one rank."""
    config, comm, traffic = DigitsConfig(**settings), context.comm, context.traffic
    data = load_digits_split()
    source = arrived(trainer_parts)
    trainer = load_graft(source, source, ())
    controls = {"alone": step_alone, "summed": step_summed}
    step = controls.get(config.mode, trainer.train_step)

    _report_shard(context, config, len(data.train_targets))
    model = make_mlp(seed=config.seed + comm.rank)  # every rank starts elsewhere,
    trainer.broadcast_model(comm, model)  # and this makes them start equal
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)

    num_steps, accuracy = 0, None
    losses, epochs_s = [], []
    in_calls_s, sent_bytes = traffic.in_calls_s, traffic.sent_bytes
    for epoch in range(config.epochs):
        started, step_losses = time.perf_counter(), []
        for batch in _my_batches(config, comm.rank, epoch, len(data.train_targets)):
            inputs, targets = data.train_inputs[batch], data.train_targets[batch]
            # A learner may return the number as a tensor: that is accepted, too.
            loss = float(step(comm, model, optimizer, cross_entropy, inputs, targets))
            step_losses.append(loss)
            if comm.rank == 0 and num_steps % _REPORT_EVERY == 0:
                context.report({"epoch": epoch, "loss": loss, "accuracy": accuracy})
            num_steps += 1
        losses.append(statistics.mean(step_losses))
        epochs_s.append(time.perf_counter() - started)
        accuracy = accuracy_of(model, data)
    return {
        "losses": tuple(losses),
        "accuracy": accuracy,
        "weights": in_a_row(model),
        "epochs_s": epochs_s,
        "communication": (traffic.in_calls_s - in_calls_s) / sum(epochs_s),
        "step_bytes": (traffic.sent_bytes - sent_bytes) / num_steps,
    }


def step_alone(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
) -> float:
    """Step along the rank's own gradient without communicating, as a control."""
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    # missing: average_gradients(comm, model)
    optimizer.step()
    return float(loss.detach())


def step_summed(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
) -> float:
    """Add up the gradients but never divide them, as a control."""
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        comm.all_reduce(parameter.grad)
        # missing: parameter.grad /= comm.world_size
    optimizer.step()
    return float(loss.detach())


def _my_batches(
    config: DigitsConfig, rank: int, epoch: int, count: int
) -> list[Tensor]:
    """Return this rank's share of each global batch, without an incomplete last one."""
    usable = count - count % config.global_batch_size
    mine = shuffled(config.seed, epoch, count)[:usable][rank :: config.world_size]
    return list(mine.split(config.global_batch_size // config.world_size))


def _report_shard(context: RankContext, config: DigitsConfig, count: int) -> None:
    usable = count - count % config.global_batch_size
    places = range(context.rank, usable, context.world_size)
    first = tuple(places[:_NUM_FIRST])
    context.report({"pid": os.getpid(), "first": first, "count": len(places)})


def accuracy_of(model: nn.Module, data: Digits) -> float:
    """Return the share of held-out digits that `model` classifies correctly."""
    with torch.no_grad():
        answers = model(data.held_out_inputs).argmax(dim=1)
    return float((answers == data.held_out_targets).double().mean())


def in_a_row(model: nn.Module) -> Tensor:
    """Return all parameters as one vector, in the model's own order."""
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in model.parameters()]
    )


def shuffled(seed: int, epoch: int, count: int) -> Tensor:
    """Return the order of all samples in this epoch, the same for every caller."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(count, generator=generator)
