"""Data-parallel training: every rank has the whole model and its own share of the data.

Guide: phase1_data_parallel/guidelines.md, "Build it, task by task", 1.5 to 1.7.
Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 3.1.
Symbols: n = comm.world_size.
Cost: one all_reduce of all gradients per step; nothing else grows with the model.

    rank 0   same weights   other data   other gradient ─┐ mean ─▶ same step
    rank 1   same weights   other data   other gradient ─┘      ─▶ same step

Here `comm` does have collectives. They work in place and return nothing:

    comm.broadcast(tensor, src)        comm.all_reduce(tensor)        the sum
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from distlab.comm import Comm


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
    loss_fn: Callable[[Tensor, Tensor], Tensor],
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
