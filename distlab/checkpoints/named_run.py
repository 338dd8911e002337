"""A saved run under the names of a model's state_dict, and fitted to a run again.

    named     shared, owns ─▶ model and optim by name     as torch's get_state_dict
    for_run   model and optim by name ─▶ shared, owns     for the model and optimizer

Such a state says neither which of its tensors are parameters, nor whether an optimizer
is sharded. We know both only once we have the run that is to be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distlab.checkpoints.training_state import EXTRA, Run, State, plain_name

NAMES = "optimizer_names"
"""Key in the shared state for the parameter names of each optimizer group, in order."""
LAYOUT = "state_dict"
"""Key in the shared state for the names that named_parameters() doesn't tell."""
WHOLE = "whole"
"""Key in the shared state for the model and the optimizer by name."""
APART = "apart"
"""Key in a rank's own state for shared items that turned out to differ by rank."""

_EXTRA_SUFFIX = "._extra_state"  # as in torch's state_dict()


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name without the prefixes of torch.compile and of DDP."""
    found = {name: plain_name(name) for name in names}
    own = [plain for plain in found.values() if not plain.startswith("master ")]
    if own and all(plain.startswith("module.") for plain in own):
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    return found


def layout_of(model: nn.Module) -> State:
    """Return the other names of shared parameters, and the buffers not in state_dict.

    "tied" maps each other name to the first, and "passing" lists the buffers.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        "tied": {n: first[id(p)] for n, p in every if first[id(p)] != n},
        "passing": [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in sorted(module._non_persistent_buffers_set)
        ],
    }


def named(shared: State, owns: list[State]) -> tuple[State, State, State, list[State]]:
    """Return the model and the optimizer by name, and what is left of both states.

    Raises:
        ValueError: the state can't be written under the names of parameters.
    """
    if WHOLE in shared:
        whole = shared[WHOLE]
        rest = {name: v for name, v in shared.items() if name != WHOLE}
        return whole["model"], whole["optim"], rest, owns
    taken = ("parameters", "optimizer", NAMES, LAYOUT)
    rest = {name: value for name, value in shared.items() if name not in taken}
    if "parameters" not in shared:
        raise ValueError(
            "each rank has saved its own parameters, because they differed, and the "
            "other format has room for only one model"
        )
    if rest.get("master"):
        raise ValueError(
            "it has float32 master weights beside the model, for which the other "
            "format has no place"
        )
    layout = shared.get(LAYOUT, {})
    buffers, passing = owns[0].get("buffers", {}), layout.get("passing", [])
    model = shared["parameters"] | {
        name: value for name, value in buffers.items() if name not in passing
    }
    plain = plain_names([*model, *layout.get("tied", {})])
    model = {plain[name]: value for name, value in model.items()}
    for name, first in layout.get("tied", {}).items():
        model[plain[name]] = model[plain[first]]
    for name, value in shared.get(EXTRA, {}).items():
        model[f"{name}{_EXTRA_SUFFIX}" if name else _EXTRA_SUFFIX[1:]] = value
    is_sharded = "optimizer" in owns[0]
    optim = _joined(owns, model) if is_sharded else _by_name(shared)
    left = [{k: v for k, v in own.items() if k != "optimizer"} for own in owns]
    return model, optim, rest, left


def _by_name(shared: State) -> State:
    """Name the parameters of a whole optimizer."""
    names = shared.get(NAMES)
    state = shared.get("optimizer", {})
    if "param_groups" not in state:
        raise ValueError(
            "each rank has saved its own optimizer, because they differed, and the "
            "other format has room for only one"
        )
    if not names or any(name is None for group in names for name in group):
        raise ValueError("its optimizer has parameters that the model doesn't have")
    plain = plain_names(name for group in names for name in group)
    groups: list[State] = []
    by_number: dict[int, str] = {}
    for group, own in zip(state["param_groups"], names, strict=True):
        params = [plain[name] for name in own]
        by_number.update(zip(group["params"], params, strict=True))
        groups.append({**group, "params": params})
    states = {by_number[number]: one for number, one in state["state"].items()}
    return {"state": states, "param_groups": groups}


