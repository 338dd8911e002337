"""Gradient accumulation: one optimizer step from a batch that does not fit in memory.

Guide: phase2_advanced/guide/gradient_accumulation.md.
Source: Huang et al., GPipe (arXiv 1811.06965), section 2.2, for the microbatch; Pascanu
et al. (arXiv 1211.5063), section 3.2, for clipping by the global norm.
Symbols: n = comm.world_size; K = number of microbatches of a rank in this step.
Cost: the activations of one microbatch; the messages of one step, whatever K is.

    rank 0   microbatch 0, 1, 2, …   one after another   sum in .grad ─┐ all_reduce
    rank 1   microbatch 0, 1, 2, …   one after another   sum in .grad ─┘ once, then step

backward() adds to .grad. The tasks are about what it adds (2.1), when you send the sum
(2.2), and how you clip it (2.3).
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
    """Add to every `.grad` this rank's contribution to the mean gradient.

    Given: `microbatches` holds this rank's (inputs, targets). The microbatches may
    differ in size, and the ranks in their number of microbatches; every rank has a
    microbatch, and every microbatch a sample. `loss_fn` returns the mean over its
    samples. The global batch is all samples of all ranks. The sum of all ranks'
    contributions is its mean gradient. Keep what `.grad` holds before the call, and add
    to it. Modules may share parameters. A parameter may be frozen or unused, a scalar
    or a transposed view.

    C1 Every sample has the same weight in the gradient, no matter which rank and
       microbatch it belongs to.
    C2 Autograd holds the activations of at most one microbatch at a time.
    In torch.distributed: no function; the training loop divides by a global count
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 2/3 and 10/3
    Cost: one all_reduce of one element. Check: distlab check 2.1
    """
    ### BEGIN SOLUTION gradient_accumulation.accumulate
    #| how many samples does the global batch have?
    #| when may autograd free the activations of a microbatch?
    total = torch.tensor([sum(len(x) for x, _ in microbatches)], device=comm.device)
    comm.all_reduce(total)
    for inputs, targets in microbatches:
        loss = loss_fn(model(inputs), targets)
        (loss * (len(inputs) / int(total))).backward()
    ### END SOLUTION


def sync_once(
    comm: Comm, model: nn.Module, loss_fn: LossFn, microbatches: Microbatches
) -> None:
    """Set every `.grad` to the mean gradient of the global batch.

    Given: as in 2.1. `.grad` may hold the gradient of an earlier step. A parameter that
    is frozen or unused gets no gradient on any rank, so set its .grad to None or zeros.

    C1 Every `.grad` is the mean gradient over the samples of this step, with nothing
       left over from an earlier one.
    C2 Every gradient is sent only once, no matter how many microbatches there are.
    In torch.distributed: all but the last forward and backward under model.no_sync()
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 4 and 4
    Cost: one all_reduce per parameter, and one of one element. Check: distlab check 2.2
    """
    ### BEGIN SOLUTION gradient_accumulation.sync_once
    #| accumulate() does most of it: what does .grad hold before and after the call?
    model.zero_grad()
    accumulate(comm, model, loss_fn, microbatches)
    for parameter in model.parameters():
        if parameter.grad is not None:
            total = parameter.grad.contiguous()  # a transposed parameter's is not
            comm.all_reduce(total)
            parameter.grad.copy_(total)
    ### END SOLUTION


def clip(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    microbatches: Microbatches,
    max_norm: float,
) -> float:
    """Take one optimizer step with the mean gradient, clipped to the norm `max_norm`.

    Given: as in 2.2; at least one parameter gets a gradient, and all gradients are
    finite. The optimizer may have only some of the parameters. The norm is that of one
    vector: all elements of all gradients of the model, each parameter once. If it is
    larger than max_norm, scale the gradient: same direction, norm max_norm. Otherwise
    do not change it. Return the norm before clipping as a Python float.

    C1 The weights end up the same as in the single-process baseline, which clips once
       per step.
    C2 `clip` returns the norm before clipping as a float, and every rank returns the
       same number.
    In torch.distributed: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    Example: gradients 3 and 4, max_norm 1 → 0.6 and 0.8; returns 5.0
    Cost: that of sync_once, and no further message. Check: distlab check 2.3
    """
    ### BEGIN SOLUTION gradient_accumulation.clip
    #| which gradient is clipped: a microbatch's, a rank's, or the global batch's?
    sync_once(comm, model, loss_fn, microbatches)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    optimizer.step()
    return float(norm)
    ### END SOLUTION


def with_torch(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    microbatches: Microbatches,
    max_norm: float,
) -> float:
    """Take the step of clip() with torch.distributed alone, without comm.

    Given: as in 2.3, but `model` is a torch.nn.parallel.DistributedDataParallel. During
    backward() it sets every `.grad` to the mean over the ranks, except under
    `with model.no_sync():`. All ranks have the same number of microbatches, and every
    parameter gets a gradient. Send everything else through torch's default process
    group.

    C1 The weights end up the same as in the single-process baseline, which clips once
       per step.
    C2 Every gradient is sent only once, no matter how many microbatches there are.
    C3 `with_torch` returns the norm before clipping as a float, and every rank returns
       the same number.
    In torch.distributed: already plain torch
    Example: n = 2, gradients 2 | 4 and 6, one sample each → 4 and 4, not 3.5 and 3.5
    Cost: each gradient once, and one element. Check: distlab check 2.22
    """
    ### BEGIN SOLUTION gradient_accumulation.port
    #| dist.all_reduce(tensor) and dist.get_world_size() are known from 1.16.
    #| DistributedDataParallel divides by what? by what does the contract divide?
    #| in the backward() of which microbatch may gradients be sent?
    total = torch.tensor([sum(len(x) for x, _ in microbatches)])
    dist.all_reduce(total)
    scale = dist.get_world_size() / int(total)
    model.zero_grad()
    *first, last = microbatches
    with model.no_sync():
        for inputs, targets in first:
            (loss_fn(model(inputs), targets) * (len(inputs) * scale)).backward()
    inputs, targets = last
    (loss_fn(model(inputs), targets) * (len(inputs) * scale)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return float(norm)
    ### END SOLUTION
