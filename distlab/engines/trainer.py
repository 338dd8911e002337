"""Train a model from an ordinary script, which starts the ranks itself.

    trainer = PyTorchDDPTrainer(model, num_gpus=4, epochs=3)
    history = trainer.fit(train_loader, val_loader)

The ranks train copies, and `model` gets the final weights. Under torchrun, srun or
`distlab train`, the same script runs as one rank, and fit() takes part in that job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.callbacks import Callback, expect_callbacks
from distlab.engines.config import FOLDERS, config_from
from distlab.engines.deepspeed_config import optimizer_in, scheduler_in
from distlab.engines.expect import EngineError, expect_int
from distlab.engines.history import History
from distlab.engines.job import Outcome, TrainingJob
from distlab.engines.loaders import Loading, read_loader
from distlab.engines.losses import own_parameters
from distlab.engines.optimizers import (
    expect_known,
    expect_sendable,
    expect_step,
    indexed_state,
    is_scheduled,
    names_of,
)
from distlab.engines.records import TrackedRun
from distlab.engines.schedules import (
    expect_interval,
    expect_scheduler,
    give_back,
    is_scheduler,
)
from distlab.engines.start import run
from distlab.engines.strategies import (
    Starter,
    find_strategy,
    is_rank,
    rank_of_launcher,
    strategies,
    strategy_names,
)


class Trainer:
    """Base class of the trainers for all torch engines.

    `optimizer` is an optimizer on `model`'s parameters, or a function that creates one
    from the parameters. The default is AdamW. `loss(outputs, targets)` must be a mean
    over the samples, and the default is cross-entropy. We account for the divisor of
    torch's cross_entropy and nll_loss if they have class weights or ignored targets,
    and for reduction="sum". If the loss is a module with parameters, we train those as
    well.

    `scheduler` is one of torch's learning-rate schedulers on `optimizer`, or a function
    that creates one from it. We step it after each epoch, or after each step if you set
    scheduler_interval="step". ReduceLROnPlateau watches the validation's loss, or its
    accuracy with mode="max". `callbacks` run your code at certain points, see
    callbacks.py. All other arguments are fields of DistributedConfig.

    Raises:
        EngineError: a field is misspelt or invalid, or contradicts another.
    """

    backends: tuple[str, ...] = ()
    """The strategies that it runs on; () means all that train torch modules."""
    starter: Starter | None = None
    address: str | None = None
    """The address of a Ray cluster."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
        scheduler: Any = None,
        scheduler_interval: str = "epoch",
        callbacks: Sequence[Callback] = (),
        verbose: bool = True,
        **config: Any,
    ) -> None:
        self.model = model
        self.callbacks = expect_callbacks(callbacks)
        if optimizer is None and is_scheduler(scheduler):
            optimizer = scheduler.optimizer
        self.scheduler, self.scheduler_interval = scheduler, scheduler_interval
        self.loss: Callable[..., Tensor] = loss or nn.functional.cross_entropy
        self.optimizer, self.verbose = optimizer, verbose
        if "backend" not in config and len(self.backends) == 1:
            config["backend"] = self.backends[0]
        self.config = config_from(config)
        able = self.backends or strategy_names("torch")
        if self.config.backend not in able:
            known = ", ".join(able)
            raise EngineError(
                f"{type(self).__name__} has backends {known}, not {self.config.backend}"
            )
        self._take_deepspeeds()
        self._expect_scheduler()
        self.history: History | None = None
        self.runs_jobs_with = run

    @property
    def best_accuracy(self) -> float | None:
        """Return the best accuracy of the last fit."""
        return self.history.best_accuracy if self.history else None

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        mlflow_experiment: str | None = None,
        max_steps: int | None = None,
        single_throughput: float | None = None,
        epochs: int | None = None,
    ) -> History:
        """Train `model` on ranks that each get their part of the loaders' samples.

        `checkpoint_dir` and `epochs` replace those of the configuration. If you pass
        the `single_throughput` that you measured with one process, you get
        History.speedup.

        Raises:
            EngineError: the training can't start, or a rank failed; the message is one
                line.
        """
        self._expect_trainable()
        given = {"checkpoint_dir": checkpoint_dir, "epochs": epochs}
        job = self._job(train_loader, val_loader, given, max_steps)
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
        self._take(outcome)
        self.history = replace(outcome.history, single_throughput=single_throughput)
        return self.history

    def _take(self, outcome: Outcome) -> None:
        """Load the ranks' results into the caller's model, loss and optimizer."""
        model = unwrapped(self.model)
        model.load_state_dict(outcome.weights)
        if isinstance(self.loss, nn.Module):
            self.loss.load_state_dict(outcome.loss_weights)
        own = self.optimizer
        if isinstance(own, torch.optim.Optimizer) and outcome.optimizer_state:
            names = names_of(own, model, own_parameters(self.loss, model))
            state = indexed_state(outcome.optimizer_state, own.param_groups, names)
            own.load_state_dict(state)
        if is_scheduler(self.scheduler) and outcome.schedule:
            give_back(self.scheduler, outcome.schedule)

    def _take_deepspeeds(self) -> None:
        """Take optimizer and scheduler from DeepSpeed's configuration."""
        more = self.config.deepspeed_config
        if not isinstance(more, dict):
            return
        made = {"optimizer": optimizer_in(more), "scheduler": scheduler_in(more)}
        for name, make in made.items():
            if make is None:
                continue
            if getattr(self, name) is not None:
                raise EngineError(
                    f"{name} is given, but deepspeed_config has one too: leave one of "
                    "them out"
                )
            setattr(self, name, make)
            if name == "scheduler":
                self.scheduler_interval = "step"

    def _expect_scheduler(self) -> None:
        if self.scheduler is None:
            if self.scheduler_interval != "epoch":
                raise EngineError(
                    f"scheduler_interval is {self.scheduler_interval!r}, but there is "
                    "no scheduler"
                )
            return
        expect_interval(self.scheduler, self.scheduler_interval)
        rate = self.config.learning_rate
        expect_scheduler(self.scheduler, self.optimizer, rate)

    def _expect_trainable(self) -> None:
        """Refuse a model, loss or optimizer that no rank could train with.

        Raises:
            EngineError: the message names the reason.
        """
        if not isinstance(self.model, nn.Module):
            raise EngineError(
                f"the model is a {type(self.model).__name__}, must be a torch module"
            )
        model = unwrapped(self.model)
        of_loss = [*own_parameters(self.loss, model).values()]
        parameters = [*model.parameters(), *of_loss]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise EngineError(
                "the model has lazy layers, whose shapes are not known yet: call it "
                "with a batch first"
            )
        if any(p.is_meta for p in parameters):
            raise EngineError(
                "the model is on the meta device, so it has no values to train: call "
                "to_empty() and initialize it first"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise EngineError(
                "no parameter of the model has requires_grad, so nothing would learn"
            )
        entry = find_strategy(self.config.backend)
        if any(p.requires_grad for p in of_loss) and not entry.trains_loss:
            known = ", ".join(one.name for one in strategies() if one.trains_loss)
            raise EngineError(
                f"the loss has parameters, but backend {self.config.backend} does not "
                f"train them: choose {known}"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            expect_known(self.optimizer, parameters)
            expect_step(self.optimizer)
            expect_sendable(self.optimizer)
        elif self.optimizer is not None and not callable(self.optimizer):
            raise EngineError(
                f"optimizer is a {type(self.optimizer).__name__}, must be a torch "
                "optimizer or a function that makes one"
            )

    def _run(self, job: TrainingJob) -> Outcome:
        entry = find_strategy(job.config.backend)
        if entry.train is not None and not is_rank():
            outcome: Outcome = entry.train(job, self.address)
            return outcome
        return self.runs_jobs_with(job, self.starter or entry.start_ranks)

    def _loading(self, given: Any, batch_size: int | None, what: str) -> Loading:
        return read_loader(given, batch_size, what)

    def _sent(self, train: Loading) -> Any:
        """Return the model that we send to the ranks."""
        return unwrapped(self.model)

    def _job(
        self,
        train_loader: Any,
        val_loader: Any,
        given: dict[str, Any],
        max_steps: int | None,
    ) -> TrainingJob:
        changes = {name: value for name, value in given.items() if value is not None}
        config = replace(self.config, **changes)
        if config.checkpoint_frequency > 1 and config.checkpoint_dir is None:
            raise EngineError(
                f"checkpoint_frequency is {config.checkpoint_frequency}, but there is "
                "no checkpoint_dir to save to"
            )
        if config.checkpoint_format != "pt" and config.checkpoint_dir is None:
            raise EngineError(
                f"checkpoint_format is {config.checkpoint_format}, but there is no "
                "checkpoint_dir to save to"
            )
        if max_steps is not None:
            expect_int("max_steps", max_steps, 1)
        own = self.optimizer
        has_own = isinstance(own, torch.optim.Optimizer)
        is_left_out = has_own and is_scheduled(own) and self.scheduler is None
        if is_left_out and config.epochs > 1:
            raise EngineError(
                "the optimizer has a learning-rate scheduler, which fit() doesn't "
                "know: pass it as scheduler=…"
            )
        val = None
        if val_loader is not None:
            val = self._loading(val_loader, None, "val_loader")
        train = self._loading(train_loader, config.batch_size, "train_loader")
        return TrainingJob(
            model=self._sent(train),
            loss=self.loss,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scheduler_interval=self.scheduler_interval,
            train=train,
            val=val,
            config=_absolute(config),
            max_steps=max_steps,
            verbose=self.verbose,
            callbacks=self.callbacks,
            keeps_optimizer=has_own and find_strategy(config.backend).keeps_optimizer,
        )


class PyTorchDDPTrainer(Trainer):
    """Trains with torch's DDP, or with another `backend` for torch modules.

    strategies.py has their table.

    Example: see the module.
    """


def unwrapped(model: Any) -> Any:
    """Unwrap a model from DataParallel or DDP, because the ranks wrap it themselves."""
    from distlab.distributed import DistributedDataParallel as Ours

    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel, Ours
    return model.module if isinstance(model, wrappers) else model


def _absolute(config: Any) -> Any:
    """Return the configuration with absolute paths, as ranks may use another folder."""
    given = [name for name in FOLDERS if getattr(config, name)]
    paths = {name: Path(getattr(config, name)).resolve() for name in given}
    source = config.resume_from_checkpoint
    if not isinstance(source, bool):
        paths["resume_from_checkpoint"] = Path(source).resolve()
    return replace(config, **paths)


def _is_other_rank() -> bool:
    return is_rank() and rank_of_launcher() != 0
