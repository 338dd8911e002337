"""Tensor parallelism: each rank holds a shard of every layer's weights.

Guide: phase2_advanced/guide/tensor_parallel.md.
Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; for sequence
parallelism Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
Symbols: `comm` is the tensor-parallel group, n = comm.world_size, r = comm.rank.
Shapes are (batch, tokens, channels).
Cost: counted in collectives per block and direction.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import Comm, ReduceOp

RegionOperator = Callable[[Comm, Tensor], Tensor]
"""What stands before or after a sharded layer: communication with a backward."""

# ── 2.15 the process groups of a device mesh ────────────────────────────────────────


class Mesh(NamedTuple):
    """The two process groups of a rank."""

    tensor: Comm  # the ranks that hold one model replica together, a shard each
    data: Comm  # the ranks that hold the same shard, and train on other samples


def coordinates(rank: int, tensor_size: int) -> tuple[int, int]:
    """The rank's row and column in the mesh: (model replica, shard).

    Neighboring ranks share a replica: ranks 0 … tensor_size - 1 hold replica 0.

    Example: tensor_size = 2, ranks 0, 1, 2, 3 → (0, 0), (0, 1), (1, 0), (1, 1)
    Cost: no message. Check: distlab check 2.15
    """
    # TODO(tensor_parallel.mesh)
    # how many full replicas come before this rank? which shard has it?
    raise NotImplementedError("tensor_parallel.mesh")


def make_mesh(comm: Comm, tensor_size: int) -> Mesh:
    """This rank's groups: `tensor` is its row of the mesh, `data` its column.

    `comm.new_group(ranks)` is a collective: every rank of `comm` must call it with the
    same list. It returns a Comm in the order of the list, or None to other ranks.

    C1 coordinates: neighboring ranks share a model replica
    C2 each rank's two groups, with their ranks in ascending order
    C3 every rank creates the same groups, each once, in the same order
    C4 ValueError if tensor_size does not divide the world size; nothing is sent
    In torch.distributed: init_device_mesh("cpu", (data_size, tensor_size))
    Example: 4 ranks, tensor_size = 2: rank 1 has tensor = 0, 1 and data = 1, 3
    Cost: one new_group for each row and each column. Check: distlab check 2.15
    """
    # TODO(tensor_parallel.mesh)
    # list all groups of the mesh; a rank must also call new_group for the others
    raise NotImplementedError("tensor_parallel.mesh")


# ── 2.16 f and g: custom autograd functions that communicate ────────────────────────


class CopyToRegion(torch.autograd.Function):
    """f: every rank has the same x, and each rank will use it with its shard.

    C1 CopyToRegion: forward returns x; backward returns the sum of all gradients
    C2 ReduceFromRegion: forward returns the sum of all x; backward the gradient
    C3 arguments are not modified: neither x nor the gradient
    C4 one all_reduce where there is a sum, and no other message
    In torch.distributed: DTensor redistributes from Replicate to Partial and back
    Example: n = 2, gradients 3 and 4 → 7 and 7
    Cost: one all_reduce, in one of the two directions. Check: distlab check 2.16
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Return x. Attributes set on `ctx` are available in backward()."""
        # TODO(tensor_parallel.copy_reduce)
        # what does backward() need?
        raise NotImplementedError("tensor_parallel.copy_reduce")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradients of comm and of x, in this order; comm has none: None."""
        # TODO(tensor_parallel.copy_reduce)
        # every rank's shard used x: what is the total gradient of x?
        raise NotImplementedError("tensor_parallel.copy_reduce")


class ReduceFromRegion(torch.autograd.Function):
    """g: each rank has a partial sum, and every rank will use the total."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x in a new tensor."""
        # TODO(tensor_parallel.copy_reduce)
        # do not modify x: autograd may need it. x may be non-contiguous
        raise NotImplementedError("tensor_parallel.copy_reduce")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradients of comm and of x."""
        # TODO(tensor_parallel.copy_reduce)
        # the total is the same on every rank: what is d total / d x?
        raise NotImplementedError("tensor_parallel.copy_reduce")


copy_to_region: RegionOperator = CopyToRegion.apply
"""f as a function of comm and x; communicates in backward()."""

reduce_from_region: RegionOperator = ReduceFromRegion.apply
"""g as a function of comm and x; communicates in forward()."""

# ── 2.17 column-parallel and row-parallel linear layers ─────────────────────────────


class ParallelLinear(nn.Module):
    """A shard of the linear layer `full`, which is the same on every rank.

    A frozen weight or bias stays frozen.
    """

    def __init__(self, comm: Comm, full: nn.Linear, operator: RegionOperator) -> None:
        super().__init__()
        self.comm, self.operator = comm, operator
        weight, bias = self.shard(full)
        self.weight = nn.Parameter(weight, full.weight.requires_grad)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias, full.bias.requires_grad)

    @abstractmethod
    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias (None without one), as contiguous copies."""


