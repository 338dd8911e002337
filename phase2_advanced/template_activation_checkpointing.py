"""Activation checkpointing: compute it a second time instead of keeping it.

Guide: phase2_advanced/guide/activation_checkpointing.md.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
Cost: one forward pass more; kept are the inputs of the blocks, and for a moment the
activations of one block.

    forward    x ─▶ block ─▶ block ─▶ block      each keeps its input, nothing else
    backward             ◀─ again, this time with a graph, then backward through it

A torch.autograd.Function says for itself what forward does and what backward does.
autograd calls `forward` with autograd turned off, and later `backward` with the
gradient of what forward returned; backward returns a gradient for each argument of
forward, or None for an argument that has none. `ctx` is the same object in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

Block = Callable[[Tensor], Tensor]
RandomState = tuple[Tensor, ...]


class Scale(torch.autograd.Function):
    """Multiply by one number on the way forward, by another on the way back.

    Scale.apply(tensor, forward_factor, backward_factor) gives a new tensor.

    C1 forward: the tensor times forward_factor; the caller's tensor is as it was
    C2 backward: the gradient that arrives, times backward_factor, is passed on
    In torch.distributed: the collectives of torch.distributed.nn.functional
    Example: 2 with factors 3 and 5 → 6; its gradient is 5
    Cost: no tensor is kept for backward. Check: distlab check 2.4
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward_factor: float, backward_factor: float
    ) -> Tensor:
        """What `Scale.apply` returns."""
        # TODO(activation_checkpointing.first_function)
        # what must backward know that it is not told? ctx can carry it
        raise NotImplementedError("activation_checkpointing.first_function")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """A gradient, or None, for each argument of forward."""
        # TODO(activation_checkpointing.first_function)
        # forward has three arguments: which of them has a gradient?
        raise NotImplementedError("activation_checkpointing.first_function")


def checkpoint(block: Block, tensor: Tensor) -> Tensor:
    """`block(tensor)`; its activations are computed again when backward needs them."""
    # autograd calls backward only if some argument needs a gradient. The first block's
    # tensor is data, token numbers even, and needs none, though the block's parameters
    # do: hence the anchor.
    anchor = torch.empty(0, requires_grad=True)
    apply: Callable[[Block, Tensor, Tensor], Tensor] = Recompute.apply
    return apply(block, anchor, tensor)


class Recompute(torch.autograd.Function):
    """What `checkpoint` stands on.

    C1 the result and all gradients, of the tensor and of the block's parameters, have
    the bits that block(tensor) and its backward() would give
    C2 also if the block draws random numbers; and whoever draws later, draws the same
    C3 between forward and backward no activation inside the block is kept
    In torch.distributed: torch.utils.checkpoint.checkpoint(block, tensor)
    Example: three blocks, kept are their three inputs
    Cost: the block runs twice. Check: distlab check 2.5
    """

    @staticmethod
    def forward(ctx: Any, block: Block, anchor: Tensor, tensor: Tensor) -> Tensor:
        """What `checkpoint` returns. autograd is turned off in here."""
        # TODO(activation_checkpointing.checkpoint)
        # what will backward need to do it all again? (a tensor: ctx.save_for_backward)
        raise NotImplementedError("activation_checkpointing.checkpoint")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """A gradient, or None, for each argument of forward."""
        # TODO(activation_checkpointing.checkpoint)
        # once more, with torch.enable_grad(), from a tensor that has no past;
        # and the random numbers of forward, not those of now
        raise NotImplementedError("activation_checkpointing.checkpoint")


def random_state() -> RandomState:
    """Where this process is in its random numbers: on the CPU, then on each GPU."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), *gpus


def set_random_state(state: RandomState) -> None:
    """Go to a place that `random_state` has told; the next numbers follow from it."""
    torch.set_rng_state(state[0])
    for number, gpu in enumerate(state[1:]):
        torch.cuda.set_rng_state(gpu, number)


def port(block: Block, tensor: Tensor) -> Tensor:
    """`checkpoint(block, tensor)` in torch's own words, and without its limits.

    C1 the result and all gradients have the bits that block(tensor) and its backward()
    would give, also if the block draws random numbers; and later ones are the same
    C2 torch.autograd.grad gives these gradients too, and writes none into a `.grad`
    C3 between forward and backward no activation inside the block is kept
    In torch.distributed: that is what this is; FSDP2 and pipelining go along with it
    Example: torch.autograd.grad(loss, parameters) after 2.5's is a RuntimeError
    Cost: the block runs twice. Check: distlab check 2.23
    """
    # TODO(activation_checkpointing.port)
    # torch.utils.checkpoint.checkpoint: of its two ways, which one goes through
    # autograd.grad, and gives a first block its gradients though data needs none?
    raise NotImplementedError("activation_checkpointing.port")