def _joined(owns: list[State], model: State) -> State:
    """Join the parts of a sharded optimizer, and name its parameters."""
    every = [own["optimizer"] for own in owns]
    groups = every[0]["param_groups"]
    plain = plain_names(name for group in groups for name in group["names"])
    states: State = {}
    for name, to in plain.items():
        found = [one["state"][name] for one in every if name in one["state"]]
        found.sort(key=lambda entry: (int(entry["start"]), int(entry["stop"])))
        if sum(int(one["stop"]) - int(one["start"]) for one in found) != (
            model[to].numel()
        ):
            raise ValueError(f'the optimizer\'s state of "{name}" is incomplete')
        with_values = (one for one in found if one["start"] != one["stop"])
        first: State = next(with_values, {})
        states[to] = {
            key: torch.cat([one[key] for one in found]).view(model[to].shape)
            if _is_per_element(value)
            else value
            for key, value in first.items()
            if key not in ("start", "stop")
        }
    settings = [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [plain[name] for name in group["names"]],
        }
        for group in groups
    ]
    return {"state": states, "param_groups": settings}


def _is_per_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


# ── and fitted to a run ─────────────────────────────────────────────────────────────


def for_run(run: Run, shared: State, owns: list[State]) -> tuple[State, list[State]]:
    """Return a state by names as full_state() returns it; leave any other unchanged.

    Names that the model doesn't have stay among the parameters, so that the usual check
    refuses them.
    """
    if WHOLE not in shared:
        return shared, owns
    model, optim, rest, owns = named(shared, owns)
    every = dict(run.model.named_parameters(remove_duplicate=False))
    own = [name for name, _ in run.model.named_parameters()]
    here = plain_names([*every, *dict(run.model.named_buffers())])
    buffers = {here[name] for name, _ in run.model.named_buffers()}
    others = {here[name] for name in every} - {here[name] for name in own}
    parameters, found, extra = State(), State(), State()
    for name, value in model.items():
        if name.endswith(_EXTRA_SUFFIX) or name == _EXTRA_SUFFIX[1:]:
            extra[name[: -len(_EXTRA_SUFFIX)]] = value
        elif name in buffers:
            found[name] = value
        elif name not in others:
            parameters[name] = value
    rest["parameters"] = parameters
    if extra and EXTRA not in rest:
        rest[EXTRA] = extra
    owns = [{"buffers": found, **one} for one in owns]
    if run.is_sharded:
        owns = [{**one, "optimizer": o} for one, o in _cut(run, optim, len(owns), owns)]
    else:
        rest |= _by_number(run, optim, here)
    return rest, owns


def _cut(
    run: Run, optim: State, size: int, owns: list[State]
) -> Iterable[tuple[State, State]]:
    """Yield each rank's state with the optimizer's: the first one has everything."""
    buckets = getattr(run.optimizer, "buckets", [])
    own = [name for bucket in buckets for name in bucket.names]
    here = {plain: name for name, plain in plain_names(own).items()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [here[name] for name in group["params"] if name in here],
        }
        for group in optim["param_groups"]
    ]
    sizes = dict(run.model.named_parameters())
    states: State = {}
    for name, to in here.items():
        entry = optim["state"].get(name, {})
        states[to] = {"start": 0, "stop": sizes[to].numel()} | {
            key: value.reshape(-1) if _is_per_element(value) else value
            for key, value in entry.items()
        }
    for rank in range(size):
        mine = states if rank == 0 else {}
        yield owns[rank], {"state": mine, "param_groups": groups}


def _by_number(run: Run, optim: State, here: Mapping[str, str]) -> State:
    """Number the parameters as torch's optimizers do, in the run's order."""
    numbers: dict[str, int] = {}
    groups, names = [], []
    of_name = {id(p): here[name] for name, p in run.model.named_parameters()}
    mine = getattr(run.optimizer, "param_groups", [])
    for place, group in enumerate(optim["param_groups"]):
        params, own = list(group["params"]), []
        if place < len(mine):
            own = [of_name.get(id(p), "") for p in mine[place]["params"]]
        if sorted(own) == sorted(params):
            params = own
        for name in params:
            numbers.setdefault(name, len(numbers))
        names.append(params)
        groups.append({**group, "params": [numbers[name] for name in params]})
    states = {numbers[n]: one for n, one in optim["state"].items() if n in numbers}
    return {"optimizer": {"state": states, "param_groups": groups}, NAMES: names}
