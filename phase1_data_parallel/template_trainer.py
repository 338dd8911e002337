"""Data-parallel training: every rank has the whole model and its own share of the data.

Guide: phase1_data_parallel/guide/trainer.md.
Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 3.1.
Symbols: n = comm.world_size.
Cost: one all_reduce of all gradients per step; nothing else grows with the model.

    rank 0   same weights   other data   other gradient ─┐ mean ─▶ same step
    rank 1   same weights   other data   other gradient ─┘      ─▶ same step

Here `comm` does have collectives. They work in place and return nothing:

    comm.broadcast(tensor, src)        comm.all_reduce(tensor)        the sum
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:  # nothing of distlab is needed to run this file: see main()
    from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]


class Metrics(NamedTuple):
    """How good a model is on some samples, counted over all ranks."""

    loss: float
    accuracy: float


class Loader(Protocol):
    """What `fit` reads from: this rank's part of each global batch, as in 1.10."""

    def set_epoch(self, epoch: int) -> None:
        """From here on, the order of `epoch`."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Inputs and targets, as often on every rank; some may have no sample."""


def broadcast_model(comm: Comm, model: nn.Module, src: int = 0) -> None:
    """Make every rank's `model` start out as that of rank `src`, in place.

    C1 the parameters are equal on all ranks   C2 so are the buffers
    In torch.distributed: DistributedDataParallel does it when it is constructed
    Cost: one broadcast per tensor. Check: distlab check 1.5
    """
    # TODO(trainer.broadcast_model)
    # a model's state is its parameters and its buffers
    # (p.detach() is the same memory, without asking autograd)
    raise NotImplementedError("trainer.broadcast_model")


def average_gradients(comm: Comm, model: nn.Module) -> None:
    """Replace every parameter's `.grad` by its mean over all ranks, in place.

    Given: backward() has run on every rank, on equally many samples.

    C1 every .grad is the mean over the ranks
    C2 all ranks make the same calls, in the same order
    In torch.distributed: DistributedDataParallel does it during backward()
    Example: n = 2, gradients 2 and 6 → 4 and 4
    Cost: one all_reduce per parameter. Check: distlab check 1.6
    """
    # TODO(trainer.average_gradients)
    # comm.all_reduce(tensor) gives the sum, in place
    raise NotImplementedError("trainer.average_gradients")


def train_step(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
) -> float:
    """Take one optimiser step, the same on every rank, from this rank's share of data.

    Given: equal models on all ranks; `inputs` and `targets` are this rank's share of
    the batch, as large as every other rank's; `loss_fn` averages over its samples.

    C1 the weights become what one process would get from the whole batch
    C2 returns the mean loss over the whole batch, the same number on every rank
    In torch.distributed: the loop around DistributedDataParallel
    Cost: that of average_gradients, and one number. Check: distlab check 1.7
    """
    # TODO(trainer.train_step)
    # the five lines of any training loop, with one more at the right place;
    # then the loss of all ranks, not only yours
    raise NotImplementedError("trainer.train_step")


def gradient_weight(comm: Comm, num_samples: int) -> float:
    """This rank's share of all samples of this step: its `num_samples` by their sum.

    The sum over all ranks; with no sample on any of them the share is 0.0.

    In torch.distributed: nothing does it; DistributedDataParallel weighs ranks equally
    Example: n = 2 with 1 and 3 samples → 0.25 and 0.75
    Cost: one all_reduce of one number. Check: distlab check 1.12
    """
    # TODO(trainer.gradient_weight)
    # how many samples do all ranks have together?
    raise NotImplementedError("trainer.gradient_weight")


def average_weighted(comm: Comm, model: nn.Module, num_samples: int) -> None:
    """Replace every `.grad` by the mean gradient over all samples of all ranks.

    Given: `num_samples` samples on this rank, and `.grad` is the mean over them. A rank
    without samples has not called backward(): its `.grad` are None, or of an old step.

    C1 gradient_weight is this rank's share
    C2 every .grad is the mean over all samples of all ranks
    C3 a rank without samples, or without some gradient, takes part all the same;
    parameters that need no gradient get none; one that no rank has: None or zeros
    In torch.distributed: the join() of DistributedDataParallel, for ranks without data
    Example: n = 2, 1 and 3 samples, gradients 2 and 6 → 5 and 5
    Cost: one all_reduce per parameter, and one number. Check: distlab check 1.12
    """
    # TODO(trainer.gradient_weight)
    # what must a rank without samples put into the sum?
    raise NotImplementedError("trainer.gradient_weight")


