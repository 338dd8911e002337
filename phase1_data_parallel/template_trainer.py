"""Data-parallel training: each rank has the full model and its own samples.

Guide: phase1_data_parallel/guide/trainer.md.
Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 3.1.
Symbols: n = comm.world_size. Cost: one all_reduce of all gradients per step.

    rank 0   weights W   samples A   gradient of A ─┐ mean ─▶ weights W'
    rank 1   weights W   samples B   gradient of B ─┘      ─▶ weights W'

In this file, `comm` has collectives, which work in place and return nothing. `comm` may
be a group of some of the processes, so "all ranks" means its ranks. A model may have
frozen and tied parameters, and parameters without dimensions.

    comm.broadcast(tensor, src)      the value of rank src, on every rank
    comm.all_reduce(tensor)          the sum over all ranks, on every rank
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: it would keep that group alive
from torch import Tensor, nn

if TYPE_CHECKING:  # this file runs without distlab: see main()
    from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]
LEARNING_RATE = 0.2  # of main()


class Metrics(NamedTuple):
    """The mean loss and the accuracy of a model over the samples of all ranks."""

    loss: float
    accuracy: float


class Loader(Protocol):
    """The loader that `fit` reads: this rank's part of each global batch (see 1.10)."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield (inputs, targets), equally many batches on every rank."""


def broadcast_model(comm: Comm, model: nn.Module, src: int = 0) -> None:
    """Copy the model of rank `src` into every rank's `model`, in place.

    C1 Every rank ends up with rank src's parameters.
    C2 Every rank also ends up with rank src's buffers.
    In torch.distributed: DistributedDataParallel (DDP) does it in its constructor
    Cost: one broadcast per tensor. Check: distlab check 1.5
    """
    # TODO(trainer.broadcast_model)
    # a model holds parameters and buffers
    # (p.detach() shares the memory of p; autograd does not follow it)
    raise NotImplementedError("trainer.broadcast_model")


