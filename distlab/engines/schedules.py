"""Use one of torch's learning-rate schedulers on any engine.

    scheduler's rates ─▶ × lr_scaling, × warm-up ─▶ the optimizer of the rank

A caller passes a scheduler on their own optimizer, or a function that creates one from
the optimizer. On each rank, the scheduler works on the rank's optimizer. It never sees
the factors of lr_scaling and warmup_epochs, so it can't mistake a scaled rate for its
own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from distlab.engines.expect import EngineError, expect_among
from distlab.engines.history import EpochRow

INTERVALS = ("epoch", "step")
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
CYCLED = ("momentum", "betas")  # OneCycleLR and CyclicLR change these too


class Schedule:
    """A rank's scheduler and its current rates.

    Raises:
        EngineError: the caller's function fails, or doesn't return a scheduler.
    """

    def __init__(
        self,
        wanted: Any,
        optimizer: torch.optim.Optimizer,
        rates: list[float],
        interval: str,
    ) -> None:
        self.interval, self.rates = interval, rates
        self._optimizer = optimizer
        self._set_rates()
        if is_scheduler(wanted):
            self._scheduler = wanted
            _move(wanted, optimizer)
        else:
            self._scheduler = _made(wanted, optimizer)
        expect_interval(self._scheduler, interval)
        self._take_rates()
        groups = optimizer.param_groups
        self._base = [float(group.get("initial_lr", group["lr"])) for group in groups]

    def step(self, row: EpochRow | None = None) -> list[float]:
        """Step, and return the rates after this step or after the epoch of `row`.

        Raises:
            EngineError: the scheduler refuses to continue, such as OneCycleLR after its
                last step, or it watches an accuracy that doesn't exist.
        """
        self._set_rates()
        watched = self._watched(row) if isinstance(self._scheduler, Plateau) else ()
        with warnings.catch_warnings():
            # torch can't see that the optimizer, a copy, has taken its step.
            warnings.simplefilter("ignore", UserWarning)
            try:
                self._scheduler.step(*watched)
            except (ValueError, TypeError) as error:
                raise EngineError(f"the scheduler failed: {error}") from error
        self._take_rates()
        return self.rates

    def _watched(self, row: EpochRow | None) -> tuple[float]:
        assert row is not None
        if self._scheduler.mode == "min":
            return (row.loss if row.val_loss is None else row.val_loss,)
        if row.accuracy is None:
            raise EngineError(
                "ReduceLROnPlateau with mode='max' watches the validation's accuracy, "
                "and there is none: pass a val_loader, or choose mode='min'"
            )
        return (row.accuracy,)

    def state(self) -> dict[str, Any]:
        """Return everything that `load` needs to continue, as plain data."""
        groups = self._optimizer.param_groups
        return {
            "kind": type(self._scheduler).__name__,
            "interval": self.interval,
            "base": self._base,
            "rates": self.rates,
            "cycled": [{n: g[n] for n in self._cycled() if n in g} for g in groups],
            "state": self._scheduler.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> list[float]:
        """Continue with a saved `state`; return the rates.

        Raises:
            EngineError: another scheduler saved it, or one that began at another rate.
        """
        own = self.state()
        for name, what in WHAT.items():
            if saved[name] != own[name]:
                raise EngineError(
                    f"{what} {_shown(own[name])}, but the checkpoint's is "
                    f"{_shown(saved[name])}: resume with the same one"
                )
        self._scheduler.load_state_dict(saved["state"])
        self.rates = list(saved["rates"])
        groups = self._optimizer.param_groups
        for group, cycled in zip(groups, saved["cycled"], strict=True):
            group.update(cycled)
        return self.rates

    def _cycled(self) -> tuple[str, ...]:
        return CYCLED if getattr(self._scheduler, "cycle_momentum", False) else ()

    def _set_rates(self) -> None:
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate

    def _take_rates(self) -> None:
        self.rates = [float(group["lr"]) for group in self._optimizer.param_groups]


WHAT = {
    "kind": "the scheduler is",
    "interval": "scheduler_interval is",
    "base": "the learning_rate that the scheduler starts from is",
}


def is_scheduler(value: Any) -> bool:
    """Return True for a scheduler, and False for a function that creates one."""
    parts = "step", "state_dict", "load_state_dict"
    return not isinstance(value, type) and all(hasattr(value, n) for n in parts)


def expect_interval(scheduler: Any, interval: str) -> None:
    """Refuse an interval that doesn't exist or doesn't suit the scheduler.

    Raises:
        EngineError: the message names both.
    """
    expect_among("scheduler_interval", interval, INTERVALS)
    if isinstance(scheduler, Plateau) and interval == "step":
        raise EngineError(
            "ReduceLROnPlateau looks at the loss of an epoch, but scheduler_interval "
            "is step: leave it out"
        )


def give_back(scheduler: Any, saved: dict[str, Any]) -> None:
    """Bring the caller's scheduler, and its optimizer's rates, to a saved `state`."""
    scheduler.load_state_dict(saved["state"])
    groups = scheduler.optimizer.param_groups
    parts = zip(groups, saved["rates"], saved["cycled"], strict=True)
    for group, rate, cycled in parts:
        group.update({"lr": rate, **cycled})


def expect_scheduler(wanted: Any, optimizer: Any, learning_rate: Any) -> None:
    """Require a scheduler or a function that creates one, before ranks start.

    Raises:
        EngineError: the message says what it must be.
    """
    if not is_scheduler(wanted):
        if callable(wanted):
            return
        raise EngineError(
            f"scheduler is a {type(wanted).__name__}, must be a torch scheduler or a "
            "function that makes one from the optimizer"
        )
    if wanted.optimizer is not optimizer:
        raise EngineError(
            "the scheduler is on another optimizer than the trainer: pass the "
            "scheduler's optimizer, or a function that makes it from the optimizer"
        )
    if learning_rate is not None:
        raise EngineError(
            f"learning_rate is {learning_rate:g}, but the scheduler has its "
            "optimizer's: leave learning_rate out, or pass a function that makes the "
            "scheduler from the optimizer"
        )


def _made(make: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        made = make(optimizer)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise EngineError(f"can't make the scheduler: {error}") from error
    if not is_scheduler(made):
        raise EngineError(
            f"the function for the scheduler returns a {type(made).__name__}, must "
            "return a torch scheduler"
        )
    return made


def _move(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a scheduler, and those that it consists of, work on `optimizer`."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _move(inner, optimizer)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{one:g}" for one in value)
    return str(value)
