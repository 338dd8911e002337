"""Activation checkpointing: recompute activations in backward instead of keeping them.

Guide: phase2_advanced/guide/activation_checkpointing.md.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
Cost: one more forward pass. Memory: the inputs of all blocks, and during backward the
activations of one block.

    forward    x ─▶ block ─▶ block ─▶ block      keep each block's input, nothing else
    backward             ◀─ run the block again with a graph, then backward through it

A torch.autograd.Function defines its own forward and backward. autograd calls `forward`
without recording a graph, and later `backward` with the gradient of forward's result.
backward returns one value for each argument of forward: a gradient, or None for an
argument that has none. Both get the same `ctx`.
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
    """A custom autograd function with one factor for forward, another for backward.

    Scale.apply(tensor, forward_factor, backward_factor) returns a new tensor.

    C1 `forward` returns tensor * forward_factor without modifying its input.
    C2 `backward` passes on the incoming gradient, multiplied by backward_factor.
    In torch.distributed: the collectives of torch.distributed.nn.functional
    Example: 2 with factors 3 and 5 → 6; its gradient is 5
    Cost: no tensor is saved for backward. Check: distlab check 2.4
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward_factor: float, backward_factor: float
    ) -> Tensor:
        """Return the result of `Scale.apply`."""
        ### BEGIN SOLUTION activation_checkpointing.first_function
        #| backward gets only ctx and a gradient: what else does it need?
        ctx.backward_factor = backward_factor
        return tensor * forward_factor
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return a gradient, or None, for each argument of forward."""
        ### BEGIN SOLUTION activation_checkpointing.first_function
        #| forward has three arguments: which of them have a gradient?
        return gradient * ctx.backward_factor, None, None
        ### END SOLUTION


def checkpoint(block: Block, tensor: Tensor) -> Tensor:
    """Return `block(tensor)`; its activations are recomputed in backward.

    The tensor may need no gradient, may hold integers, may be non-contiguous, and may
    have no samples. Some parameters of the block may be frozen, or all of them.
    """
    # autograd calls backward only if an argument requires a gradient. The input of the
    # first block is data, such as token ids, and requires none, but the parameters of
    # the block do. The anchor is an argument that always requires a gradient.
    anchor = torch.empty(0, requires_grad=True)
    apply: Callable[[Block, Tensor, Tensor], Tensor] = Recompute.apply
    return apply(block, anchor, tensor)


class Recompute(torch.autograd.Function):
    """The custom autograd function behind `checkpoint`.

    C1 The result is bit-for-bit the same as from a plain call of block(tensor). So are
       the gradients after backward(), both for the tensor and for the block's
       parameters.
    C2 This also holds for a block that draws random numbers, and checkpointing it
       doesn't change the numbers that are drawn later.
    C3 Between the forward and the backward pass, no activation inside the block is kept
       in memory.
    In torch.distributed: torch.utils.checkpoint.checkpoint(block, tensor)
    Example: three blocks: their three inputs are kept
    Cost: the block runs twice. Check: distlab check 2.5
    """

    @staticmethod
    def forward(ctx: Any, block: Block, anchor: Tensor, tensor: Tensor) -> Tensor:
        """Return the result of `checkpoint`. Autograd records nothing in here."""
        ### BEGIN SOLUTION activation_checkpointing.checkpoint
        #| what does backward need to repeat this run? (a tensor: ctx.save_for_backward)
        ctx.block, ctx.random = block, random_state()
        ctx.save_for_backward(tensor)
        return block(tensor)
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return a gradient, or None, for each argument of forward."""
        ### BEGIN SOLUTION activation_checkpointing.checkpoint
        #| run the block again, with torch.enable_grad(), from a leaf tensor,
        #| and with the random numbers of forward, not with the current ones
        tensor = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[2])
        current = random_state()
        set_random_state(ctx.random)
        with torch.enable_grad():
            result = ctx.block(tensor)
        set_random_state(current)
        if result.requires_grad:  # not so if block and input are frozen
            result.backward(gradient)
        return None, None, tensor.grad
        ### END SOLUTION


def random_state() -> RandomState:
    """Return the states of this process's random number generators: CPU, then GPUs."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), *gpus


def set_random_state(state: RandomState) -> None:
    """Set all random number generators to the states from `random_state`."""
    torch.set_rng_state(state[0])
    for number, gpu in enumerate(state[1:]):
        torch.cuda.set_rng_state(gpu, number)


def with_torch(block: Block, tensor: Tensor) -> Tensor:
    """Checkpoint a block with torch.utils.checkpoint, without the limits of 2.5.

    C1 The result and all gradients are bit-for-bit the same as from a plain call of
       block(tensor) and its backward(). This also holds for a block that draws random
       numbers, and checkpointing it doesn't change the numbers that are drawn later.
    C2 torch.autograd.grad returns the same gradients, and doesn't write to any `.grad`.
    C3 Between the forward and the backward pass, no activation inside the block is kept
       in memory.
    In torch.distributed: already plain torch; it works with FSDP2 and pipelining
    Example: torch.autograd.grad(loss, parameters) raises a RuntimeError with 2.5
    Cost: the block runs twice. Check: distlab check 2.23
    """
    ### BEGIN SOLUTION activation_checkpointing.port
    #| torch.utils.checkpoint.checkpoint has two variants: which one supports
    #| torch.autograd.grad, and an input that requires no gradient?
    result: Tensor = torch.utils.checkpoint.checkpoint(
        block, tensor, use_reentrant=False
    )
    return result
    ### END SOLUTION
