"""Tensor parallelism: each rank holds a shard of every layer's weights.

Guide: phase2_advanced/guide/tensor_parallel.md.
Source: Megatron-LM (arXiv 1909.08053), section 3; (arXiv 2205.05198), section 4.2.2.
Symbols: n ranks, r this one; B samples, T tokens, C channels. Cost: in collectives.

For attention or an MLP, these are the shapes of activations and gradients on one rank.
Before f and after g, a rank has all tokens (FULL) or only its own (SEQUENCE).

                  norm             f           layers           g           addition
    FULL
      forward    (B,T,C)  ────── copy ───────▶ (B,T,C) ─── all_reduce ────▶  (B,T,C)
      backward   (B,T,C)  ◀─── all_reduce ──── (B,T,C) ◀────── copy ───────  (B,T,C)
    SEQUENCE
      forward   (B,T/n,C) ─── all_gather ────▶ (B,T,C) ─ reduce_scatter ──▶ (B,T/n,C)
      backward  (B,T/n,C) ◀─ reduce_scatter ── (B,T,C) ◀─── all_gather ──── (B,T/n,C)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm, ReduceOp
from distlab.given import tensor_parallel as given
from distlab.given.tensor_parallel import Mesh, Operators, reordered


def coordinates(rank: int, tensor_size: int) -> tuple[int, int]:
    """Return (model replica, shard), the row and column: 3 → (1, 1) with rows of 2."""
    # TODO(tensor_parallel.mesh)
    # how many full replicas come before this rank? which shard has it?
    raise NotImplementedError("tensor_parallel.mesh")


def make_mesh(comm: Comm, tensor_size: int) -> Mesh:
    """Make this rank's groups: `tensor` is its row of the mesh, `data` its column.

    comm.new_group(ranks) is a collective of `comm`; it returns None to other ranks.
    C1 The coordinates put neighboring ranks into the same model replica.
    C2 Each rank gets its two groups, and each group lists its ranks in ascending order.
    C3 All ranks create the same groups in the same order, and create each group only
       once.
    C4 `make_mesh` raises ValueError before it sends anything, unless tensor_size is
       positive and divides the world size.
    In torch.distributed: init_device_mesh. Check: distlab check 2.15
    """
    # TODO(tensor_parallel.mesh)
    # list all groups of the mesh; a rank must also call new_group for the others
    raise NotImplementedError("tensor_parallel.mesh")


class CopyToRegion(torch.autograd.Function):
    """Run f: every rank has the same x, and each will use it with its shard.

    C1 CopyToRegion (f) returns x in the forward pass. In the backward pass, it returns
       the sum of the gradients over all ranks.
    C2 ReduceFromRegion (g) returns the sum of x over all ranks in the forward pass. In
       the backward pass, it returns the gradient unchanged.
    C3 Neither function modifies x or the gradient in place.
    C4 Each sum takes a single all_reduce, and no other messages are sent.
    In torch.distributed: DTensor, from Replicate to Partial. Check: distlab check 2.16
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Return x. Attributes set on `ctx` are available in backward()."""
        # TODO(tensor_parallel.copy_reduce)
        # what does backward() need?
        raise NotImplementedError("tensor_parallel.copy_reduce")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradients of comm, which is None, and of x, in this order."""
        # TODO(tensor_parallel.copy_reduce)
        # every rank's shard used x: what is the total gradient of x?
        raise NotImplementedError("tensor_parallel.copy_reduce")


class ReduceFromRegion(torch.autograd.Function):
    """Run g: each rank has a partial sum, and every rank will use the total."""

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


FULL = Operators(before=CopyToRegion.apply, after=ReduceFromRegion.apply)
copy_to_region, reduce_from_region = FULL  # functions of comm and x


class ColumnParallelLinear(given.ParallelLinear):
    """Computes chunk r of the outputs on rank r; applies `operator` to the input.

    C1 On rank r, ColumnParallelLinear returns chunk r of the outputs and stores only
       the weights that it needs for this chunk.
    C2 RowParallelLinear returns the full outputs on every rank, and adds the bias only
       once.
    C3 The gradients of inputs, weights and biases match the single-process baseline.
    C4 Both layers raise ValueError if the dimension that they shard isn't divisible by
       n.
    In torch.distributed: ColwiseParallel, RowwiseParallel. Check: distlab check 2.17
    """

    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Copy this rank's weight and bias; a weight is (outputs, inputs)."""
        # TODO(tensor_parallel.linears)
        # one output is one row of the weight and one element of the bias
        raise NotImplementedError("tensor_parallel.linears")

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs), the same on every rank, to (…, outputs / n)."""
        # TODO(tensor_parallel.linears)
        # apply self.operator(self.comm, x) first; then nn.functional.linear
        raise NotImplementedError("tensor_parallel.linears")


class RowParallelLinear(given.ParallelLinear):
    """Takes chunk r of the inputs on rank r; applies `operator` to the result."""

    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Copy this rank's weight and bias (None without one), contiguously."""
        # TODO(tensor_parallel.linears)
        # one input is one column of the weight; to which outputs does the bias belong?
        raise NotImplementedError("tensor_parallel.linears")

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs / n), this rank's chunk, to all outputs on every rank."""
        # TODO(tensor_parallel.linears)
        # this rank's inputs give a partial sum; self.operator gives the total
        raise NotImplementedError("tensor_parallel.linears")


