"""What all ranks of a training are given, as a value that travels to other processes.

cloudpickle writes it: classes and functions of the caller's script, which no other
process could import, travel with it.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from distlab.engines.config import DistributedConfig
from distlab.engines.history import History
from distlab.engines.samples import Loading


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training. The ranks train a copy of `model`; `optimizer` is on the original."""

    model: Any
    """A torch module; for backend tensorflow a KerasModel, which has its own
    loss and optimizer."""
    loss: Callable[..., Tensor]
    optimizer: Any
    train: Loading
    val: Loading | None
    config: DistributedConfig
    max_steps: int | None = None
    mlflow_run: tuple[str, str] | None = None
    """The tracking server and the id of a run that the caller keeps open."""
    verbose: bool = True

    def with_copy(self) -> Job:
        """The same with a copy of the model, and of the optimizer on that copy."""
        wanted = self.optimizer
        if not isinstance(wanted, torch.optim.Optimizer):
            return replace(self, model=copy.deepcopy(self.model))
        model, optimizer = copy.deepcopy((self.model, wanted))
        return replace(self, model=model, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank gives back."""

    history: History
    weights: dict[str, Tensor]


def write(value: Any, path: Path) -> None:
    """Write a value for another process of this Python on this machine."""
    with path.open("wb") as file:
        # First where to look for modules: what follows may need them to be read.
        pickle.dump([os.path.abspath(folder) for folder in sys.path], file)
        cloudpickle.dump(value, file)


def read(path: Path) -> Any:
    """What `write` wrote. Runs code in it: for files that this process trusts."""
    with path.open("rb") as file:
        folders = pickle.load(file)
        sys.path += [folder for folder in folders if folder not in sys.path]
        return pickle.load(file)
