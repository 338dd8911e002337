"""A training's state under the names that torch's get_state_dict gives it.

    model.<name>                     parameters and buffers, shared ones several times
    optim.state.<name>.exp_avg       whatever the optimizer keeps for a parameter
    optim.param_groups               a list of groups with their "params" by name
    distlab.step, distlab.epoch      how far the training is
    distlab.outline, distlab.tensors    everything else that distlab needs

An FSDP2 script loads "model" and "optim", and ignores "distlab" unless it wants to know
the step. The outline is JSON, so it needs no pickle. When we read, we also accept the
names of other scripts: "optimizer", a single key above everything, a flattened
optimizer, and the model's tensors at the top, as torchtitan saves them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoints.training_state import flatten, restored
from distlab.dcp.files import DcpError, read, write

State = dict[str, Any]

MODEL, OPTIM, OWN = "model", "optim", "distlab"


@dataclass(kw_only=True)
class TrainingState:
    """A training's unsharded state by names; `more` is for distlab's own programs.

    `optim` has "state" by parameter and "param_groups", as get_optimizer_state_dict()
    returns it. `step` and `epoch` are how many are done, or None if nobody has said.
    """

    model: State
    optim: State
    step: int | None = None
    epoch: int | None = None
    more: State = field(default_factory=dict)


def save_state(folder: Path, state: TrainingState, *, replaces: bool = False) -> Path:
    """Write a DCP folder that an FSDP2 script can load on any number of ranks.

    Raises:
        DcpError: the folder can't be written, or the state has a value that is neither
            a tensor nor plain data.
    """
    tensors: dict[str, Tensor] = {}
    try:
        outline = json.dumps(flatten(state.more, "more", tensors))
    except TypeError as error:
        raise DcpError(f"{folder} cannot be written: {error}") from error
    own: State = {"step": state.step or 0, "epoch": state.epoch or 0}
    own |= {"outline": outline, "tensors": tensors}
    optim = {**state.optim, "state": _filled(state.model, state.optim)}
    nested = {MODEL: state.model, OPTIM: optim, OWN: own}
    return write(folder, nested, replaces=replaces)


def load_state(folder: Path) -> TrainingState:
    """Read a DCP folder that distlab, or a script of FSDP2 or DDP, has written.

    Raises:
        DcpError: the folder isn't one of DCP's, is damaged, or has no model or no
            optimizer.
    """
    nested = read(folder)
    if MODEL not in nested and len(nested) == 1:  # {"app": Stateful} of the tutorial
        (inner,) = nested.values()
        nested = inner if isinstance(inner, dict) else nested
    own = nested.pop(OWN, {})
    optim = nested.pop(OPTIM, None) or nested.pop("optimizer", None)
    model = nested.get(MODEL)
    if model is None:
        model = {name: v for name, v in nested.items() if isinstance(v, Tensor)}
    if not isinstance(model, dict) or not model:
        known = ", ".join(nested) or "nothing"
        raise DcpError(f"{folder} has no {MODEL!r}, only {known}")
    if not isinstance(optim, dict):
        raise DcpError(f"{folder} has no {OPTIM!r}: save the optimizer too")
    if not isinstance(own, dict):
        own = {}
    return TrainingState(
        model=model,
        optim=_nested_optimizer(folder, optim, list(model)),
        step=_number(own.get("step")),
        epoch=_number(own.get("epoch")),
        more=_more_in(folder, own),
    )


def load_more(folder: Path) -> State:
    """Read only `more`, without the model and the optimizer.

    Raises:
        DcpError: the folder isn't one of DCP's, or this part of it is damaged.
    """
    own = read(folder, OWN).get(OWN)
    return _more_in(folder, own if isinstance(own, dict) else {})


def _more_in(folder: Path, own: State) -> State:
    outline = own.get("outline", "null")
    try:
        return restored(json.loads(outline), own.get("tensors", {})) or {}
    except (ValueError, KeyError, TypeError) as error:
        raise DcpError(f"{folder}: its part {OWN!r} is damaged") from error


def _number(value: Any) -> int | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, int | float) else None


def _filled(model: State, optim: State) -> State:
    """Return the optimizer's state with zeros for parameters that have none yet.

    get_state_dict makes an FSDP2 script's optimizer take a step without gradients, so
    the script asks for a state for every parameter, even one that was never used. Zeros
    mean the same as no state.
    """
    states: State = optim["state"]
    known = [(name, own) for name, own in states.items() if own and name in model]
    if not known:
        return states
    name, like = known[0]
    shape = model[name].shape
    if not all(_is_plain(value, shape) for value in like.values()):
        return states
    found = dict(states)
    for group in optim["param_groups"]:
        for one in group["params"]:
            if not found.get(one) and one in model:
                found[one] = {
                    key: _zeros(value, shape, model[one]) for key, value in like.items()
                }
    return found


def _is_plain(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and (not value.dim() or value.shape == shape)


def _zeros(value: Tensor, shape: torch.Size, parameter: Tensor) -> Tensor:
    if value.dim() or value.shape == shape:
        return torch.zeros(parameter.shape, dtype=value.dtype)
    return torch.zeros_like(value)


def _nested_optimizer(folder: Path, optim: State, names: list[str]) -> State:
    """Return "state" and "param_groups" of an optimizer that may be flattened."""
    groups = optim.get("param_groups")
    if isinstance(groups, list):
        for group in groups:
            if not isinstance(group, dict) or not _are_names(group.get("params")):
                raise DcpError(
                    f"{folder}: the optimizer's parameters have no names: save what "
                    "get_state_dict(model, optimizer) returns"
                )
        return {"state": optim.get("state", {}), "param_groups": groups}
    states: dict[str, State] = {}
    settings: dict[str, State] = {}
    by_length = sorted(names, key=len, reverse=True)  # "a.b" before "a"
    for key, value in optim.items():
        kind, _, rest = key.partition(".")
        own = next((n for n in by_length if rest.startswith(f"{n}.")), None)
        if own is None or kind not in ("state", "param_groups"):
            raise DcpError(
                f"{folder}: {key!r} of the optimizer belongs to no parameter"
            )
        target = states if kind == "state" else settings
        target.setdefault(own, {})[rest.removeprefix(f"{own}.")] = value
    found: list[State] = []
    for name in (n for n in names if n in settings):
        wanted = settings[name]
        group = next((one for one in found if {**one, **wanted} == one), None)
        if group is None:
            found.append({**wanted, "params": [name]})
        else:
            group["params"].append(name)
    return {"state": states, "param_groups": found}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
