"""Move the caller's optimizer to a rank's copy of the model, and name its state.

A caller passes an optimizer, or a function that makes one from the parameters. Such a
function may also use the model directly, for example to give the backbone and the head
different learning rates. Because ranks train copies of the model, we move the optimizer
over to the copies. Checkpoints store its state under the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from distlab.dtensors import gathered
from distlab.engines.expect import EngineError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]
FROM_PARAMETERS = "pass a function that makes it from the parameters"
OF_LOSS = "(loss)."  # prefix for the names of a loss's own parameters
OF_SCHEDULER = {"_opt_called", "step"}  # attributes that an lr scheduler sets


class MakeOnCopy:
    """Calls the caller's function and moves its optimizer to copies of model and loss.

    `pairs` holds each original parameter with its copy. `of_loss` holds copies of the
    loss's own parameters, which the function doesn't need to know about.
    """

    def __init__(self, make: Make, pairs: Pairs, of_loss: list[nn.Parameter]) -> None:
        self._make, self._pairs, self._of_loss = make, pairs, of_loss

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Create the optimizer.

        Raises:
            EngineError: the function didn't return an optimizer, or one with parameters
                that belong to neither the model nor the loss.
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
            raise EngineError(f"can't make the optimizer: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise EngineError(
                f"the function for the optimizer returns a {type(made).__name__}, must "
                "return a torch optimizer"
            )
        if is_scheduled(made):
            raise EngineError(
                "the function for the optimizer makes a learning-rate scheduler, which "
                "the trainer doesn't know: pass scheduler=…, a function that makes it "
                "from the optimizer"
            )
        copies = {id(own): copy for own, copy in self._pairs}
        for group in made.param_groups:
            group["params"] = [copies.get(id(p), p) for p in group["params"]]
        for own in [p for p in made.state if id(p) in copies]:
            made.state[copies[id(own)]] = made.state.pop(own)
        return made


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, of_loss: dict[str, nn.Parameter]
) -> list[str]:
    """Return the names of an optimizer's parameters, in the optimizer's order."""
    by_id = {id(p): OF_LOSS + name for name, p in of_loss.items()}
    by_id |= {id(p): name for name, p in model.named_parameters()}
    return [by_id[id(p)] for p in held_by(optimizer)]


def expect_known(optimizer: torch.optim.Optimizer, known: list[nn.Parameter]) -> None:
    """Refuse an optimizer of another model.

    Raises:
        EngineError: the optimizer has a parameter that isn't among `known`.
    """
    ids = {id(p) for p in known}
    others = [p for p in held_by(optimizer) if id(p) not in ids]
    if others:
        raise EngineError(
            f"the optimizer has {len(others)} parameters that neither the model nor "
            f"the loss has: {FROM_PARAMETERS}"
        )


def expect_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step() recomputes the loss.

    Raises:
        EngineError: step() needs a closure.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise EngineError(
            f"{type(optimizer).__name__} recomputes the loss within a step through a "
            "closure, which the trainer doesn't support: choose another optimizer"
        )


def expect_sendable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that Python can't copy completely.

    Raises:
        EngineError: the optimizer has attributes that a copy would lack.
    """
    whole, kept = vars(optimizer), optimizer.__getstate__()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    lost = whole.keys() - kept.keys() - vars(plain).keys() - OF_SCHEDULER
    if lost:
        raise EngineError(
            f"a copy of {type(optimizer).__name__} would lack {', '.join(sorted(lost))}"
            f": {FROM_PARAMETERS}"
        )


def is_scheduled(optimizer: Any) -> bool:
    """Return True if one of torch's learning-rate schedulers uses this optimizer."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def make_optimizer(
    model: nn.Module, wanted: torch.optim.Optimizer | Make | None
) -> torch.optim.Optimizer:
    """Return the caller's optimizer, or create one with the caller's function.

    The default is AdamW.

    Raises:
        EngineError: the optimizer's step() needs a closure.
    """
    if not isinstance(wanted, torch.optim.Optimizer):
        parameters = [p for p in model.parameters() if p.requires_grad]
        wanted = (wanted or torch.optim.AdamW)(parameters)
    expect_step(wanted)
    return wanted


# ── in a checkpoint ─────────────────────────────────────────────────────────────────


def kept(value: Any) -> Any:
    """Return a full copy of a tensor on the CPU; return anything else unchanged."""
    return (
        gathered(value).detach().cpu().clone() if isinstance(value, Tensor) else value
    )


def named_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Return an optimizer's state_dict on the CPU, with names instead of indices."""
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
    """Return the name of the optimizer's class; look inside a sharding wrapper."""
    inner = getattr(optimizer, "optim", None)
    is_sharded = isinstance(inner, torch.optim.Optimizer)
    return type(inner if is_sharded else optimizer).__name__


def indexed_state(
    state: dict[str, Any], groups: list[dict[str, Any]], names: list[str]
) -> dict[str, Any]:
    """Undo `named_state`, with the settings of `groups`."""
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


def expect_same_kind(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, names: list[str]
) -> None:
    """Refuse the saved state of a different kind of optimizer.

    Raises:
        EngineError: the class differs, or a setting on which the kept state depends.
    """
    own, groups = kind_of(optimizer), optimizer.param_groups
    found = state.get("kind", own)
    saved = state["param_groups"]
    if found == own and saved[0].keys() <= groups[0].keys():
        by_name = {name: group for group in saved for name in group["params"]}
        of_own = (group for group in groups for _ in group["params"])
        for name, now in zip(names, of_own, strict=True):
            _expect_same_state(own, by_name.get(name, now), now)
        return
    what = found if found != own else "another optimizer"
    raise EngineError(
        f"the checkpoint has the state of {what}, but the optimizer is {own}: resume "
        "with the same optimizer, or start a new run from the weights"
    )


def _expect_same_state(kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("amsgrad", "centered", "momentum"):
        was, is_now = bool(before.get(name)), bool(now.get(name))
        if name == "momentum" and (kind != "RMSprop" or was):
            continue  # others begin with a momentum of their own
        if was != is_now:
            raise EngineError(
                f"the checkpoint's optimizer has {name}={before.get(name)}, but "
                f"this one has {now.get(name)}, so they keep different state: use "
                "the same setting"
            )


def expect_same_weights(saved: dict[str, Any], own: dict[str, Any], what: str) -> None:
    """Refuse the weights of another model.

    Raises:
        EngineError: names, shapes or dtypes differ.
    """
    parts = []
    for title, names in (
        (f"in the checkpoint but not the {what}", saved.keys() - own.keys()),
        (f"in the {what} but not the checkpoint", own.keys() - saved.keys()),
    ):
        if names:
            parts.append(f"{title}, {_some(sorted(names))}")
    for what_differs, of in (("shapes", _shape_of), ("dtypes", _dtype_of)):
        differ = [
            f"{name} {of(saved[name])} and {of(own[name])}"
            for name in sorted(own.keys() & saved.keys())
            if of(own[name]) is not None and of(saved[name]) != of(own[name])
        ]
        if differ:
            parts.append(f"{what_differs} differ, of {_some(differ)}")
    if parts:
        raise EngineError(
            f"the checkpoint does not fit this {what}: {'; '.join(parts)}"
        )


def _shape_of(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)  # extra state may be anything
    return None if shape is None else tuple(shape)


def _dtype_of(value: Any) -> Any:
    return getattr(value, "dtype", None)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
