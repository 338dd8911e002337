"""Tensor parallelism: one layer on several ranks, each with a share of its weights.

Guide: phase2_advanced/guide/tensor_parallel.md.
Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3, for f, g and cuts;
Korthikanti et al. (arXiv 2205.05198), section 4.2.2, for the tokens shared out.
Symbols: `comm` is the group that shares a layer, n = comm.world_size its ranks;
B sequences of T tokens with C channels each; H heads; V tokens in the vocabulary.
Cost: counted in collectives per block and direction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import Comm, ReduceOp

Passage = Callable[[Comm, Tensor], Tensor]
"""A way into the ranks' shares of a layer, or out of them; autograd knows it."""

# ── 2.15 who works with whom ────────────────────────────────────────────────────────


class Mesh(NamedTuple):
    """A rank's two groups."""

    tensor: Comm  # the ranks that have one model together, a share each
    data: Comm  # the ranks with the same share as this one, for other samples


def coordinates(rank: int, tensor_size: int) -> tuple[int, int]:
    """Where a rank stands: (which model, which share of it).

    Neighbors share a model: ranks 0 … tensor_size - 1 have model 0, and so on.

    Example: tensor_size = 2, ranks 0, 1, 2, 3 → (0, 0), (0, 1), (1, 0), (1, 1)
    Cost: nothing is sent. Check: distlab check 2.15
    """
    ### BEGIN SOLUTION tensor_parallel.mesh
    #| how many whole models lie before this rank? and how many ranks of its own?
    return rank // tensor_size, rank % tensor_size
    ### END SOLUTION


def make_mesh(comm: Comm, tensor_size: int) -> Mesh:
    """This rank's groups: `tensor` are the ranks of its model, `data` of its share.

    `comm.new_group(ranks)` is a collective: all ranks of `comm` call it with the same
    list. It gives a Comm in the order of the list, and None to ranks not on it.

    C1 coordinates: neighbors share a model
    C2 each rank's two groups, with their ranks in rising order
    C3 every rank makes the same groups, each once, in the same order
    C4 ValueError if tensor_size does not divide the ranks; nothing is sent
    In torch.distributed: init_device_mesh("cpu", (data_size, tensor_size))
    Example: 4 ranks, tensor_size = 2: rank 1 has tensor = 0, 1 and data = 1, 3
    Cost: a new_group for each group that there is. Check: distlab check 2.15
    """
    ### BEGIN SOLUTION tensor_parallel.mesh
    #| which groups are there in all? a rank also helps to make those it is not in
    n = comm.world_size
    if n % tensor_size:
        raise ValueError(f"{n} ranks cannot form groups of {tensor_size}")
    model, share = coordinates(comm.rank, tensor_size)
    table = torch.arange(n).view(-1, tensor_size)  # a row per model
    tensor = [comm.new_group(row.tolist()) for row in table][model]
    data = [comm.new_group(column.tolist()) for column in table.T][share]
    assert tensor
    assert data
    return Mesh(tensor=tensor, data=data)
    ### END SOLUTION


# ── 2.16 the way in and the way out: f and g ────────────────────────────────────────


class CopyToGroup(torch.autograd.Function):
    """f, the way in: all ranks have the same x, and each will use it for its share.

    C1 CopyToGroup: x as it is; backward, the sum of all ranks' gradients
    C2 ReduceFromGroup: the sum of all ranks' x; backward, the gradient as it is
    C3 what the caller handed in is as it was: x, and the gradient too
    C4 an all_reduce where there is something to sum, and no other message
    In torch.distributed: DTensor does it, from Replicate to Partial and back
    Example: n = 2, gradients 3 and 4 → 7 and 7
    Cost: one all_reduce in one direction of two. Check: distlab check 2.16
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """x; what `ctx` is given here it still has in backward()."""
        ### BEGIN SOLUTION tensor_parallel.copy_reduce
        #| what does backward() need?
        ctx.comm = comm
        return x
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradients of comm and of x, in this order; a comm has none: None."""
        ### BEGIN SOLUTION tensor_parallel.copy_reduce
        #| x went into every rank's share: what does the loss owe to it in all?
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return None, total
        ### END SOLUTION


