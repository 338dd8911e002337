"""Attention and MLP of the small transformer in one process, and cut in known ways."""

from __future__ import annotations

import copy
from functools import cached_property

import torch
from torch import Tensor, nn

from distlab.grading.checks.tensor_parallel.shared import drawn
from distlab.grading.kit.again import turned
from distlab.grading.verdict import NotYetError
from distlab.models.transformer import Block, TransformerConfig
from distlab.runner import Run

SEQUENCES, TOKENS, HEAD_DIM = 2, 3, 2
STEPS = 2
LEARNING_RATE = 0.05
FROZEN_AT = 2
FROZEN = (
    "attention.qkv.weight",
    "attention.proj.bias",
    "mlp.up.bias",
    "mlp.down.weight",
)


def heads_of(seed: int) -> int:
    """How many heads a rank has: more the first time, see kit/again.py."""
    return turned((2, 3), seed)[0]


def make_block(seed: int, n: int, heads: int | None = None) -> Block:
    """A block with `heads` heads per rank; all weights drawn, the norms' too."""
    heads = heads or heads_of(seed)
    config = TransformerConfig(dim=heads * n * HEAD_DIM, num_heads=heads * n)
    block = Block(config).double()
    for place, parameter in enumerate(block.parameters()):
        values = drawn(seed + place, -8, *parameter.shape)
        parameter.data = 0.4 * values if parameter.dim() > 1 else 0.7 + values
    return block


def freeze(block: nn.Module, n: int) -> nn.Module:
    """With two shards, some weights and biases do not learn."""
    for name in FROZEN if n == FROZEN_AT else ():
        block.get_parameter(name).requires_grad_(False)
    return block


def learning_of(block: nn.Module) -> dict[str, bool]:
    """Of each that is frozen somewhere: whether it learns."""
    parameters = dict(block.named_parameters())
    return {n: parameters[n].requires_grad for n in FROZEN if n in parameters}


def expect_frozen(run: Run, n: int) -> None:
    """What was frozen still is.

    Raises:
        NotYetError: it is not.
    """
    freed = {
        rank: ", ".join(name for name, learns in value["learning"].items() if learns)
        for rank, value in enumerate(run.values)
    }
    if n == FROZEN_AT and any(freed.values()):
        rank = next(rank for rank, names in freed.items() if names)
        raise NotYetError(
            f"{freed[rank].partition(',')[0]} was frozen, but rank {rank}'s shard "
            "requires a gradient, expected it to stay frozen",
            evidence=[
                (rank, "trainable", names) for rank, names in freed.items() if names
            ],
            rule="requires_grad of a shard is that of the weight it is a part of",
        )


def channels(seed: int, n: int) -> int:
    """C of that block."""
    return heads_of(seed) * n * HEAD_DIM


def inputs_of(seed: int, n: int, step: int) -> Tensor:
    """What goes in at a step, the same on every rank."""
    return drawn(seed + 100 * step, -9, SEQUENCES, TOKENS, channels(seed, n))


def upstream_of(seed: int, n: int, step: int) -> Tensor:
    """The gradient of what comes out."""
    return drawn(seed + 100 * step, -10, SEQUENCES, TOKENS, channels(seed, n))


class Whole:
    """One of the two, trained in one process: outputs and input gradients by step."""

    def __init__(self, seed: int, n: int, name: str) -> None:
        self.seed, self.n, self.name = seed, n, name
        self.first: nn.Module = getattr(freeze(make_block(seed, n), n), name)
        last = self.first.proj if name == "attention" else self.first.down
        self.constant: Tensor = last.bias.detach().clone()
        module = copy.deepcopy(self.first)
        self.outs: list[Tensor] = []
        self.backs: list[Tensor] = []
        for step in range(STEPS):
            x = inputs_of(seed, n, step).requires_grad_()
            out = module(x)
            out.backward(upstream_of(seed, n, step))
            self.outs.append(out.detach())
            self.backs.append(x.grad)  # type: ignore[arg-type]
            with torch.no_grad():
                for parameter in filter(lambda p: p.requires_grad, module.parameters()):
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None

    @cached_property
    def rows(self) -> list[Tensor]:
        """The rows of the first layer that each rank has, if it has whole heads."""
        size = channels(self.seed, self.n)
        if self.name == "mlp":
            return list(torch.arange(4 * size).chunk(self.n))
        table = torch.arange(3 * size).view(3, self.n, -1)
        return [table[:, rank].flatten() for rank in range(self.n)]

    def cut_across(self, x: Tensor | None = None) -> Tensor:
        """The sum of what the ranks give if qkv is cut as one piece.

        For these inputs; without any, for those of the first step.
        """
        pieces = torch.arange(3 * channels(self.seed, self.n)).chunk(self.n)
        x = inputs_of(self.seed, self.n, 0) if x is None else x
        parts = [self._share(rank, rows)(x) for rank, rows in enumerate(pieces)]
        return (torch.stack(parts).sum(0) + self.constant).detach()

    def bias_as_it_was(self) -> Tensor:
        """The sum if the rows of qkv are cut head by head, and its bias in a piece."""
        pieces = torch.arange(3 * channels(self.seed, self.n)).chunk(self.n)
        x = inputs_of(self.seed, self.n, 0)
        ranks = zip(range(self.n), self.rows, pieces, strict=True)
        parts = [self._share(*one)(x) for one in ranks]
        return (torch.stack(parts).sum(0) + self.constant).detach()

    def head_by_head(self) -> Tensor:
        """The sum if a rank has the queries, keys and values of one head, then more."""
        size = channels(self.seed, self.n)
        table = torch.arange(3 * size).view(3, self.n, -1, HEAD_DIM)
        x = inputs_of(self.seed, self.n, 0)
        parts = [
            self._share(rank, table[:, rank].transpose(0, 1).flatten())(x)
            for rank in range(self.n)
        ]
        return (torch.stack(parts).sum(0) + self.constant).detach()

    def partial_backs(self) -> list[Tensor]:
        """Each rank's part of the input gradient at the first step."""
        found = []
        for rank, rows in enumerate(self.rows):
            x = inputs_of(self.seed, self.n, 0).requires_grad_()
            self._share(rank, rows)(x).backward(upstream_of(self.seed, self.n, 0))
            found.append(x.grad)
        return found  # type: ignore[return-value]

    def _share(
        self, rank: int, rows: Tensor, elements: Tensor | None = None
    ) -> nn.Module:
        """A copy with these rows of the first layer, and no last bias.

        `elements` are those of the first layer's bias; without them, the rows.
        """
        share = copy.deepcopy(self.first)
        names = ("qkv", "proj") if self.name == "attention" else ("up", "down")
        first, last = (getattr(share, name) for name in names)
        columns = last.weight.chunk(self.n, 1)[rank]
        bias = first.bias[rows if elements is None else elements]
        first.weight = nn.Parameter(first.weight[rows].detach())
        first.bias = nn.Parameter(bias.detach())
        last.weight = nn.Parameter(columns.detach().contiguous())
        last.bias = nn.Parameter(torch.zeros_like(last.bias))
        return share
