"""Model parallelism: split the layers into stages, one stage per rank.

Guide: phase2_advanced/guide/model_parallel.md.
Source: Y. Huang et al., GPipe (arXiv 1811.06965), section 2.2, for the split.
Symbols: n = comm.world_size; stage r of the n stages is on rank r.
Cost: two messages between neighbors per step; at any time only one rank computes.

    rank 0   layers 0 1   forward ──▶                                    ◀── backward
    rank 1   layers 2 3             forward ──▶               ◀── backward
    rank 2   layers 4                         forward, loss, backward

No rank has the full model, so none can compute its gradient alone. But the chain rule
works across processes, because a stage needs from those behind it only the gradient of
the loss with respect to its own output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]


def partition(costs: Sequence[float], num_stages: int) -> list[list[int]]:
    """Return the layer indices of each stage; layer k costs `costs[k]`, zero or more.

    Every batch goes through all stages, so the most expensive stage is the bottleneck.

    C1 Every layer belongs to exactly one stage, the layers stay in the model's order,
       and no stage is empty.
    C2 The split makes the most expensive stage as cheap as possible.
    C3 `partition` raises ValueError if there are fewer layers than stages, or if
       num_stages is less than 1.
    In torch.distributed: torch.distributed.pipelining leaves the split to you
    Example: costs 1 1 1 5, 2 stages → [0, 1, 2] and [3]
    Cost: no communication. Check: distlab check 2.8
    """
    # TODO(model_parallel.partition)
    # after which layers can the model be split? which of these splits is the best?
    raise NotImplementedError("model_parallel.partition")


def train_step(
    comm: Comm,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    example: Tensor,
) -> float:
    """Take one optimizer step of a model whose stage r is on rank r.

    Given: `stage` and `optimizer` are this rank's. A parameter may be frozen, and the
    stage's output may be non-contiguous. The batch is the same on every rank, but only
    the first stage may read `inputs`, and only the last one `targets`; the others may
    only count the samples. `example` has the shape and dtype of ONE sample that enters
    this stage, and its values don't matter.

    C1 The weights end up the same as if a single process had trained the full model.
    C2 `train_step` returns the loss of the batch. Send it as float64, because it must
       be exactly the same number on every rank.
    C3 Each stage runs only once. Its activations are sent to the next stage once, and
       their gradient comes back once.
    In torch.distributed: torch.distributed.pipelining.PipelineStage
    Example: 3 samples, example of shape (5,) → receive into a tensor of shape (3, 5)
    Cost: 2(n - 1) messages, and one number. Check: distlab check 2.9
    """
    # TODO(model_parallel.train_step)
    # forward: from which rank does x come, and to which rank does the output go?
    # backward: torch's tensor.backward(gradient) starts at any tensor of a graph
    raise NotImplementedError("model_parallel.train_step")
