"""Optimizers: where they were made, and weights and gradients at each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import optimizer as optimizers

from distlab.audit.fingerprints import print_of
from distlab.audit.log import Memory, current
from distlab.audit.watching.patches import Patches


def watch(patches: Patches) -> None:
    """Install the hooks."""
    patches.observe(optimizers.Optimizer, "__init__", after=_made)
    patches.keep(optimizers.register_optimizer_step_pre_hook(_before))
    patches.keep(optimizers.register_optimizer_step_post_hook(_after))


def _made(memory: Memory, *args: Any, **kwargs: Any) -> None:
    memory.log.add("optimizer")


def _named(memory: Memory, it: Any) -> Iterator[tuple[str, Any]]:
    """Return an optimizer's parameters by their names, or their places in it."""
    for g, group in enumerate(it.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield memory.names.get(id(parameter), f"param_groups[{g}][{i}]"), parameter


def _before(it: Any, args: Any, kwargs: Any) -> None:
    memory = current()
    if memory is None:
        return
    memory.in_step = True
    weights, gradients, born, sharded = {}, {}, {}, False
    for name, parameter in _named(memory, it):
        sharded = sharded or hasattr(parameter, "to_local")
        weights[name] = print_of(parameter)
        born[name] = memory.born.get(id(parameter))
        if parameter.requires_grad:
            grad = parameter.grad
            gradients[name] = None if grad is None else print_of(grad)
    number = memory.number("optimizer", it)
    memory.steps[number] = memory.log.add(
        "step",
        number=number,
        lr=[float(group["lr"]) for group in it.param_groups if "lr" in group],
        weights=weights,
        gradients=gradients,
        sharded=sharded,
        born=born,
        after={},
    )


def _after(it: Any, args: Any, kwargs: Any) -> None:
    memory = current()
    if memory is None:
        return
    step = memory.steps.pop(memory.number("optimizer", it), None)
    if step is not None:
        step["after"].update((name, print_of(p)) for name, p in _named(memory, it))
    memory.log.num_steps += 1
    memory.in_step = False
