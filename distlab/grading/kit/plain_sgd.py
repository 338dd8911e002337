"""Plain SGD without torch's compiler: beside the ranks, and on them.

To make, or step, an optimizer of torch's imports its compiler: a second and a half, in
the process that otherwise never needs it.

Source: the formula in the documentation of `torch.optim.SGD`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class PlainSGD:
    """Groups with `lr`, `momentum`, `weight_decay` and `dampening`.

    `param_groups` and `state` are as torch's SGD has them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float = 0.0
    ) -> None:
        usual = {"lr": lr, "momentum": momentum, "weight_decay": 0, "dampening": 0}
        self.param_groups = [usual | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """A step along the gradients; a parameter without one stays as it is."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _step_of(self, parameter: Tensor, group: dict[str, Any]) -> None:
        change = parameter.grad
        assert change is not None
        if group["weight_decay"]:
            change = change.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            kept = self.state.get(parameter)
            if kept is None:
                kept = self.state[parameter] = {"momentum_buffer": change.clone()}
            else:
                kept["momentum_buffer"].mul_(group["momentum"])
                kept["momentum_buffer"].add_(change, alpha=1 - group["dampening"])
            change = kept["momentum_buffer"]
        parameter.add_(change, alpha=-group["lr"])


class CountedSGD(torch.optim.SGD):
    """Plain SGD that counts its steps; torch's own would import its compiler."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad
