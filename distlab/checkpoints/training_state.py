"""The state of a run as plain data: the parts that have it, and how shards hold it."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distlab.checkpoints.files import JSON, Checkpoint, unfit
from distlab.dtensors import is_sharded
from distlab.seeds import small_seed

State = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, numpy arrays and plain values."""

EXTRA = "extra_state"
"""Name of the part with the state of modules other than parameters and buffers."""


class Stateful(Protocol):
    """A part of a run with state, for example an optimizer or a data loader."""

    def state_dict(self) -> State:
        """Return everything that the part needs to continue."""

    def load_state_dict(self, state: Any, /) -> None:
        """Continue from a state that state_dict() returned."""


@dataclass(kw_only=True)
class Run:
    """Everything that one rank trains with; the model is the same on all ranks.

    `master` has the optimizer's float32 copies, if the model has a smaller dtype.
    `parts` has the "scheduler", "scaler", "loader" and so on, as far as the run has
    them.
    `hook` is a compression hook. It may have `residuals`, and `factors` like PowerSGD.
    If a module of `model` has get_extra_state(), we add a part named "extra_state".
    """

    model: nn.Module
    optimizer: Stateful
    master: Sequence[Tensor] = ()
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    hook: Any = None

    def __post_init__(self) -> None:
        extra = ExtraState(self.model)
        if extra.modules and EXTRA not in self.parts:
            self.parts = {**self.parts, EXTRA: extra}

    @property
    def is_sharded(self) -> bool:
        """True if each rank has its own part of the optimizer's state, as in ZeRO."""
        return hasattr(self.optimizer, "state_by_name")


class ExtraState:
    """The state of modules besides parameters and buffers, by name in the model.

    It includes what get_extra_state() returns, and anything that _save_to_state_dict()
    or a hook of state_dict() adds.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module | _AddedState | _HookedState] = {}
        for path, module in model.named_modules():
            name, kind = plain_name(path), type(module)
            if kind.get_extra_state is not nn.Module.get_extra_state:
                self.modules[name] = module
            elif kind._save_to_state_dict is not nn.Module._save_to_state_dict:
                added = _AddedState(module)
                if added.get_extra_state():
                    self.modules[name] = added
            if module._state_dict_hooks:
                hooked = _HookedState(module)
                if hooked.get_extra_state():
                    self.modules[f"{name} (hooks)"] = hooked

    def state_dict(self) -> State:
        """Return each module's get_extra_state()."""
        return {name: one.get_extra_state() for name, one in self.modules.items()}

    def load_state_dict(self, state: State) -> None:
        """Set the extra state of each module.

        Raises:
            ValueError: different modules had extra state when it was saved.
        """
        for name in [*self.modules, *state]:
            if name not in self.modules or name not in state:
                where = "the model" if name in state else "the checkpoint"
                raise ValueError(f'"{name}" has no extra state in {where}')
        for name, module in self.modules.items():
            module.set_extra_state(state[name])


class _AddedState:
    """Presents additions of a module's _save_to_state_dict() as extra state."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def get_extra_state(self) -> State:
        """Return all entries that are neither parameters nor buffers."""
        own = {name for name, _ in self.module.named_parameters(recurse=False)}
        own |= {name for name, _ in self.module.named_buffers(recurse=False)}
        return {n: value for n, value in self._saved().items() if n not in own}

    def set_extra_state(self, state: State) -> None:
        """Load the state together with the parameters that the module has.

        Raises:
            ValueError: the module refused it.
        """
        missing, unexpected, errors = list[str](), list[str](), list[str]()
        found = {**self._saved(), **state}
        self.module._load_from_state_dict(
            found, "", {}, True, missing, unexpected, errors
        )
        errors += [f"no {name!r}" for name in missing]
        if errors:
            raise ValueError("; ".join(errors))

    def _saved(self) -> State:
        found: State = {}
        self.module._save_to_state_dict(found, "", False)
        return found


class _HookedState:
    """Presents additions of a module's state_dict() hooks as extra state."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def get_extra_state(self) -> State:
        """Return all entries that state_dict() wouldn't have without the hooks."""
        saved = self.module.state_dict()
        hooks = self.module._state_dict_hooks
        self.module._state_dict_hooks = OrderedDict()
        try:
            own = self.module.state_dict()
        finally:
            self.module._state_dict_hooks = hooks
        return {name: value for name, value in saved.items() if name not in own}

    def set_extra_state(self, state: State) -> None:
        """Load it through the module's own load_state_dict(), which also has hooks."""
        self.module.load_state_dict({**self.module.state_dict(), **state}, strict=False)


def plain_name(name: str) -> str:
    """Strip torch.compile's wrapper from a name in a model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def require_same_model(
    model: nn.Module,
    saved: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Require that saved parameters and `buffers` match the model's names and shapes.

    Raises:
        ValueError: they don't match; one line names the first difference.
    """
    _require_same(dict(model.named_parameters()), saved)
    if buffers is not None:
        _require_same(dict(model.named_buffers()), buffers)


