"""The wrong steps that serve as controls, and what ranks and their parent compute.

This isn't part of `digits.py`, so that the process that forks the ranks doesn't have to
import more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.comm import Comm
from distlab.data.digits import Digits

Mode = Literal["averaged", "alone", "summed"]
LossFn = Callable[[Tensor, Tensor], Tensor]


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


CONTROLS: dict[str, Callable[..., Any]] = {"alone": step_alone, "summed": step_summed}
"""Steps that replace the trainer's, by mode; the mode "averaged" replaces none."""


def train_plainly(
    model: nn.Module, learning_rate: float, data: Digits, batches: Iterable[Any]
) -> list[float]:
    """Train in one process without any of our code; return the loss of each batch.

    A batch lists the numbers of its samples.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=learning_rate), []
    for batch in batches:
        optimizer.zero_grad()
        outputs = model(data.train_inputs[batch])
        loss = cross_entropy(outputs, data.train_targets[batch])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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
