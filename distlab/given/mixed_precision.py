"""The parts of a loss scaler that its task does not teach.

They refuse settings that can't work, calls in the wrong order and gradients that arrive
too late, let a sharded optimizer average its gradients first, read saved states, and
keep the scale in a useful range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

SMALLEST, LARGEST = 2.0**-64, 2.0**126
_RANGE = f"{SMALLEST:.1e} … {LARGEST:.1e}"


class LateGradients:
    """Notices gradients that arrive after an optimizer's gradients were unscaled.

    If backward() adds a scaled gradient to one that has already been divided, no later
    division can undo the mistake. Nor can a later call undo a second step() with the
    same gradients, or an update() between the microbatches of one step, whose gradients
    then have different scales.
    """

    def __init__(self) -> None:
        self._without: dict[Any, list[Tensor]] = {}  # optimizer: those without gradient
        self._stepped: list[Any] = []  # optimizers; a learner's may have no hash
        self._late: set[Tensor] = set()
        self._owner: dict[Tensor, Any] = {}
        self._hooks: list[Any] = []

    def look(self, optimizer: Any) -> None:
        """Check the gradients when unscale_() begins, including when step() calls it.

        This is collective if the optimizer is sharded.

        Raises:
            ValueError: a gradient is sparse.
            RuntimeError: backward() has run for a parameter of this optimizer since its
                gradients were unscaled, or another optimizer with the same parameter
                has already unscaled its gradients in this step.
        """
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer in self._without:
            late = {p for p in own if p in self._late}
            late |= {p for p in self._without[optimizer] if p.grad is not None}
            if late:
                raise RuntimeError(
                    f"backward() has run for {len(late)} parameters after unscale_() "
                    "divided their optimizer's gradients: call unscale_() and step() "
                    "after the last backward(), and update() before the next step"
                )
            return
        if any(p in self._owner for p in own):
            raise RuntimeError(
                "a parameter has two optimizers, and the other one has already "
                "unscaled its gradient: call update() between their steps"
            )
        if hasattr(optimizer, "reduce_gradients") and not optimizer.is_reduced:
            optimizer.reduce_gradients()
        if any(p.grad is not None and p.grad.is_sparse for p in own):
            raise ValueError(
                "a gradient is sparse, so a loss scaler can't check it: use dense "
                "gradients, for example with nn.Embedding(…, sparse=False)"
            )
        self._without[optimizer] = [p for p in own if p.grad is None]
        for parameter in own:
            self._owner[parameter] = optimizer
            if parameter.requires_grad and parameter.is_leaf:
                add = parameter.register_post_accumulate_grad_hook
                self._hooks.append(add(self._late.add))

    def begin_step(self, optimizer: Any) -> None:
        """Check that step() is the first one for this optimizer since update().

        Raises:
            RuntimeError: it isn't.
        """
        if any(one is optimizer for one in self._stepped):
            raise RuntimeError(
                "step() has already been called for this optimizer since the last "
                "update(), so the same gradients would count twice: call update() "
                "after each step"
            )
        self._stepped.append(optimizer)

    def end_step(self) -> None:
        """Start over when update() ends a step.

        Raises:
            RuntimeError: no optimizer has stepped since the last update().
        """
        if not (self._stepped or self._without):
            raise RuntimeError(
                "update() was called, but there has been no step() since the last "
                "update(): if a step has several microbatches, call step() and "
                "update() once, after the last one"
            )
        self.forget()

    def forget(self) -> None:
        """Start over, because the next gradients are new."""
        for hook in self._hooks:
            hook.remove()
        self._stepped = []
        self._without, self._late, self._owner, self._hooks = {}, set(), {}, []


def check_scaling(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    """Refuse settings that keep the scale from adapting.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    if not SMALLEST <= init_scale <= LARGEST:
        raise ValueError(f"init_scale is {init_scale}, must be in {_RANGE}")
    if not 1 <= growth_factor < math.inf:
        raise ValueError(f"growth_factor is {growth_factor}, must be at least 1")
    if not 0 < backoff_factor < 1:
        raise ValueError(f"backoff_factor is {backoff_factor}, must be in 0 … 1")
    if growth_interval < 1:
        raise ValueError(f"growth_interval is {growth_interval}, must be at least 1")


def read_state(state: Any) -> tuple[float, int]:
    """Return the scale and the number of good steps in a saved state.

    You can pass the state of torch's GradScaler. We take over only these two numbers
    from it, because the new scaler keeps the factors and the interval that you
    constructed it with.

    Raises:
        ValueError: the state isn't a loss scaler's, or its values can't be right.
    """
    found = dict(state) if isinstance(state, Mapping) else {}
    names = next((names for names in _STATES if found.keys() >= set(names)), None)
    if names is None:
        keys = ", ".join(map(repr, found)) or "nothing"
        raise ValueError(
            f"this isn't the state of a loss scaler: it has {keys}, but not "
            f"{' and '.join(map(repr, _STATES[0]))} (or, from torch's GradScaler, "
            f"{' and '.join(map(repr, _STATES[1]))}, which it lacks if it is disabled)"
        )
    try:
        scale, good_steps = float(found[names[0]]), int(found[names[1]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"a loss scaler's state can't be read: {error}") from error
    if not SMALLEST <= scale < math.inf or good_steps < 0:
        raise ValueError(
            f"a loss scaler's state has {names[0]}={scale} and {names[1]}="
            f"{good_steps}: the scale must be finite and at least {SMALLEST:.1e}, and "
            "the count at least 0"
        )
    return min(scale, LARGEST), good_steps


_STATES = (("loss_scale", "good_steps"), ("scale", "_growth_tracker"))


def in_range(scale: float) -> float:
    """Return the scale, but no more than LARGEST.

    Raises:
        FloatingPointError: the scale is so small that it can't be causing an overflow.
    """
    if not scale >= SMALLEST:  # also true for nan
        raise FloatingPointError(
            f"the loss scale has shrunk to {scale:.1e}, but gradients are still inf or "
            "nan, so the scale isn't the cause: look for inf and nan in the inputs, "
            "the loss and the weights"
        )
    return min(scale, LARGEST)