def parallel_mlp(comm: Comm, mlp: Any, operators: Operators = FULL) -> None:
    """Replace the linear layers mlp.up and mlp.down by this rank's shards, in place.

    C1 Outputs, gradients and training steps match the single-process baseline.
    C2 Each rank stores only 1/n of the weights.
    C3 An MLP or an attention layer needs one all_reduce in the forward pass and one in
       the backward pass.
    C4 If the number of attention heads isn't divisible by n, `parallel_attention`
       raises ValueError before it sends or replaces anything.
    In torch.distributed: parallelize_module, as in 2.25. Check: distlab check 2.18
    """
    # TODO(tensor_parallel.block)
    # which layer is sharded in which way, so that nothing is sent between them?
    raise NotImplementedError("tensor_parallel.block")


def parallel_attention(comm: Comm, attention: Any, operators: Operators = FULL) -> None:
    """Replace attention.qkv and attention.proj by this rank's shards, in place.

    Each rank computes 1/n of the heads, but attention.num_heads stays. The rows of qkv
    are all queries, then all keys, then all values, head by head in each third, like
    the inputs of proj. reordered(layer, rows) returns a copy with its rows reordered.
    """
    # TODO(tensor_parallel.block)
    # which rows of qkv does this rank need? are they adjacent?
    raise NotImplementedError("tensor_parallel.block")


def vocab_parallel_cross_entropy(comm: Comm, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, the same on every rank.

    `logits` (tokens, V / n) begin at column r · V / n; `targets` (tokens,) are below V.
    C1 The loss matches the single-process baseline, even if some logits are very large
       or -inf.
    C2 The gradient of this rank's logits matches the single-process baseline.
    C3 The number of elements that a rank sends grows with the number of tokens, but not
       with the size of the vocabulary.
    In torch.distributed: loss_parallel(). Check: distlab check 2.19
    """
    # TODO(tensor_parallel.vocab_loss)
    # cross-entropy: log of the sum of exp(logit), minus the target's logit.
    # subtract the largest logit of all ranks first: exp(1000) is infinite.
    # which rank has the target's logit? what do the other ranks add?
    raise NotImplementedError("tensor_parallel.vocab_loss")


def all_gather_tokens(comm: Comm, x: Tensor) -> Tensor:
    """Gather (B, T / n, C) to (B, T, C) on every rank; B may be 0.

    C1 all_gather_tokens and reduce_scatter_tokens work along the token dimension, in
       rank order.
    C2 The backward pass of each operator is the forward pass of the other one.
    C3 After all_reduce_replicated_grads, all gradients of a block match the
       single-process baseline.
    C4 An MLP or an attention layer needs one all_gather and one reduce_scatter in each
       direction.
    In torch.distributed: SequenceParallel(). Check: distlab check 2.20
    """
    # TODO(tensor_parallel.sequence)
    # comm.all_gather joins the inputs in memory: is that the order of (B, T, C)?
    raise NotImplementedError("tensor_parallel.sequence")


def reduce_scatter_tokens(comm: Comm, x: Tensor) -> Tensor:
    """Sum (B, T, C) over the ranks; return this rank's tokens of it, (B, T / n, C)."""
    # TODO(tensor_parallel.sequence)
    # comm.reduce_scatter(output, input): chunk r of the input must be rank r's tokens
    raise NotImplementedError("tensor_parallel.sequence")


class AllGatherFromSequence(torch.autograd.Function):
    """Run f for sharded tokens: gather the tokens that the next layer needs."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Return all tokens, (B, T, C)."""
        ctx.comm = comm
        return all_gather_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return None for comm, and the gradient of x, (B, T / n, C)."""
        # TODO(tensor_parallel.sequence)
        # every rank used this rank's tokens: where are the terms of their gradient?
        raise NotImplementedError("tensor_parallel.sequence")


class ReduceScatterToSequence(torch.autograd.Function):
    """Run g for sharded tokens: sum the partial sums, and keep this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, (B, T / n, C)."""
        ctx.comm = comm
        return reduce_scatter_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return None for comm, and the gradient of x, (B, T, C)."""
        # TODO(tensor_parallel.sequence)
        # this rank's partial sum went into all tokens: which ranks have the gradients?
        raise NotImplementedError("tensor_parallel.sequence")


SEQUENCE = Operators(
    before=AllGatherFromSequence.apply, after=ReduceScatterToSequence.apply
)
all_gather_from_sequence, reduce_scatter_to_sequence = SEQUENCE


def all_reduce_replicated_grads(comm: Comm, block: Any) -> None:
    """Sum gradients of local tokens, if any, in place after SEQUENCE's backward()."""
    # TODO(tensor_parallel.sequence)
    # which parameters does every rank have in full, and apply to its tokens only?
    raise NotImplementedError("tensor_parallel.sequence")


def with_torch(mesh: Any, block: Any) -> None:
    """Shard a block as in 2.18, in place, with torch alone and without comm.

    `mesh` is a one-dimensional torch DeviceMesh, perhaps of a part of all ranks.
    C1 Outputs, gradients and training steps match the single-process baseline.
    C2 The block has four weights, and each rank stores only 1/n of each of them.
    C3 If the number of heads isn't divisible by n, `with_torch` raises ValueError
       before it replaces anything.
    In torch.distributed: already plain torch. Check: distlab check 2.25
    """
    # TODO(tensor_parallel.port)
    # torch.distributed.tensor.parallel: parallelize_module(block, mesh, plan), and a
    # plan is {"name.of.layer": ColwiseParallel() or RowwiseParallel()}.
    # it splits a weight into n contiguous chunks. For which layer is that wrong?
    raise NotImplementedError("tensor_parallel.port")
