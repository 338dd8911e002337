"""The parts of a training that the trainer of unit imagenet_trainer receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distlab.checkpoints.training_state import State, Stateful
from distlab.comm import Comm


class Engine(Protocol):
    """Data parallelism: when backward() returns, every .grad is the mean over ranks."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this block, let backward() only add to .grad and send nothing."""

    def whole(self) -> nn.Module:
        """Return a model with all weights and buffers on every rank; collective."""


class Scaler(Protocol):
    """A loss scaler such as that of 2.7; call unscale_, step, update in this order."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once per step; collective."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless a rank's gradients overflowed; return True if it stepped."""

    def update(self) -> None:
        """Set the scale for the next step."""

    def state_dict(self) -> State:
        """Return the state, as in `Stateful`."""

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, as in `Stateful`."""


class NoScaler:
    """A scaler for float32 and bfloat16 with a scale of 1, which takes every step."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss itself."""
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step and return True."""
        optimizer.step()
        return True

    def update(self) -> None:
        """Do nothing."""

    def state_dict(self) -> State:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


class Loader(Stateful, Protocol):
    """A loader as in 1.10 and 1.15, which can load a position within an epoch."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`; an epoch that is new starts at its first batch."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield this rank's (inputs, targets) of each remaining global batch."""


class Average(Stateful, Protocol):
    """An average of the weights over the steps, as in distlab/recipe/average.py."""

    def update(self, model: nn.Module) -> None:
        """Add the weights of the model to the average."""

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this block, give the model the averaged weights."""


class NoAverage:
    """A stand-in for an average, with which you evaluate the weights themselves."""

    def update(self, model: nn.Module) -> None:
        """Do nothing."""

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave the model's weights as they are."""
        return nullcontext()

    def state_dict(self) -> State:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


class Metrics(NamedTuple):
    """The mean loss and the accuracy over the held-out samples of all ranks."""

    loss: float
    accuracy: float


@dataclass(kw_only=True)
class Job:
    """The parts of a training on one rank; every rank has the same kinds of parts.

    `model` is the module itself, but in training you call `engine` instead of it.
    `prepare` augments a batch, given the epoch. `evaluate(model)` covers the samples of
    all ranks exactly and is collective; it switches to evaluation mode and back.
    `settings` must be the same in a run that continues from a checkpoint as in the run
    that saved it.
    """

    comm: Comm
    model: nn.Module
    engine: Engine
    optimizer: torch.optim.Optimizer
    scheduler: Any  # Stateful; scheduler.step() sets the next learning rate
    loader: Loader
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    evaluate: Callable[[nn.Module], Any]
    scaler: Scaler
    average: Average
    hook: Any = None  # a compression hook, or None
    clip_norm: float = float("inf")
    grad_accum_steps: int = 1
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = (
        lambda inputs, targets, epoch: (inputs, targets)
    )
    settings: dict[str, Any] = field(default_factory=dict)


class FullBatches:
    """A loader that leaves out the last batch of an epoch if that batch is smaller.

    Batch norm over a single sample, or a rank without any, would spoil the step. The
    order differs from epoch to epoch, so each time other samples are left out.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_full: int = loader.num_samples // loader.global_batch_size
        if self.num_full == 0:
            raise ValueError(
                f"--global-batch-size {loader.global_batch_size}: there are "
                f"{loader.num_samples} samples to train on"
            )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return int(self.loader.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`, as in `Loader`."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the full batches that remain, as in `Loader`."""
        for batch in self.loader:  # run to the end, so the next loop starts over
            if self.loader.num_delivered <= self.num_full:
                yield batch

    def state_dict(self) -> State:
        """Return the state of the loader inside."""
        state: State = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Any) -> None:
        """Load the state of the loader inside."""
        self.loader.load_state_dict(state)
