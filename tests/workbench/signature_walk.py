"""In each rank: play scenarios, and note with which values each parameter was passed.

A parameter that all scenarios of a task pass with one value is one that a solution
may ignore without being seen.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.curriculum import load_graft
from distlab.grading.harness import prepared
from distlab.runner import RankContext
from distlab.runner.rank import resolve

Noted = dict[str, list[str]]
"""By "function(parameter)": what it was passed."""

_PLAIN = (bool, int, float, str, torch.dtype)
_ENOUGH = 2  # different values
_serial = itertools.count()


def values_passed(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    plays: list[tuple[str, dict[str, Any]]],
    off_limits: dict[str, list[str]],
) -> Noted:
    """The program of each rank, with the arguments of the harness's `perform`."""
    context, texts = prepared(context, source, reference, off_limits)
    module, noted = load_graft(*texts, grafts), Noted()
    _note_calls(module, noted)
    silent = replace(context, report=lambda _: None)
    for name, values in plays:
        resolve(name)(silent, module, **values)
    return noted


def _note_calls(module: ModuleType, noted: Noted) -> None:
    inside = [0]  # calls of the unit by the unit itself do not count
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            setattr(module, name, _noting(value, name, noted, inside))
        elif isinstance(value, type) and not issubclass(value, torch.autograd.Function):
            for own, method in list(vars(value).items()):
                is_public = not own.startswith("_") or own in ("__init__", "__call__")
                if isinstance(method, FunctionType) and is_public:
                    called = f"{name}.{own}"
                    setattr(value, own, _noting(method, called, noted, inside))


def _noting(
    function: FunctionType, name: str, noted: Noted, inside: list[int]
) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not inside[0]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for parameter, value in bound.arguments.items():
                told = noted.setdefault(f"{name}({parameter})", [])
                looks = looks_like(value)
                if looks and looks not in told and len(told) < _ENOUGH:
                    told.append(looks)
        inside[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            inside[0] -= 1

    return call


def looks_like(value: object) -> str:
    """A plain value, the form of a tensor, the length of a list; "" of most others."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, GeneratorType):
        return f"generator {next(_serial)}"  # we can't look into it
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())}"
    if type(value) in (list, tuple):
        return f"{len(value)} of {looks_like(value[0]) if value else ''}"  # type: ignore[arg-type, index]
    return ""
