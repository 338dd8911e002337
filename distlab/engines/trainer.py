"""A training in an ordinary script: it starts the ranks itself and trains the model.

    trainer = PyTorchDDPTrainer(model, num_gpus=4, epochs=3)
    history = trainer.fit(train_loader, val_loader)

The ranks train copies; `model` then has the weights they arrived at. Under torchrun,
srun or `distlab train` the same script is one rank, and fit() takes part in that job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.config import CORE, config_from
from distlab.engines.expect import EngineError, expect_int
from distlab.engines.history import History
from distlab.engines.job import Job, Outcome
from distlab.engines.rank import number
from distlab.engines.records import TrackedRun
from distlab.engines.samples import Loading, read_loader
from distlab.engines.start import Starter, is_rank, run


class Trainer:
    """What the trainers of all torch engines have in common.

    `optimizer` is one on `model`'s parameters, or a function of the parameters that
    makes one; AdamW by default. `loss(outputs, targets)` is a mean over the samples;
    cross-entropy by default. All other arguments are fields of DistributedConfig.

    Limits: the state of an optimizer that was handed in stays with the ranks.

    Raises:
        EngineError: a field is misspelt, cannot be, or contradicts another.
    """

    backends: tuple[str, ...] = CORE
    starter: Starter | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
        verbose: bool = True,
        **config: Any,
    ) -> None:
        self.model = model
        self.loss: Callable[..., Tensor] = loss or nn.functional.cross_entropy
        self.optimizer, self.verbose = optimizer, verbose
        if "backend" not in config and len(self.backends) == 1:
            config["backend"] = self.backends[0]
        self.config = config_from(config)
        if self.config.backend not in self.backends:
            known = ", ".join(self.backends)
            raise EngineError(
                f"{type(self).__name__} has backends {known}, not {self.config.backend}"
            )
        self.history: History | None = None
        self.runs_jobs_with = run

    @property
    def best_accuracy(self) -> float | None:
        """Of the last fit."""
        return self.history.best_accuracy if self.history else None

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        mlflow_experiment: str | None = None,
        max_steps: int | None = None,
        single_throughput: float | None = None,
    ) -> History:
        """Train `model`; each rank gets its part of the loaders' samples.

        `single_throughput`, of one process, gives History.speedup.

        Raises:
            EngineError: the training cannot begin, or a rank failed; one line.
        """
        job = self._job(train_loader, val_loader, checkpoint_dir, max_steps)
        if mlflow_experiment is not None and not job.config.mlflow_tracking:
            job = replace(job, config=replace(job.config, mlflow_tracking=True))
        tracked = (
            None if _is_other_rank() else TrackedRun(job.config, mlflow_experiment)
        )
        try:
            outcome = self._run(
                replace(job, mlflow_run=tracked.place if tracked else None)
            )
        except BaseException:
            if tracked:
                tracked.end("FAILED")
            raise
        if tracked:
            tracked.end("FINISHED")
        self._take(outcome.weights)
        self.history = replace(outcome.history, single_throughput=single_throughput)
        return self.history

    def _take(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    def _run(self, job: Job) -> Outcome:
        return self.runs_jobs_with(job, self.starter)

    def _loading(self, given: Any, batch_size: int | None, what: str) -> Loading:
        return read_loader(given, batch_size, what)

    def _sent(self, train: Loading) -> Any:
        """The model as the ranks are given it."""
        return self.model

    def _job(
        self,
        train_loader: Any,
        val_loader: Any,
        checkpoint_dir: str | Path | None,
        max_steps: int | None,
    ) -> Job:
        config = self.config
        if checkpoint_dir is not None:
            config = replace(config, checkpoint_dir=checkpoint_dir)
        if max_steps is not None:
            expect_int("max_steps", max_steps, 1)
        val = None
        if val_loader is not None:
            val = self._loading(val_loader, None, "val_loader")
        train = self._loading(train_loader, config.batch_size, "train_loader")
        return Job(
            model=self._sent(train),
            loss=self.loss,
            optimizer=self.optimizer,
            train=train,
            val=val,
            config=_absolute(config),
            max_steps=max_steps,
            verbose=self.verbose,
        )


class PyTorchDDPTrainer(Trainer):
    """Trains with torch's DDP; `backend` may also be fsdp2 or scratch.

    Example: see the module.
    """


def _absolute(config: Any) -> Any:
    """The ranks may work in another folder."""
    names = ("checkpoint_dir", "tensorboard_dir")
    paths = {n: Path(getattr(config, n)).resolve() for n in names if getattr(config, n)}
    source = config.resume_from_checkpoint
    if not isinstance(source, bool):
        paths["resume_from_checkpoint"] = Path(source).resolve()
    return replace(config, **paths)


def _is_other_rank() -> bool:
    return is_rank() and number() != 0
