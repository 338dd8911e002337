"""The job of a training, as a value that we can send to other processes.

We write it with cloudpickle, so it may include classes and functions of the caller's
script, which other processes couldn't import.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from distlab.engines.callbacks import Callback
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.history import History
from distlab.engines.loaders import Loading
from distlab.engines.losses import own_parameters
from distlab.engines.optimizers import MakeOnCopy
from distlab.engines.schedules import is_scheduler


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training; ranks train copies of `model`, and `optimizer` is on the original."""

    model: Any
    """A torch module, or for the backend tensorflow a KerasModel, which has its own
    loss and optimizer."""
    loss: Callable[..., Tensor]
    optimizer: Any
    scheduler: Any = None
    """A torch scheduler on `optimizer`, or a function that creates one from it."""
    scheduler_interval: str = "epoch"
    train: Loading
    val: Loading | None
    config: DistributedConfig
    max_steps: int | None = None
    mlflow_run: tuple[str, str] | None = None
    """The tracking server and the id of a run that the caller keeps open."""
    verbose: bool = True
    callbacks: tuple[Callback, ...] = ()
    keeps_optimizer: bool = False
    """True if the outcome includes the optimizer's state."""

    def with_copy(self) -> TrainingJob:
        """Return the job with copies of model and loss, and its optimizer on them.

        Raises:
            EngineError: Python can't copy them.
        """
        model, loss, wanted = self.model, self.loss, self.optimizer
        scheduler = self.scheduler
        # We don't copy a plain function, but we do copy a module with its methods.
        owner = getattr(loss, "__self__", loss)
        ours = [model, loss if isinstance(owner, nn.Module) else None]
        if isinstance(wanted, torch.optim.Optimizer):
            ours.append(wanted)
            if is_scheduler(scheduler):  # also refers to the optimizer
                ours.append(scheduler)
        try:
            model, own_loss, *optimizer = copy.deepcopy(ours)
        except (TypeError, AttributeError, RuntimeError, pickle.PickleError) as error:
            raise EngineError(f"the model can't be copied: {first_line(error)}") from (
                error
            )
        loss = loss if own_loss is None else own_loss
        if is_scheduler(scheduler):
            scheduler = optimizer.pop()
        if not optimizer and isinstance(model, nn.Module):
            pairs = [
                *zip(self.model.parameters(), model.parameters(), strict=True),
                *zip(_parameters(self.loss), _parameters(loss), strict=True),
            ]
            of_loss = own_parameters(loss, model).values()
            learns = [p for p in of_loss if p.requires_grad]
            optimizer = [MakeOnCopy(wanted or torch.optim.AdamW, pairs, learns)]
        return replace(
            self,
            model=model,
            loss=loss,
            optimizer=next(iter(optimizer), None),
            scheduler=scheduler,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result that a rank returns."""

    history: History
    weights: dict[str, Any]
    loss_weights: dict[str, Any] = field(default_factory=dict)
    """The weights of a loss that is a module."""
    optimizer_state: dict[str, Any] | None = None
    """The state, by names, of an optimizer that the caller passed in."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """The state of the scheduler."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _parameters(loss: Any) -> list[nn.Parameter]:
    return [*loss.parameters()] if isinstance(loss, nn.Module) else []


def write(value: Any, path: Path) -> None:
    """Write a value for another process of this Python on this machine."""
    with path.open("wb") as file:
        # First where to look for modules: what follows may need them to be read.
        pickle.dump([os.path.abspath(folder) for folder in sys.path], file)
        cloudpickle.dump(value, file)


def read(path: Path) -> Any:
    """Read what `write` wrote; this runs code in the file, so you must trust it."""
    with path.open("rb") as file:
        folders = pickle.load(file)
        sys.path += [folder for folder in folders if folder not in sys.path]
        return pickle.load(file)