class ReduceFromGroup(torch.autograd.Function):
    """g, the way out: each rank has a summand, and all of them will use the sum."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in a tensor of its own."""
        ### BEGIN SOLUTION tensor_parallel.copy_reduce
        #| autograd watches x: it must not change. And it may not be contiguous
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradients of comm and of x."""
        ### BEGIN SOLUTION tensor_parallel.copy_reduce
        #| all ranks go on with the same sum: what more would one rank's x have caused?
        return None, gradient
        ### END SOLUTION


copy_to_group: Passage = CopyToGroup.apply
"""f as a function of comm and x; collective in backward()."""

reduce_from_group: Passage = ReduceFromGroup.apply
"""g as a function of comm and x; collective in forward()."""

# ── 2.17 a linear layer, cut in one way and in the other ────────────────────────────


class LinearShare(nn.Module):
    """A share of the linear layer `whole`, which is the same on every rank."""

    def __init__(self, comm: Comm, whole: nn.Linear, passage: Passage) -> None:
        super().__init__()
        self.comm, self.passage = comm, passage
        weight, bias = self.cut(whole)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @abstractmethod
    def cut(self, whole: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias, if `whole` has one: contiguous copies."""


class ColumnLinear(LinearShare):
    """A share of the outputs: rank r gives chunk r of them. `passage` is the way in.

    C1 ColumnLinear gives chunk r of the outputs, and keeps no more than it needs
    C2 RowLinear gives the whole outputs on every rank; the bias is in them once
    C3 the gradients are one process's: those of the inputs, the weights, the biases
    C4 ValueError if n does not divide what is to be cut
    In torch.distributed: ColwiseParallel and RowwiseParallel, for parallelize_module
    Example: n = 2, outputs 4: rank 0 gives outputs 0 and 1, rank 1 gives 2 and 3
    Cost: one all_reduce each, in one direction. Check: distlab check 2.17
    """

    def cut(self, whole: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """See LinearShare.cut; a weight is (outputs, inputs)."""
        ### BEGIN SOLUTION tensor_parallel.linears
        #| an output is a row of the weight, and an element of the bias
        n, rank = self.comm.world_size, self.comm.rank
        if whole.out_features % n:
            raise ValueError(f"{whole.out_features} outputs do not fit on {n} ranks")
        weight = whole.weight.detach().chunk(n)[rank].clone()
        if whole.bias is None:
            return weight, None
        return weight, whole.bias.detach().chunk(n)[rank].clone()
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs), the same on every rank, to (…, outputs / n)."""
        ### BEGIN SOLUTION tensor_parallel.linears
        #| in by way of self.passage(self.comm, x); then nn.functional.linear
        x = self.passage(self.comm, x)
        return nn.functional.linear(x, self.weight, self.bias)
        ### END SOLUTION


class RowLinear(LinearShare):
    """A share of the inputs: rank r takes chunk r of them. `passage` is the way out."""

    def cut(self, whole: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """See LinearShare.cut."""
        ### BEGIN SOLUTION tensor_parallel.linears
        #| an input is a column of the weight; which outputs has the bias to do with?
        n, rank = self.comm.world_size, self.comm.rank
        if whole.in_features % n:
            raise ValueError(f"{whole.in_features} inputs do not fit on {n} ranks")
        columns = whole.weight.detach().chunk(n, dim=1)[rank]
        weight = columns.clone(memory_format=torch.contiguous_format)
        return weight, None if whole.bias is None else whole.bias.detach().clone()
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs / n), this rank's chunk, to (…, outputs), the same everywhere."""
        ### BEGIN SOLUTION tensor_parallel.linears
        #| what do this rank's inputs add to the outputs? out by way of self.passage
        outputs = self.passage(self.comm, nn.functional.linear(x, self.weight))
        return outputs if self.bias is None else outputs + self.bias
        ### END SOLUTION


# ── 2.18 a transformer's block ──────────────────────────────────────────────────────


def parallel_mlp(
    comm: Comm,
    mlp: Any,
    enter: Passage = copy_to_group,
    leave: Passage = reduce_from_group,
) -> None:
    """Replace mlp.up and mlp.down, linear layers, by this rank's shares, in place.

    `enter` and `leave` are the way into the whole MLP and the way out of it.

    C1 the outputs, the gradients and the steps of training are one process's
    C2 each rank has an n-th of the weights
    C3 one all_reduce per MLP or attention forward, and one backward
    C4 ValueError if n does not divide the heads; nothing is sent, nothing replaced
    In torch.distributed: parallelize_module(mlp, mesh, {"up": ColwiseParallel(), …})
    Cost: 2 all_reduces of B · T · C numbers. Check: distlab check 2.18
    """
    ### BEGIN SOLUTION tensor_parallel.block
    #| which of the two is cut in which way, so that nothing is sent between them?
    mlp.up = ColumnLinear(comm, mlp.up, enter)
    mlp.down = RowLinear(comm, mlp.down, leave)
    ### END SOLUTION


