"""In each rank: a task's scenarios, each twice in one process, with its calls watched.

The first time has other numbers, so that what a call leaves behind shows in the second.
All scenarios are played once, from the last to the first, before any is played again,
so the second time also follows calls with other sizes and settings. It is looked at:
what each call of the unit's functions changed, which results changed after they were
returned, and how many floating-point operations torch did.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
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
    Prints,
    changed,
    fingerprints,
    of_process,
    tensors_in,
    values_of,
    values_of_replaced,
    weak_parameters,
)
from distlab.grading.differential.modes import in_other_mode
from distlab.grading.harness import prepared
from distlab.grading.kit.again import OTHER_SEED
from distlab.grading.together import play_reported
from distlab.runner import RankContext
from distlab.runner.rank import resolve

COMPILER = "torch._dynamo"  # a dispatch mode imports it
_ENTRIES = ("handle", "on")  # of a service: given, and they call what a learner wrote
_LOOKS = 200  # at calls of one function in a scenario; some make ten thousand
_EARLIER = 64  # tensors of earlier calls that are looked at again


@dataclass
class Observed:
    """What is seen of a rank's calls: `changes` are (function, aspect).

    It keeps nothing alive: what a call lets go of is gone.
    """

    changes: dict[tuple[str, str], None] = field(default_factory=dict)
    results: list[tuple[str, weakref.ref[Tensor], object]] = field(default_factory=list)
    given: dict[int, dict[str, Any]] = field(default_factory=dict)
    earlier: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = field(
        default_factory=dict
    )
    looks: dict[str, int] = field(default_factory=dict)
    depth: int = 0

    def begin(self) -> None:
        """Forget what was seen."""
        kept = (self.changes, self.results, self.given, self.earlier, self.looks)
        for each in kept:
            each.clear()

    def has_time_for(self, name: str) -> bool:
        """Whether one more call of this function is looked at."""
        self.looks[name] = self.looks.get(name, 0) + 1
        return self.looks[name] <= _LOOKS

    def made(self, new: object) -> None:
        """An object is being made; another one may have had its id."""
        self.given.pop(id(new), None)
        self.earlier.pop(id(new), None)

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

    def handed_before(
        self, names: list[str], args: tuple[Any, ...], now: Mapping[str, object]
    ) -> list[tuple[str, Tensor]]:
        """Tensors that methods of this object were called with before this call."""
        if names[:1] != ["self"] or not args:
            return []
        handed = self.earlier.setdefault(id(args[0]), [])
        own = {id(tensor) for tensor in tensors_in(list(now.values()))}
        before = [(name, there) for name, ref in handed if (there := ref()) is not None]
        handed += [
            (name, weakref.ref(value))
            for name, value in now.items()
            if type(value) is Tensor
        ]
        del handed[:-_EARLIER]
        return [(name, tensor) for name, tensor in before if id(tensor) not in own]


def _prints_before(handed: list[tuple[str, Tensor]]) -> Prints:
    values: dict[str, list[object]] = {}
    for name, tensor in handed:
        values.setdefault(f"the {name} of an earlier call: its values", []).append(
            values_of(tensor)
        )
    return dict(values)


def _weak(objects: dict[str, Any]) -> dict[str, Any]:
    kinds = (nn.Module, torch.optim.Optimizer)
    return {n: weakref.ref(v) for n, v in objects.items() if isinstance(v, kinds)}


def watch(module: ModuleType, seen: Observed) -> None:
    """Look before and after each call of a function or method of the unit.

    Only calls from outside the unit count, or from the entry of a service, and of each
    function the first _LOOKS calls. What an object was made with, and the tensors that
    earlier calls of its methods were handed, are looked at in calls of its methods too.
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
    is_entry = name.rpartition(".")[2] in _ENTRIES

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if seen.depth:
            return function(*args, **kwargs)
        if not seen.has_time_for(name):
            seen.depth += not is_entry
            try:
                return function(*args, **kwargs)
            finally:
                seen.depth -= not is_entry
        if name.endswith(".__init__"):
            seen.made(args[0])
        objects = seen.objects_of(names, args, kwargs)
        handed = seen.handed_before(names, args, objects)

        def look() -> Prints:
            return {**of_process(), **fingerprints(objects), **_prints_before(handed)}

        with in_other_mode(objects.values()):
            before, own = look(), weak_parameters(objects)
            seen.depth += not is_entry
            try:
                result = function(*args, **kwargs)
            finally:
                seen.depth -= not is_entry
            replaced = values_of_replaced(own, weak_parameters(objects))
            after = {**look(), **replaced}
        inside = {aspect for _, aspect in seen.changes} if is_entry else ()
        seen.changes.update(
            ((name, aspect), None)
            for aspect in changed(before, after)
            if aspect not in inside
        )
        there = {id(tensor) for tensor in tensors_in(list(objects.values()))}
        seen.results += [
            (name, weakref.ref(tensor), values_of(tensor))
            for tensor in tensors_in(result)
            if id(tensor) not in there and not isinstance(tensor, nn.Parameter)
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
    module, told = load_graft(*texts, grafts), []
    for name, values in reversed(plays):
        other = {**values, "seed": values["seed"] + OTHER_SEED}
        play = partial(resolve(name), silent, module, **other)
        play_reported(context, other["seed"], play)
    seen = Observed()
    watch(module, seen)
    for name, values in plays:
        seen.begin()
        operations, scenario = Operations(), resolve(name)
        # To enter a mode, torch imports its compiler. That takes each rank seconds,
        # unless the unit is one that trains: then it was preloaded.
        is_counted = COMPILER in sys.modules
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
