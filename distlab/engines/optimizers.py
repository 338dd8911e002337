"""The caller's optimizer: on the ranks' copy of the model, and by name in a checkpoint.

A caller gives an optimizer, or a function that makes one from the parameters. The
function may also reach for the model by itself, for one rate for the backbone and
another for the head. Ranks train copies, so what it has made is moved over to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.expect import EngineError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]
FROM_PARAMETERS = "pass a function that makes it from the parameters"
OF_LOSS = "(loss)."  # before the names of the parameters that a loss has itself
OF_SCHEDULER = {"_opt_called", "step"}  # what a learning-rate scheduler leaves there


class MakeOnCopy:
    """A caller's function, whose optimizer is on copies of model and loss.

    `pairs` are the original parameters and their copies; `of_loss` are copies too, of
    the parameters that the loss trains: the function need not know of them.
    """

    def __init__(self, make: Make, pairs: Pairs, of_loss: list[nn.Parameter]) -> None:
        self._make, self._pairs, self._of_loss = make, pairs, of_loss

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Make it.

        Raises:
            EngineError: it is no optimizer, or on parameters of something else.
        """
        made = self._made(parameters)
        held = {id(p) for p in held_by(made)}
        if any(id(p) not in held for p in self._of_loss):
            made = self._made([*parameters, *self._of_loss])
        known = [copy for _, copy in self._pairs]
        expect_known(made, known)
        return made

    def _made(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made = self._make(parameters)
        except (TypeError, ValueError) as error:
            raise EngineError(f"the optimizer cannot be made: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise EngineError(
                f"the function for the optimizer gives a {type(made).__name__}, must "
                "give a torch optimizer"
            )
        copies = {id(own): copy for own, copy in self._pairs}
        for group in made.param_groups:
            group["params"] = [copies.get(id(p), p) for p in group["params"]]
        for own in [p for p in made.state if id(p) in copies]:
            made.state[copies[id(own)]] = made.state.pop(own)
        return made


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, of_loss: dict[str, nn.Parameter]
) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    by_id = {id(p): OF_LOSS + name for name, p in of_loss.items()}
    by_id |= {id(p): name for name, p in model.named_parameters()}
    return [by_id[id(p)] for p in held_by(optimizer)]


def expect_known(optimizer: torch.optim.Optimizer, known: list[nn.Parameter]) -> None:
    """Refuse an optimizer of another model.

    Raises:
        EngineError: it has a parameter that is not among `known`.
    """
    ids = {id(p) for p in known}
    others = [p for p in held_by(optimizer) if id(p) not in ids]
    if others:
        raise EngineError(
            f"the optimizer has {len(others)} parameters that neither the model nor "
            f"the loss has: {FROM_PARAMETERS}"
        )


def expect_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step computes the loss again.

    Raises:
        EngineError: step() needs a closure.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise EngineError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by "
            "a closure, which the trainer has none of: choose another optimizer"
        )


def expect_sendable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that Python can't copy whole.

    Raises:
        EngineError: it has attributes that a copy lacks.
    """
    whole, kept = vars(optimizer), optimizer.__getstate__()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    lost = whole.keys() - kept.keys() - vars(plain).keys() - OF_SCHEDULER
    if lost:
        raise EngineError(
            f"a copy of {type(optimizer).__name__} would lack {', '.join(sorted(lost))}"
            f": {FROM_PARAMETERS}"
        )


def make_optimizer(
    model: nn.Module, wanted: torch.optim.Optimizer | Make | None
) -> torch.optim.Optimizer:
    """The caller's optimizer, or what the caller's function makes; AdamW by default.

    Raises:
        EngineError: it needs what the training does not have.
    """
    if not isinstance(wanted, torch.optim.Optimizer):
        parameters = [p for p in model.parameters() if p.requires_grad]
        wanted = (wanted or torch.optim.AdamW)(parameters)
    expect_step(wanted)
    return wanted


# ── in a checkpoint ─────────────────────────────────────────────────────────────────


def full(value: Any) -> Any:
    """A DTensor as the plain tensor that all shards are together; collective then."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def kept(value: Any) -> Any:
    """A tensor whole and on the CPU; anything else as it is."""
    return full(value).detach().cpu().clone() if isinstance(value, Tensor) else value


def named_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """An optimizer's state_dict with names in place of numbers, on the CPU."""
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {
        names[index]: {key: kept(value) for key, value in own.items()}
        for index, own in sorted(state["state"].items())
    }
    return {"kind": kind_of(optimizer), "state": values, "param_groups": groups}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class; of a sharded one, of that which is sharded."""
    inner = getattr(optimizer, "optim", None)
    is_sharded = isinstance(inner, torch.optim.Optimizer)
    return type(inner if is_sharded else optimizer).__name__


def indexed_state(
    state: dict[str, Any], groups: list[dict[str, Any]], names: list[str]
) -> dict[str, Any]:
    """The reverse of `named_state`, with the settings of `groups`."""
    number = {name: index for index, name in enumerate(names)}
    indices = iter(range(len(names)))
    return {
        "state": {
            number[name]: dict(own)
            for name, own in state["state"].items()
            if name in number
        },
        "param_groups": [
            {**group, "params": [next(indices) for _ in group["params"]]}
            for group in groups
        ],
    }


def expect_same_kind(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of an optimizer that computes something else.

    Raises:
        EngineError: it is of another class, or has a setting that needs other state.
    """
    own, groups = kind_of(optimizer), optimizer.param_groups
    found = state.get("kind", own)
    saved = state["param_groups"]
    if found == own and saved[0].keys() <= groups[0].keys():
        before, now = saved[0], groups[0]
        for name in ("amsgrad", "centered"):
            if bool(before.get(name)) != bool(now.get(name)):
                raise EngineError(
                    f"the checkpoint's optimizer has {name}={before.get(name)}, this "
                    f"one has {now.get(name)}: they keep different state"
                )
        return
    what = found if found != own else "another optimizer"
    raise EngineError(
        f"the checkpoint has the state of {what}, but the optimizer is {own}: resume "
        "with the same optimizer, or begin anew with the weights"
    )


def expect_same_weights(saved: dict[str, Any], own: dict[str, Any], what: str) -> None:
    """Refuse the weights of another model.

    Raises:
        EngineError: names, shapes or dtypes differ.
    """
    parts = []
    for title, names in (
        (f"the checkpoint has, but the {what} has not", saved.keys() - own.keys()),
        (f"the {what} has, but the checkpoint has not", own.keys() - saved.keys()),
    ):
        if names:
            parts.append(f"{title}, {_some(sorted(names))}")
    shapes = {
        name: (tuple(saved[name].shape), tuple(own[name].shape))
        for name in own
        if name in saved and hasattr(own[name], "shape")
        if getattr(saved[name], "shape", None) != own[name].shape
    }
    if shapes:
        shown = [f"{name} {a} and {b}" for name, (a, b) in sorted(shapes.items())]
        parts.append(f"shapes differ, of {_some(shown)}")
    dtypes = {
        name: (saved[name].dtype, own[name].dtype)
        for name in own
        if name in saved and hasattr(own[name], "dtype")
        if getattr(saved[name], "dtype", None) != own[name].dtype
    }
    if dtypes:
        shown = [f"{name} {a} and {b}" for name, (a, b) in sorted(dtypes.items())]
        parts.append(f"dtypes differ, of {_some(shown)}")
    if parts:
        raise EngineError(
            f"the checkpoint does not fit this {what}: {'; '.join(parts)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