class ColumnParallelLinear(ParallelLinear):
    """Rank r computes chunk r of the outputs. `operator` is applied to the input.

    C1 ColumnParallelLinear returns chunk r of the outputs and stores no more weights
    C2 RowParallelLinear returns all outputs on every rank, with the bias added once
    C3 the gradients of inputs, weights and biases equal the single-process baseline
    C4 ValueError if n does not divide the dimension that is sharded
    In torch.distributed: ColwiseParallel and RowwiseParallel, for parallelize_module
    Example: n = 2, 4 outputs: rank 0 computes outputs 0 and 1, rank 1 outputs 2 and 3
    Cost: one all_reduce each, in one direction. Check: distlab check 2.17
    """

    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """See ParallelLinear.shard; a weight has the shape (outputs, inputs)."""
        # TODO(tensor_parallel.linears)
        # one output is one row of the weight and one element of the bias
        raise NotImplementedError("tensor_parallel.linears")

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs), the same on every rank, to (…, outputs / n)."""
        # TODO(tensor_parallel.linears)
        # apply self.operator(self.comm, x) first; then nn.functional.linear
        raise NotImplementedError("tensor_parallel.linears")


class RowParallelLinear(ParallelLinear):
    """Rank r takes chunk r of the inputs. `operator` is applied to the result."""

    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """See ParallelLinear.shard."""
        # TODO(tensor_parallel.linears)
        # one input is one column of the weight; to which outputs does the bias belong?
        raise NotImplementedError("tensor_parallel.linears")

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs / n), this rank's chunk, to all outputs on every rank."""
        # TODO(tensor_parallel.linears)
        # this rank's inputs give a partial sum; self.operator gives the total
        raise NotImplementedError("tensor_parallel.linears")


# ── 2.18 a transformer block ────────────────────────────────────────────────────────


def parallel_mlp(
    comm: Comm,
    mlp: Any,
    input_operator: RegionOperator = copy_to_region,
    output_operator: RegionOperator = reduce_from_region,
) -> None:
    """Replace the linear layers mlp.up and mlp.down by this rank's shards, in place.

    Apply `input_operator` once before the MLP, and `output_operator` once after it.

    C1 outputs, gradients and training steps equal the single-process baseline
    C2 each rank stores 1/n of the weights
    C3 one all_reduce per MLP or attention forward, and one backward
    C4 ValueError if n does not divide the heads; nothing is sent, nothing replaced
    In torch.distributed: parallelize_module(mlp, mesh, {"up": ColwiseParallel(), …})
    Cost: 2 all_reduces of batch · tokens · channels elements. Check: distlab check 2.18
    """
    # TODO(tensor_parallel.block)
    # which layer is sharded in which way, so that nothing is sent between them?
    raise NotImplementedError("tensor_parallel.block")


def parallel_attention(
    comm: Comm,
    attention: Any,
    input_operator: RegionOperator = copy_to_region,
    output_operator: RegionOperator = reduce_from_region,
) -> None:
    """Replace attention.qkv and attention.proj by this rank's shards, in place.

    The replaced layers keep their weights. Frozen weights stay frozen.
    Each rank computes 1/n of the attention.num_heads heads. The rows of qkv are all
    queries, then all keys, then all values. In each third, and in the inputs of proj,
    the channels are ordered by head. Attention infers its heads from qkv's outputs.

    Example: n = 2, 4 heads: rank 0 has the queries, keys and values of heads 0 and 1
    Cost: 2 all_reduces of batch · tokens · channels elements. Check: distlab check 2.18
    """
    # TODO(tensor_parallel.block)
    # which rows of qkv does this rank need? are they adjacent?
    raise NotImplementedError("tensor_parallel.block")


# ── 2.19 cross-entropy of sharded logits ────────────────────────────────────────────


