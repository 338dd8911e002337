"""What the trainer of unit imagenet_trainer is given: the parts of a job, made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.training_state import State, Stateful


class Engine(Protocol):
    """Data parallelism: when backward() returns, every .grad is the mean over ranks."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs of the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a forward and its backward(): it only adds to .grad, sends nothing."""

    def whole(self) -> nn.Module:
        """Collective: a model with all weights, and the same buffers on every rank."""


class Scaler(Protocol):
    """A loss scaler, such as that of 2.7: unscale_, step, update, in this order."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once per step. Collective."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, unless a rank's gradients overflowed; whether it stepped."""

    def update(self) -> None:
        """Set the scale for the next step."""

    def state_dict(self) -> State:
        """See Stateful."""

    def load_state_dict(self, state: State) -> None:
        """See Stateful."""


class NoScaler:
    """For float32 and bfloat16: the scale is 1, and every step is taken."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step."""
        optimizer.step()
        return True

    def update(self) -> None:
        """Nothing to do."""

    def state_dict(self) -> State:
        """No state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """No state."""


class Loader(Stateful, Protocol):
    """A loader as in 1.10 and 1.15; after load_state_dict it is within an epoch."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`; another epoch starts at its first batch."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """This rank's (inputs, targets) of each remaining global batch."""


class Average(Stateful, Protocol):
    """An average of the weights over the steps, as in distlab/recipe/average.py."""

    def update(self, model: nn.Module) -> None:
        """Take the weights of the model into the average."""

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """In this block the model has the average's weights."""


class NoAverage:
    """Without an average: evaluation is that of the weights themselves."""

    def update(self, model: nn.Module) -> None:
        """Nothing to do."""

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model keeps its weights."""
        return nullcontext()

    def state_dict(self) -> State:
        """No state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """No state."""


class Metrics(NamedTuple):
    """The mean loss and the accuracy over the held-out samples of all ranks."""

    loss: float
    accuracy: float


@dataclass(kw_only=True)
class Job:
    """The parts of a training, on one rank. They are the same kind on every rank.

    `model` is the module itself, and `engine` is called instead of it in training.
    `prepare` augments a batch, for the epoch. `evaluate(model)` is exact over all
    ranks: collective, in evaluation mode, and back. `settings` are those that a run
    which goes on from a checkpoint has in common with the one that saved it.
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
    """A loader without the last batch of an epoch, if that one is smaller.

    Batch norm over one sample, or a rank without a sample, would spoil that step. The
    order differs from epoch to epoch, so other samples are left out each time.
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
        """See Loader."""
        return int(self.loader.epoch)

    def set_epoch(self, epoch: int) -> None:
        """See Loader."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """See Loader."""
        for batch in self.loader:  # run to the end, so the next loop starts over
            if self.loader.num_delivered <= self.num_full:
                yield batch

    def state_dict(self) -> State:
        """See Stateful."""
        state: State = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Any) -> None:
        """See Stateful."""
        self.loader.load_state_dict(state)
