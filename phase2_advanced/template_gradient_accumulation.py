"""Gradient accumulation: one optimiser step from a batch that does not fit in memory.

Guide: phase2_advanced/guide/gradient_accumulation.md.
Source: Huang et al., GPipe (arXiv 1811.06965), section 2.2, for the microbatch; Pascanu
et al. (arXiv 1211.5063) for clipping by the global norm.
Symbols: n = comm.world_size; K = how many microbatches a rank has in this step.
Cost: the activations of one microbatch; the messages of one step, whatever K is.

    rank 0   microbatch 0, 1, 2 … one after another   sum in .grad ─┐ once ─▶ same step
    rank 1   microbatch 0, 1, 2 … one after another   sum in .grad ─┘      ─▶ same step

backward() adds to .grad. That is all there is to accumulation; the rest is about what
is added (2.1), when it is sent (2.2), and what is done with it (2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]
Microbatches = Sequence[tuple[Tensor, Tensor]]


def accumulate(
    comm: Comm, model: nn.Module, loss_fn: LossFn, microbatches: Microbatches
) -> None:
    """Add to every `.grad` this rank's part of the mean gradient over all samples.

    Given: `microbatches` are this rank's (inputs, targets). They may differ in size,
    and the ranks may have unequally many, but each has a sample. `loss_fn` averages
    over its samples. All samples of all ranks are one batch; the parts of all ranks
    add up to its gradient. What `.grad` holds before the call stays in the sum.

    C1 a sample counts as much as any other, on whichever rank, in whichever microbatch
    C2 no more activations are kept at any time than those of one microbatch
    In torch.distributed: nothing does it; Trainer code divides by a global count
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 2/3 and 10/3
    Cost: one all_reduce of one number. Check: distlab check 2.1
    """
    # TODO(gradient_accumulation.accumulate)
    # how many samples does the whole batch have?
    # and when may autograd forget a microbatch?
    raise NotImplementedError("gradient_accumulation.accumulate")


def sync_once(
    comm: Comm, model: nn.Module, loss_fn: LossFn, microbatches: Microbatches
) -> None:
    """Replace every `.grad` by the mean gradient over all samples of all ranks.

    Given: as in 2.1. `.grad` may hold those of an old step.

    C1 every .grad is the mean over the samples of this step
    C2 every gradient is sent once, however many microbatches there are
    In torch.distributed: all but the last backward() under model.no_sync()
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 4 and 4
    Cost: one all_reduce per parameter, and one number. Check: distlab check 2.2
    """
    # TODO(gradient_accumulation.sync_once)
    # accumulate() has done most of it: what is in .grad before, what after?
    raise NotImplementedError("gradient_accumulation.sync_once")


def clip(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    microbatches: Microbatches,
    max_norm: float,
) -> float:
    """Take one step with the mean gradient, no longer than `max_norm`; its norm before.

    The norm is that of all gradients of the model as one long vector. A gradient that
    is longer keeps its direction and gets the length max_norm; others stay as they are.

    C1 the weights become those of one process that has the whole batch and clips once
    C2 returns the norm before clipping, the same number on every rank
    In torch.distributed: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    Example: gradients 3 and 4, max_norm 1 → 0.6 and 0.8; returns 5.0
    Cost: that of sync_once; no message more. Check: distlab check 2.3
    """
    # TODO(gradient_accumulation.clip)
    # which gradient is to be clipped: a microbatch's, a rank's, or that of all?
    raise NotImplementedError("gradient_accumulation.clip")


def port(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    microbatches: Microbatches,
    max_norm: float,
) -> float:
    """The step of clip() in torch.distributed alone: there is no comm here.

    Given: as in 2.3, but `model` is a torch.nn.parallel.DistributedDataParallel. In the
    course of backward() it replaces every `.grad` by the mean over the ranks, except
    under `with model.no_sync():`. All ranks have equally many microbatches. Whatever
    has to be sent besides goes through torch's default process group.

    C1 the weights become those of one process that has the whole batch and clips once
    C2 every gradient is sent once, however many microbatches there are
    C3 returns the norm before clipping, the same number on every rank
    In torch.distributed: that is what this is
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 4 and 4, not 3.5 and 3.5
    Cost: each gradient once, and one number. Check: distlab check 2.22
    """
    # TODO(gradient_accumulation.port)
    # dist.all_reduce(tensor), dist.get_world_size() you know from 1.16.
    # by what does DistributedDataParallel divide, and by what should be divided?
    # which of the microbatches is the one whose backward() may send?
    raise NotImplementedError("gradient_accumulation.port")