def parallel_attention(
    comm: Comm,
    attention: Any,
    enter: Passage = copy_to_group,
    leave: Passage = reduce_from_group,
) -> None:
    """Replace attention.qkv and attention.proj by this rank's shares, in place.

    A rank has whole heads, an n-th of attention.num_heads. The rows of qkv are all
    queries, then all keys, then all values; each of the three, as the inputs of proj,
    head by head. How many heads there are attention reads off what qkv gives it.

    Example: n = 2, H = 4: rank 0 has the queries, keys and values of heads 0 and 1
    Cost: 2 all_reduces of B · T · C numbers. Check: distlab check 2.18
    """
    ### BEGIN SOLUTION tensor_parallel.block
    #| which rows of qkv does this rank need? do they lie in one piece?
    n, whole = comm.world_size, attention.qkv
    if attention.num_heads % n:
        raise ValueError(f"{attention.num_heads} heads do not fit on {n} ranks")
    rows = torch.arange(whole.out_features, device=whole.weight.device)
    rank_by_rank = rows.unflatten(0, (3, n, -1)).transpose(0, 1).flatten()
    for parameter in whole.parameters():
        parameter.data = parameter.data[rank_by_rank]
    attention.qkv = ColumnLinear(comm, whole, enter)
    attention.proj = RowLinear(comm, attention.proj, leave)
    ### END SOLUTION


# ── 2.19 the loss, without all the logits in one place ──────────────────────────────


