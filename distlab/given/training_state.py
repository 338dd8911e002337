"""The state of a run as plain data: what has it, and how it becomes shards and back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from distlab.given.checkpoint import JSON, Checkpoint

State = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, numpy arrays and plain values."""


class Stateful(Protocol):
    """An optimizer, a scheduler, a scaler, a data loader."""

    def state_dict(self) -> State:
        """What it must know to continue."""

    def load_state_dict(self, state: Any, /) -> None:
        """Continue from there."""


@dataclass(kw_only=True)
class Run:
    """What one rank trains with. Data parallelism: the model is the same on all ranks.

    `master`: the optimizer's float32 copies, if the model has a smaller dtype.
    `parts`: "scheduler", "scaler", "loader" and so on, those that there are.
    `hook`: a compression hook; it may have `residuals`, and `factors` as PowerSGD has.
    """

    model: nn.Module
    optimizer: Stateful
    master: Sequence[Tensor] = ()
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    hook: Any = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has another part of the optimizer's state, as in ZeRO."""
        return hasattr(self.optimizer, "state_by_name")


def require_same_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """The saved parameters have the names and shapes of the model's.

    Raises:
        ValueError: they have not; one line names the first difference.
    """
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    other = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in [*own, *other]:
        if own.get(name) != other.get(name):
            here = f"has shape {own[name]}" if name in own else "is not there"
            there = f"has shape {other[name]}" if name in other else "is not there"
            raise ValueError(
                f'the checkpoint is of another model: "{name}" {here} in the model, '
                f"and {there} in the checkpoint"
            )


# ── random numbers ──────────────────────────────────────────────────────────────────


def random_state() -> State:
    """Where the generators of Python, numpy, torch and the GPUs are."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: State) -> None:
    """Continue with the numbers that come after `random_state()`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)


def seed_all(seed: int) -> None:
    """Start all generators anew; 0 <= seed < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ── a state as the tensors and the JSON of a shard ──────────────────────────────────


def pack(
    shared: State, own: State, rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """The tensors and the meta of this rank's shard, for `save`.

    Each tensor of `shared`, which is the same on every rank, goes into the shard of one
    rank, so that every rank writes about as much; all of `own` into that of this rank.

    Raises:
        TypeError: a value is no tensor and no plain data.
    """
    tensors: dict[str, Tensor] = {}
    loads = [0] * world_size
    all_shared: dict[str, Tensor] = {}
    outline = _flatten(shared, "shared", all_shared)
    for name in sorted(all_shared, key=lambda n: (-all_shared[n].nbytes, n)):
        writer = loads.index(min(loads))
        loads[writer] += all_shared[name].nbytes
        if writer == rank:
            tensors[name] = all_shared[name]
    meta = {"own": _flatten(own, "own", tensors)}
    return tensors, meta | ({"shared": outline} if rank == 0 else {})


def unpack(checkpoint: Checkpoint) -> tuple[State, list[State]]:
    """The shared state, and the own state of each rank that saved.

    Raises:
        ValueError: the shards were not made by `pack`.
    """
    everywhere: dict[str, Tensor] = {}
    for shard in checkpoint.shards:
        everywhere |= shard.tensors
    try:
        shared = _restore(checkpoint.shards[0].meta["shared"], everywhere)
        own = [_restore(one.meta["own"], one.tensors) for one in checkpoint.shards]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint of step {checkpoint.step} holds no state of a run"
        ) from error
    return shared, own


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> JSON:
    """The value without its tensors, which go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f'"{name}" has a key of type {type(key).__name__}')
        items = [[k, _flatten(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {kind: items}
    if isinstance(value, list | tuple):
        rows = [_flatten(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": rows}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f'"{name}" is of type {type(value).__name__}: a checkpoint holds tensors, '
        "arrays and plain data only"
    )


def _restore(outline: JSON, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `_flatten`."""
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind in ("dict", "counter"):
        items = {key: _restore(value, tensors) for key, value in content}
        return Counter(items) if kind == "counter" else items
    rows = [_restore(value, tensors) for value in content]
    return tuple(rows) if kind == "tuple" else rows