def _require_same(here: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in here.items()}
    other = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in [*own, *other]:
        if own.get(name) != other.get(name):
            in_model = f"has shape {own[name]}" if name in own else "is not there"
            there = f"has shape {other[name]}" if name in other else "is not there"
            raise ValueError(
                f'the checkpoint is from another model: "{name}" {in_model} in the '
                f"model, but {there} in the checkpoint"
            )


# ── random numbers ──────────────────────────────────────────────────────────────────


def random_state() -> State:
    """Return the states of the generators of Python, numpy, torch and the GPUs."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: State) -> None:
    """Continue with the numbers that would have come after `random_state()`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)


def seed_all(seed: int) -> None:
    """Seed all generators; `seed` may be any integer."""
    seed = small_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ── a state as the tensors and the JSON of a shard ──────────────────────────────────


def pack(
    shared: State, own: State, rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Return the tensors and the `meta` of this rank's shard, for `save`.

    Every rank has the same `shared`, so each of its tensors goes into the shard of only
    one rank, in such a way that all ranks write about as much. `own` goes into this
    rank's shard as a whole.

    If a value is neither a tensor nor plain data, this doesn't raise. Instead, `save`
    fails on all ranks and names the value and its rank.
    """
    tensors: dict[str, Tensor] = {}
    loads = [0] * world_size
    all_shared: dict[str, Tensor] = {}
    try:
        outline = flatten(shared, "shared", all_shared)
        meta = {"own": flatten(own, "own", tensors)}
    except TypeError as error:
        return {}, unfit(str(error))
    for name in sorted(all_shared, key=lambda n: (-all_shared[n].nbytes, n)):
        writer = loads.index(min(loads))
        loads[writer] += all_shared[name].nbytes
        if writer == rank:
            tensors[name] = all_shared[name]
    return tensors, meta | ({"shared": outline} if rank == 0 else {})


def unpack(checkpoint: Checkpoint) -> tuple[State, list[State]]:
    """Return the shared state, and the own state of each rank that saved.

    Raises:
        ValueError: `pack` didn't make the shards.
    """
    everywhere: dict[str, Tensor] = {}
    for shard in checkpoint.shards:
        everywhere |= shard.tensors
    try:
        shared = restored(checkpoint.shards[0].meta["shared"], everywhere)
        own = [restored(one.meta["own"], one.tensors) for one in checkpoint.shards]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint of step {checkpoint.step} holds no state of a run"
        ) from error
    return shared, own


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> JSON:
    """Return the value without its tensors, and add those to `tensors` by name.

    Raises:
        TypeError: a value is neither a tensor nor plain data.
    """
    if isinstance(value, Tensor):
        _require_dense(value, name)
        return {"tensor": _noted(value, name, tensors)}
    if isinstance(value, np.ndarray | np.number | np.bool_):
        array = np.array(value)  # a copy
        try:
            tensor = torch.from_numpy(array)
        except TypeError as error:
            raise TypeError(f'"{name}" is an array of {array.dtype}') from error
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: _noted(tensor, name, tensors)}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        names = _names_of(value, name)
        items = [[k, flatten(v, names[k], tensors)] for k, v in value.items()]
        return {kind: items}
    if isinstance(value, list | tuple):
        rows = [flatten(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": rows}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f'"{name}" is of type {type(value).__name__}: a checkpoint holds tensors, '
        "arrays and plain data only"
    )


def _require_dense(tensor: Tensor, name: str) -> None:
    """Require that this rank has all of the tensor's values in plain memory."""
    if is_lazy(tensor):
        raise TypeError(f'"{name}" has no shape yet')
    if is_sharded(tensor):
        raise TypeError(f'"{name}" is a DTensor, so this rank has only a part of it')
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(
            f'"{name}" is not a dense tensor: {tensor.layout}, {tensor.dtype}'
        )
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise TypeError(f'"{name}" has no memory, because its layer is sharded')


def _noted(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    if name in tensors:
        raise TypeError(f'two entries of the state are called "{name}"')
    tensors[name] = tensor
    return name


def _names_of(mapping: Mapping[Any, Any], above: str) -> dict[Any, str]:
    """Name each entry uniquely: {"a": {"b": …}, "a.b": …, 0: …, "0": …} has four names.

    The names are the same on all ranks, regardless of the order of the entries.

    Raises:
        TypeError: a key is neither a str nor an int.
    """
    for key in mapping:
        if not isinstance(key, str | int):
            raise TypeError(f'"{above}" has a key of type {type(key).__name__}')
    numbers = {str(key) for key in mapping if not isinstance(key, str)}
    texts = {str(key) for key in mapping}
    found = {}
    for key in mapping:
        parts = str(key).split(".")
        beginnings = {".".join(parts[:end]) for end in range(1, len(parts))}
        is_unclear = isinstance(key, str) and (key in numbers or beginnings & texts)
        found[key] = f"{above}.{key!r}" if is_unclear else f"{above}.{key}"
    return found


def restored(outline: JSON, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `flatten`."""
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "number":
        return tensors[content].numpy()[()]
    if kind in ("dict", "counter"):
        items = {key: restored(value, tensors) for key, value in content}
        return Counter(items) if kind == "counter" else items
    rows = [restored(value, tensors) for value in content]
    return tuple(rows) if kind == "tuple" else rows