def vocab_loss(comm: Comm, logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens, the same on every rank.

    `logits` (N, V / n) are this rank's columns: rank r has tokens r · V / n and on.
    `targets` (N,) are numbers from 0 to V - 1, the same on every rank.

    C1 the loss is one process's, for large logits too
    C2 the gradient of this rank's logits is one process's
    C3 what is sent grows with N, not with V
    In torch.distributed: loss_parallel(), around cross_entropy of a sharded DTensor
    Example: n = 2, V = 4: target 2 is column 0 on rank 1, and nothing on rank 0
    Cost: two or three all_reduces of N numbers. Check: distlab check 2.19
    """
    ### BEGIN SOLUTION tensor_parallel.vocab_loss
    #| cross-entropy: log of the sum of exp(logit), minus the target's logit.
    #| subtract the largest logit of all first: exp(1000) is infinite.
    #| which rank knows the target's logit? what do the others add?
    largest = logits.detach().amax(1)
    comm.all_reduce(largest, ReduceOp.MAX)
    shifted = logits - largest[:, None]
    num_columns = logits.shape[1]
    column = targets - comm.rank * num_columns
    elsewhere = (column < 0) | (column >= num_columns)
    picked = shifted.gather(1, column.masked_fill(elsewhere, 0)[:, None])[:, 0]
    summands = [shifted.exp().sum(1), picked.masked_fill(elsewhere, 0.0)]
    total, target = reduce_from_group(comm, torch.stack(summands))
    loss: Tensor = (total.log() - target).mean()
    return loss
    ### END SOLUTION


# ── 2.20 the tokens between the blocks, shared out as well ──────────────────────────


def all_gather_tokens(comm: Comm, x: Tensor) -> Tensor:
    """(B, T / n, C), rank r's tokens, to (B, T, C), all tokens on every rank.

    C1 all_gather_tokens and reduce_scatter_tokens: along the tokens, in their order
    C2 backward, each does what the other one does forward
    C3 sum_whole_gradients: after it all gradients of a block are one process's
    C4 per MLP or attention and direction one all_gather, one reduce_scatter, no more
    In torch.distributed: SequenceParallel(), beside the other two
    Cost: the bytes of an all_reduce, in two halves. Check: distlab check 2.20
    """
    ### BEGIN SOLUTION tensor_parallel.sequence
    #| comm.all_gather(output, input) puts the ranks' inputs one after another:
    #| is that the order of a (B, T, C)?
    n = comm.world_size
    output = x.new_empty(n, *x.shape)
    comm.all_gather(output, x.contiguous())
    return output.transpose(0, 1).flatten(1, 2)
    ### END SOLUTION


def reduce_scatter_tokens(comm: Comm, x: Tensor) -> Tensor:
    """(B, T, C), a summand, to (B, T / n, C): this rank's tokens of the sum."""
    ### BEGIN SOLUTION tensor_parallel.sequence
    #| comm.reduce_scatter(output, input): chunk r of the input must be rank r's tokens
    chunks = x.unflatten(1, (comm.world_size, -1)).transpose(0, 1).contiguous()
    output = torch.empty_like(chunks[0])
    comm.reduce_scatter(output, chunks)
    return output
    ### END SOLUTION


class GatherTokens(torch.autograd.Function):
    """The way in, for tokens that are shared out: f is now an all_gather."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """(B, T / n, C) to (B, T, C)."""
        ctx.comm = comm
        return all_gather_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradients of comm and of x."""
        ### BEGIN SOLUTION tensor_parallel.sequence
        #| every rank used all tokens: who has a part of what this rank's tokens get?
        return None, reduce_scatter_tokens(ctx.comm, gradient)
        ### END SOLUTION


class ScatterTokens(torch.autograd.Function):
    """The way out, to shared-out tokens: g is now a reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T / n, C)."""
        ctx.comm = comm
        return reduce_scatter_tokens(comm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradients of comm and of x."""
        ### BEGIN SOLUTION tensor_parallel.sequence
        #| this rank's x had a part in all tokens: who has their gradients?
        return None, all_gather_tokens(ctx.comm, gradient)
        ### END SOLUTION


gather_tokens: Passage = GatherTokens.apply
scatter_tokens: Passage = ScatterTokens.apply


def sequence_block(comm: Comm, block: Any) -> None:
    """Make `block` take and give this rank's tokens, (B, T / n, C), in place."""
    parallel_attention(comm, block.attention, gather_tokens, scatter_tokens)
    parallel_mlp(comm, block.mlp, gather_tokens, scatter_tokens)


def sum_whole_gradients(comm: Comm, block: Any) -> None:
    """Sum the gradients that each rank has for its own tokens only, in place.

    Given: `block` went through sequence_block(), and backward() has run.
    """
    ### BEGIN SOLUTION tensor_parallel.sequence
    #| which parameters does every rank have whole, and use for its own tokens only?
    whole = [*block.norm1.parameters(), *block.norm2.parameters()]
    whole += [block.attention.proj.bias, block.mlp.down.bias]
    for parameter in whole:
        comm.all_reduce(parameter.grad)
    ### END SOLUTION


# ── 2.25 torch's own words ──────────────────────────────────────────────────────────


def port(mesh: Any, block: Any) -> None:
    """Cut a whole block as in 2.18, in place, by torch alone: there is no comm here.

    Given: `mesh`, a torch DeviceMesh of one dimension, mesh.size() ranks; `block`, the
    same on every rank, of which attention.qkv, attention.proj, mlp.up and mlp.down are
    to be cut. The rows of qkv, and the rest, are as in 2.18.

    C1 the outputs, the gradients and the steps of training are one process's
    C2 each rank has an n-th of each of the four weights
    C3 ValueError if n does not divide the heads; nothing is replaced
    In torch.distributed: that is what this is
    Example: block.mlp.up.weight is a DTensor then; its to_local() has an n-th
    Cost: 4 all_reduces of B · T · C numbers, as in 2.18. Check: distlab check 2.25
    """
    ### BEGIN SOLUTION tensor_parallel.port
    #| torch.distributed.tensor.parallel: parallelize_module(block, mesh, plan), and a
    #| plan is {"name.of.layer": ColwiseParallel() or RowwiseParallel()}.
    #| it cuts a weight in n pieces, as it lies. Where is that wrong?
    from torch.distributed.tensor import parallel

    n, attention = mesh.size(), block.attention
    if attention.num_heads % n:
        raise ValueError(f"{attention.num_heads} heads do not fit on {n} ranks")
    rows = torch.arange(attention.qkv.out_features)
    rank_by_rank = rows.unflatten(0, (3, n, -1)).transpose(0, 1).flatten()
    for parameter in attention.qkv.parameters():
        parameter.data = parameter.data[rank_by_rank]
    plan = {
        "attention.qkv": parallel.ColwiseParallel(),
        "attention.proj": parallel.RowwiseParallel(),
        "mlp.up": parallel.ColwiseParallel(),
        "mlp.down": parallel.RowwiseParallel(),
    }
    parallel.parallelize_module(block, mesh, plan)
    ### END SOLUTION
