"""Check the fields of a configuration."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn


class EngineError(ValueError):
    """Raised if a training can't start or has failed; one line tells the user why."""


def expect_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Require a whole number from `least` to `most`.

    Raises:
        EngineError: the value isn't one.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise EngineError(f"{name} is {value!r}, must be an integer")
    if value < least:
        raise EngineError(f"{name} is {value}, must be at least {least}")
    if most is not None and value > most:
        raise EngineError(f"{name} is {value}, must be at most {most}")


def expect_number(name: str, value: Any, *, is_zero_fine: bool) -> None:
    """Require a finite number above 0, or at least 0 if 0 is fine; None passes.

    Raises:
        EngineError: the value isn't one.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"{name} is {value!r}, must be a number")
    if not math.isfinite(value) or value < 0 or (value == 0 and not is_zero_fine):
        least = "at least 0" if is_zero_fine else "more than 0"
        raise EngineError(f"{name} is {value:g}, must be {least}")


def expect_path(name: str, value: Any) -> None:
    """Require a value that can name a file or folder; None passes as well.

    Raises:
        EngineError: the value is neither text nor a path, or it's empty.
    """
    if value is not None and not (value and isinstance(value, str | os.PathLike)):
        raise EngineError(f"{name} is {value!r}, must be a path")


def expect_among(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Require one of the `known` values; True doesn't count as 1.

    Raises:
        EngineError: the value isn't among them.
    """
    if not any(_is_same(value, one) for one in known):
        shown = ", ".join(str(one) for one in known if one is not None)
        raise EngineError(f"{name} is {value!r}; there are {shown}")


def expect_float32(what: str, model: nn.Module) -> None:
    """Require float32 parameters, because `what` would round others or skip them.

    Raises:
        EngineError: a floating-point parameter isn't float32.
    """
    others = {p.dtype for p in model.parameters() if p.is_floating_point()}
    others -= {torch.float32}
    if others:
        name = str(min(others, key=str)).removeprefix("torch.")
        raise EngineError(f"{what} needs a float32 model; it has {name}")


def _is_same(value: Any, one: Any) -> bool:
    is_same_kind = isinstance(value, bool) == isinstance(one, bool)
    return value is one or bool(is_same_kind and value == one)
