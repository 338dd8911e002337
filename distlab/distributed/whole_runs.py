"""Save whole tensors from a training whose parameters FSDP2 has sharded.

    shards ── gather: all_gather ──▶ whole ──▶ full_state, save
    shards ◀── scatter: cut ──────── whole ◀── load, restore

Each rank has a plain model and optimizer beside the sharded ones. Checkpoints are saved
from these, so any engine and any number of ranks can continue from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.checkpoints.training_state import Run, State, Stateful
from distlab.comm import Comm
from distlab.distributed.wrapped import WrappedSharded
from distlab.dtensors import gathered, is_sharded
from distlab.given.imagenet_trainer import Job


class WholeRun:
    """Holds `whole`, which we save and restore; it is `run` itself unless sharded."""

    def __init__(self, job: Job, run: Run) -> None:
        self.whole = self._run = run
        self._engine: WrappedSharded | None = None
        if not isinstance(job.engine, WrappedSharded):
            return
        self._engine = job.engine
        model = job.engine.copy
        self._optimizer = optimizer_on(model, job.optimizer, job.model)
        parts = {name: _WholePart(one, job.comm) for name, one in run.parts.items()}
        self.whole = replace(run, model=model, optimizer=self._optimizer, parts=parts)

    def gather(self) -> None:
        """Bring `whole` up to date; collective."""
        if self._engine is not None:
            self._engine.gather()
            state = whole(self._run.optimizer.state_dict())
            self._optimizer.load_state_dict(state)
            for part in self.whole.parts.values():
                assert isinstance(part, _WholePart)
                part.gather()

    def scatter(self) -> None:
        """Copy the state of `whole` to the sharded run; collective."""
        if self._engine is None:
            return
        model = self._engine.model
        parameters = dict(model.named_parameters())
        whole_model = self.whole.model
        with torch.no_grad():
            for name, value in whole_model.named_parameters():
                parameters[name].copy_(cut_like(value, parameters[name]))
            buffers = dict(model.named_buffers())
            for name, buffer in whole_model.named_buffers():
                buffers[name].copy_(buffer)
        state = self._optimizer.state_dict()
        flat = [p for g in self._run.optimizer.param_groups for p in g["params"]]  # type: ignore[attr-defined]
        state["state"] = {
            number: {key: cut_like(v, flat[number]) for key, v in values.items()}
            for number, values in state["state"].items()
        }
        self._run.optimizer.load_state_dict(state)


class _WholePart:
    """A part of a run, such as an average of the weights, with whole tensors."""

    def __init__(self, part: Stateful, comm: Comm) -> None:
        self._part, self._comm = part, comm
        self._state: State | None = None

    def gather(self) -> None:
        """Bring the whole tensors up to date; collective."""
        self._state = whole(self._part.state_dict())

    def state_dict(self) -> State:
        """Return the state gathered last, or gather it now, which is collective."""
        return whole(self._part.state_dict()) if self._state is None else self._state

    def load_state_dict(self, state: Any, /) -> None:
        """Load the state, cutting each tensor like the part's own."""
        self._state = None
        self._part.load_state_dict(_cut(state, self._part.state_dict()))


def optimizer_on(copy: nn.Module, optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Make an optimizer of the same class and groups, on the parameters of a copy."""
    names = {id(p): name for name, p in model.named_parameters()}
    own = dict(copy.named_parameters())
    groups = [
        {**group, "params": [own[names[id(p)]] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups, lr=optimizer.defaults["lr"])
    return made


def whole(value: Any) -> Any:
    """Return the state with whole tensors instead of shards; collective."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(one) for one in value)
    return gathered(value)


def cut_like(value: Any, shard: Any) -> Any:
    """Return this rank's part of a whole tensor, if `shard` is of the same shape."""
    if not is_sharded(shard) or getattr(value, "shape", None) != shard.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    placed: Tensor = value.detach().to(shard.device)
    # Every rank has all of it, so none has to be sent.
    return distribute_tensor(
        placed, shard.device_mesh, shard.placements, src_data_rank=None
    )


def _cut(value: Any, own: Any) -> Any:
    if isinstance(value, dict) and isinstance(own, dict):
        return {key: _cut(one, own.get(key)) for key, one in value.items()}
    return cut_like(value, own)