def average_gradients(comm: Comm, model: nn.Module) -> None:
    """Replace every parameter's `.grad` by its mean over all ranks, in place.

    Given: every parameter has a .grad, from equally many samples on every rank, and its
    dtype can hold the sum.
    C1 Every `.grad` is the mean of that parameter's gradients over all ranks.
    C2 All ranks make the same collective calls in the same order.
    In torch.distributed: DDP does it during backward()
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
    """Take one optimizer step with the mean gradient of all ranks; return the loss.

    Given: all ranks have equal models. `inputs` and `targets` are this rank's samples
    of the global batch, equally many on each rank. `loss_fn` is a mean over samples.
    Gradients that are there before are only those of the last step.
    C1 The weights end up the same as if a single process had trained on the global
       batch.
    C2 `train_step` returns the mean loss over the global batch as a float, and every
       rank returns the same number.
    In torch.distributed: the body of the loop around a DDP model
    Cost: average_gradients, and an all_reduce of one element. Check: distlab check 1.7
    """
    # TODO(trainer.train_step)
    # a training step of one process, and one more line at the right place;
    # then the mean of all ranks' losses
    raise NotImplementedError("trainer.train_step")


def fit(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    train_loader: Loader,
    num_epochs: int,
    log: Callable[[str], None] = print,
) -> list[float]:
    """Train for `num_epochs` epochs; return the mean training loss of each epoch.

    Given: the ranks' models may differ, and may be in either mode; train in training
    mode. `train_loader` gives every rank equally many samples of each global batch, and
    at least one, but batches may differ in size. Call set_epoch(0) for the first epoch.
    C1 The weights end up the same as in the single-process baseline.
    C2 `fit` returns each epoch's mean loss over all samples, and every rank returns the
       same numbers.
    C3 Exactly one rank calls `log`, and it logs a single line per epoch.
    In torch.distributed: the training loop of any script that uses DDP
    Cost: a step costs what train_step costs. Check: distlab check 1.11
    """
    # TODO(trainer.fit)
    # what must happen once, what before each epoch, what for each batch?
    # A smaller batch counts less in the epoch's mean: count samples, not batches.
    raise NotImplementedError("trainer.fit")


def gradient_weight(comm: Comm, num_samples: int) -> float:
    """Return this rank's fraction of all ranks' samples; 0.0 if no rank has a sample.

    Example: n = 2 with 1 and 3 samples → 0.25 and 0.75
    Cost: one all_reduce of one element. Check: distlab check 1.12
    """
    # TODO(trainer.gradient_weight)
    # how many samples do all ranks have together?
    raise NotImplementedError("trainer.gradient_weight")


def average_weighted(comm: Comm, model: nn.Module, num_samples: int) -> None:
    """Replace every `.grad` by the mean gradient over all samples of all ranks.

    Given: this rank has `num_samples` samples, and `.grad` is the mean over them. A
    rank without samples did not call backward(), so its `.grad` is None or an old one.
    C1 `gradient_weight` returns this rank's fraction of all samples.
    C2 Every `.grad` is the mean gradient over all samples of all ranks.
    C3 A rank that has no samples, or has no gradient for some parameter, makes the same
       calls as the others and contributes zeros. A frozen parameter gets no `.grad`. If
       no rank has a gradient for a parameter, its `.grad` may be either None or zeros.
    In torch.distributed: nothing; with DDP, scale the loss by n × the weight
    Example: n = 2, 1 and 3 samples, gradients 2 and 6 → 5 and 5
    Cost: an all_reduce per parameter, and one of one element. Check: distlab check 1.12
    """
    # TODO(trainer.gradient_weight)
    # what does a rank without samples add to the sum?
    raise NotImplementedError("trainer.gradient_weight")


def evaluate(
    comm: Comm, model: nn.Module, loss_fn: LossFn, batches: Iterable[tuple[Tensor, ...]]
) -> Metrics:
    """Return loss and accuracy over the samples of all ranks, the same on every rank.

    Given: `batches` are this rank's (inputs, targets). A rank may have no batch and a
    batch no sample, but some rank has a sample. `loss_fn` is a mean over samples. All
    modules are in one mode, and the model predicts the class with the highest output.
    C1 Every rank returns the loss and the accuracy over the samples of all ranks, and
       the loss is summed in float64.
    C2 The call returns on every rank, even if some ranks have more batches than others
       or no batches at all.
    C3 The model runs in evaluation mode and without gradients, and it is switched back
       to its previous mode afterwards.
    In torch.distributed: nothing does it; torchmetrics sums counts in the same way
    Example: n = 2, 1 of 1 and 0 of 3 correct → accuracy 0.25
    Cost: one all_reduce of three elements. Check: distlab check 1.13
    """
    # TODO(trainer.evaluate)
    # which sums over samples, batches and ranks do you need? (means do not add up)
    raise NotImplementedError("trainer.evaluate")


def main(num_epochs: int = 3, path: str = "weights.pt") -> nn.Module:
    """Train on the digits with torch.distributed only; return the model, on every rank.

    torchrun starts it on one or more nodes and sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. global_batches() yields the batches, and you divide them among ranks.
    C1 Every rank ends up with the same weights as the single-process baseline, which
       uses make_model(0), SGD, LEARNING_RATE and cross-entropy. Each sample goes
       through the model on exactly one rank.
    C2 Rank 0 saves the model's state_dict() to `path` with torch.save, and no other
       rank saves anything.
    C3 Under torchrun, the program destroys its process group and exits cleanly. It
       doesn't import distlab.
    In torch.distributed: already plain torch
    Cost: one all_reduce per parameter and step. Check: distlab check 1.16
    """
    # TODO(trainer.main)
    # dist.init_process_group("gloo") reads what torchrun has set; you also need
    # dist.get_rank(), dist.get_world_size() and dist.all_reduce(tensor)
    raise NotImplementedError("trainer.main")


def make_model(seed: int) -> nn.Module:
    """Make the network that main() trains, from 8×8 pixels to ten scores."""
    torch.manual_seed(seed)
    layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double()


def global_batches(epoch: int, size: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an epoch's batches, the same on every rank; the last one is smaller."""
    inputs, targets = _digits()
    generator = torch.Generator().manual_seed(epoch)
    for indices in torch.randperm(len(inputs), generator=generator).split(size):
        yield inputs[indices], targets[indices]


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    # distlab comes with the digits, and we find them without importing distlab.
    places = (Path(folder, "distlab", "data", "digits.csv.gz") for folder in sys.path)
    path = next(place for place in places if place.is_file())
    table = torch.tensor(np.loadtxt(path, delimiter=","))
    return table[:, :-1] / 16, table[:, -1].long()


if __name__ == "__main__":
    trained = main()
    if os.environ["RANK"] == "0":
        inputs, targets = _digits()
        accuracy = (trained(inputs).argmax(1) == targets).double().mean()
        print(f"accuracy {accuracy:.4f} on the training digits; weights in weights.pt")
