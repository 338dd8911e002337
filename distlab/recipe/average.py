"""An exponential moving average (EMA) of the weights, which is what is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """average = decay · average + (1 - decay) · weights, after each step.

    Buffers, such as the running statistics of batch norm, are those of the model. In
    step t the decay is at most t / (t + 9), so the first weights are soon forgotten. If
    an element becomes inf or nan, it restarts from the current weights.

    The arithmetic is that of torch.optim.swa_utils. We don't use its AveragedModel,
    because it copies the module, which FSDP2 forbids.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging
    (1992); Tarvainen and Valpola (arXiv 1703.01780), section 2, for the exponential
    form; the limit of the first steps is that of TensorFlow's
    ExponentialMovingAverage, with num_updates.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"an average's decay is {decay}, must be in 0 … 1")
        self.decay, self.num_updates = decay, 0
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's weights; sends nothing.

        Raises:
            ValueError: a parameter has been added to the model.
        """
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        own = {n: p.detach() for n, p in model.named_parameters()}
        if added := next((name for name in own if name not in self.weights), None):
            raise ValueError(
                f"the average has no {added}, which was added to the model later: "
                "make a new WeightAverage"
            )
        averages = [self.weights[name] for name in own]
        lost = [~average.isfinite() for average in averages]
        get_ema_multi_avg_fn(decay)(averages, [*own.values()], None)
        for average, weights, is_lost in zip(averages, own.values(), lost, strict=True):
            average.copy_(torch.where(is_lost, weights, average))

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """In this block the model has the average's weights."""
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        _copy(self.weights, model)
        try:
            yield
        finally:
            _copy(own, model)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"num_updates": self.num_updates, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`.

        Raises:
            ValueError: the state is from a model with other parameters. The average is
                then unchanged.
        """
        own = {name: tuple(one.shape) for name, one in self.weights.items()}
        saved = {name: tuple(one.shape) for name, one in state["weights"].items()}
        if own != saved:
            name = next(n for n in [*own, *saved] if own.get(n) != saved.get(n))
            raise ValueError(
                f"the average is from another model: {name} has the shape "
                f"{own.get(name)} here, but {saved.get(name)} in the state"
            )
        self.num_updates = state["num_updates"]
        for name, weights in state["weights"].items():
            self.weights[name].copy_(weights)


@torch.no_grad()
def _copy(weights: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
