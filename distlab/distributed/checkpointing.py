"""The activation checkpointing of phase 2, as a scope around forward()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distlab.distributed import registry
from distlab.distributed.parts import running, unit
from distlab.distributed.recomputation import Surroundings


@contextmanager
def checkpoint_scope(*blocks: nn.Module) -> Iterator[list[nn.Module]]:
    """Make forward() of each block keep only its input for backward().

    To get the activations back, backward() runs the block again; you may call it in the
    scope or after it. The first argument of a block must be a tensor that requires a
    gradient, and no other tensor that you pass may require one. The block returns a
    tensor. If you pass no `blocks`, we look for them in an nn.Sequential or
    nn.ModuleList of any wrapper in this process, and take the outermost ones that
    contain layers. The scope yields the list of all blocks.

    A block may draw random numbers, run under autocast, and update buffers such as
    batch norm's. The second run sees the same state as the first, and its updates are
    discarded. A block may not be part of a DistributedDataParallel with
    find_unused_parameters; unit activation_checkpointing explains why.

    Raises:
        ValueError: there is no block, or in forward() a second tensor that you pass to
            a block requires a gradient.

    Example:
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())] * 4
        model = torch.nn.Sequential(*layers)
        with checkpoint_scope(*model):
            loss = model(torch.ones(5, 8)).sum()
        loss.backward()
        assert model[0][0].weight.grad is not None
    """
    chosen = list(dict.fromkeys(blocks)) or _blocks_of_wrappers()
    if not chosen:
        raise ValueError(
            "no wrapper has blocks to checkpoint: name them, such as "
            "checkpoint_scope(*model.blocks)"
        )
    with ExitStack() as stack:
        for block in chosen:
            stack.enter_context(_checkpointed(block))
        yield chosen


@contextmanager
def _checkpointed(block: nn.Module) -> Iterator[None]:
    before, forward = block.__dict__.get("forward"), block.forward
    block.__dict__["forward"] = _recomputing(block, forward)
    try:
        yield
    finally:
        if before is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = before


def _recomputing(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        if not inputs:
            raise ValueError("give a checkpointed block its first argument by position")
        first, *others = inputs
        if not torch.is_grad_enabled() or not isinstance(first, Tensor):
            return forward(first, *others, **named)
        for leaf in tree_leaves((others, named)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    "a checkpointed block has a second tensor that requires a "
                    "gradient: 2.5 gives a gradient to the first one only"
                )
        surroundings = Surroundings(block)
        is_again = False

        def play(tensor: Tensor) -> Any:
            nonlocal is_again
            with surroundings.again() if is_again else nullcontext():
                outputs = forward(tensor, *others, **named)
            if not isinstance(outputs, Tensor):
                raise ValueError(
                    "a checkpointed block must return a tensor, not a "
                    f"{type(outputs).__name__}"
                )
            if not is_again:
                surroundings.forget_unchanged(block)
            is_again = True
            return outputs

        with running(ValueError):
            return unit("activation_checkpointing").checkpoint(play, first)

    return run


def _blocks_of_wrappers() -> list[nn.Module]:
    blocks: dict[nn.Module, None] = {}
    for wrapper in registry.alive():
        inside: set[nn.Module] = set()
        for module in wrapper.modules():  # outer modules come first
            if module in inside or not isinstance(module, _CONTAINERS):
                continue
            for child in module.children():
                if child not in inside and any(child.children()):
                    blocks[child] = None
                    inside.update(child.modules())
    return list(blocks)


_CONTAINERS = (nn.Sequential, nn.ModuleList)