def vocab_parallel_cross_entropy(comm: Comm, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, the same on every rank.

    `logits` (tokens, vocab / n): rank r has the columns from r · vocab / n on.
    `targets` (tokens,): token ids from 0 to vocab - 1, the same on every rank.

    C1 the loss equals the single-process baseline, for large logits too
    C2 the gradient of this rank's logits equals the single-process baseline
    C3 the elements sent grow with the tokens, not with the vocabulary
    In torch.distributed: loss_parallel(), around cross_entropy of a sharded DTensor
    Example: n = 2, vocab = 4: target 2 is column 0 on rank 1 and absent from rank 0
    Cost: two or three all_reduces of one element per token. Check: distlab check 2.19
    """
    # TODO(tensor_parallel.vocab_loss)
    # cross-entropy: log of the sum of exp(logit), minus the target's logit.
    # subtract the largest logit of all ranks first: exp(1000) is infinite.
    # which rank has the target's logit? what do the other ranks add?
    raise NotImplementedError("tensor_parallel.vocab_loss")


# ── 2.20 sequence parallelism: shard the tokens between the blocks ──────────────────


def all_gather_tokens(comm: Comm, x: Tensor) -> Tensor:
    """Gather (batch, tokens / n, channels) to (batch, tokens, channels) on every rank.

    C1 all_gather_tokens, reduce_scatter_tokens: along the tokens, in rank order
    C2 the backward of each operator is the other's forward
    C3 after all_reduce_replicated_grads all gradients of a block equal the baseline's
    C4 per MLP or attention and direction one all_gather and one reduce_scatter
    In torch.distributed: SequenceParallel(), together with the other two styles
    Cost: the bytes of an all_reduce, in two halves. Check: distlab check 2.20
    """
    # TODO(tensor_parallel.sequence)
    # comm.all_gather(output, input) concatenates the ranks' inputs in memory:
    # is that the order of (batch, tokens, channels)?
    raise NotImplementedError("tensor_parallel.sequence")


def reduce_scatter_tokens(comm: Comm, x: Tensor) -> Tensor:
    """Sum (batch, tokens, channels) over the ranks; return this rank's tokens of it."""
    # TODO(tensor_parallel.sequence)
    # comm.reduce_scatter(output, input): chunk r of the input must be rank r's tokens
    raise NotImplementedError("tensor_parallel.sequence")


class AllGatherFromSequence(torch.autograd.Function):
    """f for sharded tokens: forward is an all_gather."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Map (batch, tokens / n, channels) to (batch, tokens, channels)."""
        ctx.comm = comm
        return all_gather_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradients of comm and of x."""
        # TODO(tensor_parallel.sequence)
        # every rank used this rank's tokens: where are the terms of their gradient?
        raise NotImplementedError("tensor_parallel.sequence")


class ReduceScatterToSequence(torch.autograd.Function):
    """g for sharded tokens: forward is a reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Map (batch, tokens, channels) to (batch, tokens / n, channels)."""
        ctx.comm = comm
        return reduce_scatter_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradients of comm and of x."""
        # TODO(tensor_parallel.sequence)
        # this rank's partial sum went into all tokens: which ranks have the gradients?
        raise NotImplementedError("tensor_parallel.sequence")


all_gather_from_sequence: RegionOperator = AllGatherFromSequence.apply
reduce_scatter_to_sequence: RegionOperator = ReduceScatterToSequence.apply


def sequence_parallel_block(comm: Comm, block: Any) -> None:
    """Make `block` take and return (batch, tokens / n, channels), in place."""
    operators = all_gather_from_sequence, reduce_scatter_to_sequence
    parallel_attention(comm, block.attention, *operators)
    parallel_mlp(comm, block.mlp, *operators)


def all_reduce_replicated_grads(comm: Comm, block: Any) -> None:
    """Sum over the ranks, in place, the gradients that come from local tokens only.

    Given: sequence_parallel_block() was applied to `block`, and backward() has run.
    """
    # TODO(tensor_parallel.sequence)
    # which parameters does every rank have in full, and apply to its tokens only?
    raise NotImplementedError("tensor_parallel.sequence")


# ── 2.25 the same with torch ────────────────────────────────────────────────────────


def with_torch(mesh: Any, block: Any) -> None:
    """Shard a block as in 2.18, in place, with torch alone: there is no comm here.

    Given: `mesh`, a one-dimensional torch DeviceMesh of mesh.size() ranks, perhaps a
    part of all ranks, and `block`, the same on every rank. Shard attention.qkv,
    attention.proj, mlp.up and mlp.down. The rows of qkv are ordered as in 2.18. Frozen
    weights stay frozen.

    C1 outputs, gradients and training steps equal the single-process baseline
    C2 each rank stores 1/n of each of the four weights
    C3 ValueError if n does not divide the heads; nothing is replaced
    In torch.distributed: parallelize_module, ColwiseParallel, RowwiseParallel
    Example: block.mlp.up.weight becomes a DTensor; its to_local() is 1/n of it
    Cost: 4 all_reduces of batch · tokens · channels elements. Check: distlab check 2.25
    """
    # TODO(tensor_parallel.port)
    # torch.distributed.tensor.parallel: parallelize_module(block, mesh, plan), and a
    # plan is {"name.of.layer": ColwiseParallel() or RowwiseParallel()}.
    # it splits a weight into n contiguous chunks. For which layer is that wrong?
    raise NotImplementedError("tensor_parallel.port")