def evaluate(
    comm: Comm,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[tuple[Tensor, ...]],
) -> Metrics:
    """Loss and accuracy over all samples of all ranks; the same numbers on every rank.

    Given: `batches` are this rank's (inputs, targets). There may be no batch, and a
    batch may be empty, but somewhere there is a sample. `loss_fn` averages over its
    samples. The model's answer is the class with the highest output.

    C1 the loss (added up in float64) and the accuracy over all samples, on every rank
    C2 ranks with more, fewer or no batches end together
    C3 in eval mode, then back in the mode it was in (model.training); no gradients
    In torch.distributed: nothing does it; torchmetrics sums counts in the same way
    Example: n = 2, 1 of 1 and 0 of 3 right → accuracy 0.25
    Cost: one all_reduce of three numbers. Check: distlab check 1.13
    """
    # TODO(trainer.evaluate)
    # what can be added up over samples, batches and ranks? (an average cannot)
    raise NotImplementedError("trainer.evaluate")


def fit(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    train_loader: Loader,
    held_out: Iterable[tuple[Tensor, ...]],
    num_epochs: int,
    log: Callable[[str], None] = print,
) -> list[Metrics]:
    """Train for `num_epochs`; the metrics on `held_out` after each epoch.

    Given: models that may differ, in either mode. `train_loader` and `held_out` give
    this rank's part, as 1.10 and 1.13 know it. The first epoch is set_epoch(0).

    C1 the weights become what one process would get from the same global batches
    C2 the metrics after each epoch, the same on every rank
    C3 one rank, and no other, calls log: once per epoch, with one line
    In torch.distributed: the main() of any training script
    Cost: a step costs what average_weighted costs. Check: distlab check 1.11
    """
    # TODO(trainer.fit)
    # you have all the parts. What comes before the first step? What before each epoch?
    # A rank whose part of a batch has no sample still takes part in the step.
    raise NotImplementedError("trainer.fit")


def main(num_epochs: int = 3, path: str = "weights.pt") -> nn.Module:
    """Train on the digits, with torch.distributed alone; what torchrun starts.

    torchrun starts this file once per rank and sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT for it. The global batches are those of global_batches(); how the ranks
    share them out is free.

    C1 on every rank the weights of one process: SGD, learning rate LEARNING_RATE,
    cross-entropy, from make_model(seed=0); each sample goes through one rank's model
    C2 rank 0, and no other, saves the model's state_dict() to `path` with torch.save
    C3 the process group is destroyed at the end; and nothing of distlab is imported
    In torch.distributed: that is what this is
    Cost: one all_reduce per parameter and step. Check: distlab check 1.16
    """
    # TODO(trainer.main)
    # dist.init_process_group("gloo") reads what torchrun has set;
    # dist.get_rank(), dist.get_world_size(), dist.all_reduce(tensor) you know
    raise NotImplementedError("trainer.main")


LEARNING_RATE = 0.2


def make_model(seed: int) -> nn.Module:
    """The network that main() trains: 8×8 pixels in, ten scores out."""
    torch.manual_seed(seed)
    layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double()


def global_batches(epoch: int, size: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch, the same on every rank: the last one is smaller."""
    inputs, targets = _digits()
    generator = torch.Generator().manual_seed(epoch)
    for places in torch.randperm(len(inputs), generator=generator).split(size):
        yield inputs[places], targets[places]


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    # Out of scikit-learn's wheel: importing all of it takes a second on every rank.
    wheel = importlib.metadata.distribution("scikit-learn")
    path = wheel.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.tensor(np.loadtxt(str(path), delimiter=","))
    return table[:, :-1] / 16, table[:, -1].long()


if __name__ == "__main__":
    trained = main()
    if os.environ["RANK"] == "0":
        inputs, targets = _digits()
        right = (trained(inputs).argmax(1) == targets).double().mean()
        print(f"accuracy {right:.4f} on the digits it has seen, weights in weights.pt")
