"""Models in the mode that their caller did not choose: training for evaluation.

A call that sets the mode for good shows only where the mode was the other one. What
layers without dropout and batch statistics compute is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType

from torch import nn


@contextmanager
def in_other_mode(objects: Iterable[object]) -> Iterator[None]:
    """Within, models have their other mode, unless their layers ask for it.

    Afterwards they have their own again, except those whose mode was changed within.
    """
    models = [model for model in objects if isinstance(model, nn.Module)]
    turned = [_turned(model) for model in models]
    yield
    for model, mode in zip(models, turned, strict=True):
        if mode is not None and _modes(model) == {mode}:
            _set(model, not mode)


def _turned(model: nn.Module) -> bool | None:
    """The mode that it has now, or None if it was left as it is."""
    modes = _modes(model)
    if len(modes) > 1 or any(_asks(type(part)) for part in model.modules()):
        return None
    mode = not modes.pop()
    _set(model, mode)
    return mode


def _modes(model: nn.Module) -> set[bool]:
    return {part.training for part in model.modules()}


def _set(model: nn.Module, mode: bool) -> None:
    for part in model.modules():
        part.training = mode


@cache
def _asks(kind: type[nn.Module]) -> bool:
    """Whether the code of this class asks for the mode."""
    own = [c for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    functions = (f for c in own for f in vars(c).values())
    return any(
        "training" in function.__code__.co_names
        for function in functions
        if isinstance(function, FunctionType)
    )
