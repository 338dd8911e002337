"""Attention and MLP of the small transformer in one process."""

from __future__ import annotations

from typing import Any

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
        module: Any = getattr(freeze(make_block(seed, n), n), name)
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
