"""Run code of your own at certain points of a training run.

    class StopAtAccuracy(Callback):
        def on_epoch_end(self, training: Training) -> None:
            if training.rows[-1].accuracy > 0.95:
                training.stop()

    PyTorchDDPTrainer(model, callbacks=[StopAtAccuracy()]).fit(train_loader, val_loader)

If there are several ranks, each of them is a process with its own copies of the
callbacks. A callback that collects something therefore has to write it to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distlab.engines.expect import EngineError
from distlab.engines.history import EpochRow
from distlab.monitor.profile import StepProfiler


@dataclass
class Training:
    """What a callback sees of the training run on its rank."""

    rank: int
    world_size: int
    device: torch.device
    model: Any
    """The wrapped model, such as a DDP module or an FSDP2 one."""
    optimizer: Any
    step: int = 0
    """Steps taken since the run began, including those before a checkpoint."""
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    rows: list[EpochRow] = field(default_factory=list)
    """The epochs that are complete."""
    wants_to_stop: bool = False

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch, counted from 1."""
        return len(self.rows) + 1

    def stop(self) -> None:
        """Stop the training run on all ranks, even if only one of them asks for it.

        In the middle of an epoch, they stop at the next step where losses are summed
        across ranks, which happens every `log_every_n_steps` steps.
        """
        self.wants_to_stop = True


class Callback:
    """Override what you need; each method gets the state of the training run.

    A method may communicate only if it does so on every rank.
    """

    def on_train_begin(self, training: Training) -> None:
        """Run before the first step, or after a checkpoint was loaded."""

    def on_step_end(self, training: Training) -> None:
        """Run after each step of the optimizer."""

    def on_epoch_end(self, training: Training) -> None:
        """Run after each epoch and its validation, also if the epoch was cut short.

        `training.rows[-1]` has its figures. Its checkpoint is saved after that.
        """

    def on_train_end(self, training: Training) -> None:
        """Run at the end, also if the training run fails on this rank."""


class Profile(Callback):
    """Writes a `torch.profiler` trace of a few steps into a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._profiler: StepProfiler | None = None

    def on_train_begin(self, training: Training) -> None:
        """Start the profiler.

        Raises:
            EngineError: the folder can't be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(
                f"profile_dir {self.folder} cannot be created: {error.strerror}"
            ) from error
        self._profiler = StepProfiler(self.folder, training.rank, training.device)

    def on_step_end(self, training: Training) -> None:
        """Note the end of a step."""
        if self._profiler:
            self._profiler.end_step()

    def on_train_end(self, training: Training) -> None:
        """Write what has been recorded, if that hasn't happened yet."""
        if self._profiler:
            self._profiler.close()


def expect_callbacks(given: Any) -> tuple[Callback, ...]:
    """Return the callbacks that the caller has passed as a list or a tuple.

    Raises:
        EngineError: one of them isn't an instance of Callback.
    """
    if isinstance(given, Callback) or not isinstance(given, Sequence):
        raise EngineError(
            f"callbacks is a {type(given).__name__}, must be a list of callbacks"
        )
    for one in given:
        if isinstance(one, type) and issubclass(one, Callback):
            raise EngineError(
                f"callbacks has the class {one.__name__}: pass an instance, "
                f"{one.__name__}()"
            )
        if not isinstance(one, Callback):
            raise EngineError(
                f"callbacks has a {type(one).__name__}, must be a Callback of "
                "distlab.engines"
            )
    return tuple(given)
