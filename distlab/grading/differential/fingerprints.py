"""What the objects handed to a call look like, by name and aspect.

Two looks at the same objects tell in words what has changed between them.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.kit.live_bytes import has_memory, unseen

Prints = dict[str, object]
"""An aspect, such as "model: training mode", and a value to be compared."""

GRADIENT = "its gradient"
_DEEP, _WIDE = 3, 64  # containers in containers, and elements of each
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def fingerprints(objects: Mapping[str, object]) -> Prints:
    """All aspects of some objects by name; what is met twice is looked at once."""
    found: Prints = {}
    seen: set[int] = set()
    for name, value in objects.items():
        found.update(_of(name, value, seen, 0))
    return found


def of_process() -> Prints:
    """What every call in this process shares."""
    return {
        "torch's random numbers": _hash(torch.get_rng_state()),
        "Python's random numbers": _pythons_numbers(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
    }


def changed(before: Prints, after: Prints) -> list[str]:
    """The aspects that are there both times, and not the same."""
    return [name for name, value in before.items() if after.get(name, value) != value]


def tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a result, in containers too."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEP and isinstance(value, Mapping):
        for part in list(value.values())[:_WIDE]:
            yield from tensors_in(part, depth + 1)
    elif depth < _DEEP and isinstance(value, list | tuple):
        for part in value[:_WIDE]:
            yield from tensors_in(part, depth + 1)


def values_of(tensor: Tensor) -> object:
    """Equal exactly when the bits are; None for what has no numbers to look at."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or not has_memory(tensor):
        return None
    return _hash(tensor)


def _of(name: str, value: object, seen: set[int], depth: int) -> Iterator[Any]:
    if id(value) in seen or depth > _DEEP:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield from _of_tensor(name, value)
    elif isinstance(value, nn.Module):
        yield from _of_module(name, value, seen)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _of_optimizer(name, value)
    elif isinstance(value, torch.Generator):
        yield f"{name}: its random numbers", _hash(value.get_state())
    elif isinstance(value, random.Random):
        yield f"{name}: its random numbers", hash(value.getstate())
    elif isinstance(value, Mapping | list | tuple):
        yield from _of_container(name, value, seen, depth)


def _of_container(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield f"{name}: its keys", tuple(map(repr, value))
    elif isinstance(value, list):
        yield f"{name}: its elements", tuple(map(id, value))
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in [*parts][:_WIDE]:
        yield from _of(f"{name}[{key!r}]", part, seen, depth + 1)


def _of_tensor(name: str, tensor: Tensor) -> Iterator[Any]:
    yield f"{name}: its values", values_of(tensor)
    yield f"{name}: its shape or dtype", (tensor.shape, tensor.dtype)
    if type(tensor) is Tensor and tensor.layout == torch.strided:
        # Of a parameter the module is the holder; a tensor may be a part of another.
        yield f"{name}: its memory", (tensor.data_ptr(), tensor.stride())
    if tensor.is_leaf:
        yield f"{name}: requires_grad", tensor.requires_grad
        gradient = tensor.grad
        yield f"{name}: {GRADIENT}", None if gradient is None else values_of(gradient)


def _of_module(name: str, module: nn.Module, seen: set[int]) -> Iterator[Any]:
    modules = list(module.modules())
    yield f"{name}: training mode", tuple(part.training for part in modules)
    yield f"{name}: its layers", tuple(map(id, modules))
    yield (
        f"{name}: its hooks",
        sum(len(getattr(part, kind)) for part in modules for kind in _HOOKS),
    )
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        parts = list(named)
        yield f"{name}: its {kind}s", tuple(id(tensor) for _, tensor in parts)
        for own, tensor in parts:
            yield from _of(f"{name}'s {kind} {own}", tensor, seen, 1)


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    groups = optimizer.param_groups
    yield (
        f"{name}: its settings",
        repr([{k: v for k, v in group.items() if k != "params"} for group in groups]),
    )
    yield f"{name}: its parameters", tuple(id(p) for g in groups for p in g["params"])


def _pythons_numbers() -> int:
    """Of the generator's own memory: to ask it makes 625 objects, before every call."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined]
    head = object.__basicsize__  # what every object has: the references to it, its type
    size = _random.Random.__basicsize__ - head
    return hash(ctypes.string_at(id(generator) + head, size))


def _hash(tensor: Tensor) -> int:
    """Of the elements, which must be in memory."""
    if not tensor.numel():
        return 0
    is_plain = tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    if not is_plain or not tensor.is_contiguous():
        with unseen():  # nobody who counts memory or operations shall count these
            copy = tensor.detach().cpu().resolve_conj().resolve_neg()
            return _hash(copy.clone(memory_format=torch.contiguous_format))
    # The bytes where they lie, and no operation of torch: a model is looked at often.
    return hash(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
