"""A model cut into stages, one per rank: activations go forward, gradients come back.

Guide: phase2_advanced/guide/model_parallel.md.
Source: Y. Huang et al., GPipe (arXiv 1811.06965), section 2, for the cutting.
Symbols: n = comm.world_size; rank r has stage r, the r-th part of the layers.
Cost: two messages per cut and step; all ranks but one are idle at any time.

    rank 0   layers 0 1   forward ──▶                                    ◀── backward
    rank 1   layers 2 3             forward ──▶               ◀── backward
    rank 2   layers 4                         forward, loss, backward

Nobody has the whole model, so nobody can compute its gradient alone. The chain rule
can be cut where the model is cut: all that a stage needs from the ones behind it is
the gradient with respect to what it has sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]


def partition(costs: Sequence[float], num_stages: int) -> list[list[int]]:
    """The numbers of each stage's layers; layer k costs `costs[k]`, zero or more.

    All stages work on every batch, so the one that costs most sets the pace.

    C1 every layer is in one stage, in the model's order, and no stage is empty
    C2 the stage that costs most costs as little as it can
    C3 fewer layers than stages, or no stage at all, is a ValueError
    In torch.distributed: torch.distributed.pipelining leaves it to you: SplitPoint
    Example: costs 1 1 1 5, 2 stages → [0, 1, 2] and [3]
    Cost: no communication. Check: distlab check 2.8
    """
    # TODO(model_parallel.partition)
    # where are the cuts? of all the places for them, which are the best?
    raise NotImplementedError("model_parallel.partition")


def train_step(
    comm: Comm,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    like: Tensor,
) -> float:
    """Take one optimiser step of a model whose stage r is on rank r.

    Given: `stage` and `optimizer` are this rank's part. The batch is the same on every
    rank, but only the first stage may read `inputs`, and only the last `targets`; for
    the others it says how many samples there are. `like` has the shape and dtype of ONE
    sample of what comes into this stage from the one before; its values mean nothing.

    C1 the weights become what one process would get from the whole model
    C2 returns the loss of the batch, the same number on every rank
    C3 each stage runs once; over each cut: the activations once, their gradient back
    In torch.distributed: torch.distributed.pipelining.PipelineStage; fairscale's Pipe
    Example: 3 samples, like of shape (5,) → receive into a tensor of shape (3, 5)
    Cost: 2(n - 1) messages, and one number. Check: distlab check 2.9
    """
    # TODO(model_parallel.train_step)
    # forward: from whom does x come, and to whom does what you make of it go?
    # backward: torch's tensor.backward(gradient) starts at any tensor of a graph
    raise NotImplementedError("model_parallel.train_step")
