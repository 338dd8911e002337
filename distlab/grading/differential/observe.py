"""In each rank: a task's scenarios, each twice in one process, with its calls watched.

The first time has other numbers, so that what a call leaves behind shows in the second.
That one is looked at: what each call of the unit's functions changed, which results
changed after they were returned, and how many floating-point operations torch did.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.curriculum import load_graft
from distlab.grading.differential.fingerprints import (
    changed,
    fingerprints,
    of_process,
    tensors_in,
    values_of,
)
from distlab.grading.harness import prepared
from distlab.grading.together import play_reported
from distlab.runner import RankContext
from distlab.runner.rank import resolve

OTHER_SEED = 1_000_003  # added to the seed for the time before


@dataclass
class Observed:
    """What is seen of a rank's calls: `changes` are (function, aspect).

    It keeps nothing alive: what a call lets go of is gone.
    """

    changes: dict[tuple[str, str], None] = field(default_factory=dict)
    results: list[tuple[str, weakref.ref[Tensor], object]] = field(default_factory=list)
    given: dict[int, dict[str, Any]] = field(default_factory=dict)
    depth: int = 0

    def aliased(self) -> list[tuple[str, str]]:
        """Results that are not what they were when they were returned."""
        return [
            (name, "a tensor that it had returned")
            for name, reference, before in self.results
            if (tensor := reference()) is not None and values_of(tensor) != before
        ]

    def objects_of(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, object]:
        """The arguments by name; of a method, also those its object was made with."""
        own = dict(zip(names, args, strict=False)) | kwargs
        if names[:1] == ["self"] and args:
            own.pop("self")
            made_with = self.given.setdefault(id(args[0]), _weak(own))
            before = {name: reference() for name, reference in made_with.items()}
            own = {n: v for n, v in before.items() if v is not None} | own
        return {n: v for n, v in own.items() if n not in ("comm", "ctx")}


def _weak(objects: dict[str, Any]) -> dict[str, Any]:
    kinds = (nn.Module, torch.optim.Optimizer)
    return {n: weakref.ref(v) for n, v in objects.items() if isinstance(v, kinds)}


def watch(module: ModuleType, seen: Observed) -> None:
    """Look before and after each call of a function or method of the unit.

    Only calls from outside the unit count, and what an object was made with is looked
    at in calls of its methods too.
    """
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            setattr(module, name, _watched(value, name, seen))
        elif isinstance(value, type) and not issubclass(value, torch.autograd.Function):
            for own, method in list(vars(value).items()):
                is_public = not own.startswith("_") or own in ("__init__", "__call__")
                if isinstance(method, FunctionType) and is_public:
                    watched = _watched(method, f"{name}.{own}", seen)
                    setattr(value, own, watched)


def _watched(function: FunctionType, name: str, seen: Observed) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return function
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if seen.depth:
            return function(*args, **kwargs)
        objects = seen.objects_of(names, args, kwargs)
        before = {**of_process(), **fingerprints(objects)}
        seen.depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            seen.depth -= 1
        after = {**of_process(), **fingerprints(objects)}
        seen.changes.update(((name, aspect), None) for aspect in changed(before, after))
        own = {id(tensor) for tensor in tensors_in(list(objects.values()))}
        seen.results += [
            (name, weakref.ref(tensor), values_of(tensor))
            for tensor in tensors_in(result)
            if id(tensor) not in own and not isinstance(tensor, nn.Parameter)
        ]
        return result

    return call


class Operations(TorchDispatchMode):
    """Counts the floating-point operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would call `__torch_dispatch__` through its compiler's switch, which
        # takes longer than what we do there; nothing is compiled here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count it: two for each product that is added up."""
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in _PRODUCTS:
            self.count += 2 * out.numel() * args[_PRODUCTS[name]].shape[-1]
        return out


_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""By operation of torch, which argument is the left factor."""


def play_twice(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    plays: list[tuple[str, dict[str, Any]]],
    off_limits: dict[str, list[str]],
) -> list[dict[str, Any]]:
    """The program of each rank; every result is reported when it is there."""
    context, texts = prepared(context, source, reference, off_limits)
    # Reports that a scenario makes of its own would be taken for ours.
    silent = replace(context, report=lambda _: None)
    told = []
    for name, values in plays:
        module, scenario = load_graft(*texts, grafts), resolve(name)
        other = {**values, "seed": values["seed"] + OTHER_SEED}
        play_reported(
            context, other["seed"], partial(scenario, silent, module, **other)
        )
        seen, operations = Observed(), Operations()
        watch(module, seen)
        # To enter a mode, torch imports its compiler. That takes each rank seconds,
        # unless the unit is one that trains: then it was preloaded.
        is_counted = "torch._dynamo" in sys.modules
        with operations if is_counted else nullcontext():
            play_reported(
                context, values["seed"], partial(scenario, silent, module, **values)
            )
        changes = dict.fromkeys([*seen.changes, *seen.aliased()])
        told.append(
            {
                "changes": [*map(list, changes)],
                "operations": operations.count if is_counted else None,
            }
        )
    return told
