"""Write rank 0's figures to the terminal, MLflow and TensorBoard."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.history import EpochRow
from distlab.engines.job import TrainingJob
from distlab.monitor import Monitor, Sink, StepRecord
from distlab.monitor.extras import needed
from distlab.monitor.sinks import announced, num_restarts, open_sinks


class Records:
    """The sinks of one training, which only rank 0 has.

    Raises:
        ModuleNotFoundError: MLflow or TensorBoard isn't installed.
    """

    def __init__(self, job: TrainingJob, rank: int) -> None:
        sinks = make_sinks(job) if rank == 0 else []
        self._config = job.config
        self._monitor = Monitor(job.config.world_size, sinks)
        self._is_first = rank == 0
        self._says = rank == 0 and job.verbose
        self._num_epochs = job.config.epochs

    def open_folder(self, step: int) -> None:
        """Open `monitor_dir`, if there is one; a resumed run continues after `step`.

        Raises:
            EngineError: the folder has the records of another run, or a port is taken.
        """
        config = self._config
        if not self._is_first or config.monitor_dir is None:
            return
        run = {
            "tool": "distlab.engines",
            "world_size": config.world_size,
            "backend": config.backend,
            "epochs": config.epochs,
            "checkpoint_dir": str(config.checkpoint_dir or ""),
        }
        same = None
        if config.resume_from_checkpoint and config.checkpoint_dir:
            same = {"checkpoint_dir": run["checkpoint_dir"]}
        elif num_restarts():
            same = {"backend": config.backend}  # the folder is of its first start
        folder = Path(config.monitor_dir)
        try:
            sinks = open_sinks(folder, run, config.also, same=same, after=step)
        except (ValueError, OSError, ImportError) as error:
            said = " ".join(str(error).split())
            raise EngineError(f"monitor_dir: {said}") from error
        self._monitor.add(sinks)
        if self._says:
            for line in announced(folder, sinks):
                print(f"figures: {line}", flush=True)

    def ranks(self, records: Sequence[StepRecord]) -> None:
        """Write all ranks' records of the same steps."""
        for record in records:
            self._monitor.hear(record)

    def steps(self, step: int, figures: dict[str, float]) -> None:
        """Write the figures of the steps up to `step`."""
        self._monitor.figures(step, {**figures, **gpu_figures()})

    def epoch(self, step: int, row: EpochRow) -> None:
        """Write the figures of an epoch, and print a line."""
        named = {
            "epoch_loss": row.loss,
            "val_loss": row.val_loss,
            "accuracy": row.accuracy,
        }
        if self._config.monitor_dir is not None:
            named["validation_loss"], named["validation_accuracy"] = (
                row.val_loss,
                row.accuracy,
            )
        self._monitor.figures(step, {k: v for k, v in named.items() if v is not None})
        if self._says:
            print(line_of(row, self._num_epochs), flush=True)

    def warn(self, text: str) -> None:
        """Print a line on stderr, even if `verbose` is off."""
        if self._is_first:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the sinks."""
        self._monitor.close()


def line_of(row: EpochRow, num_epochs: int) -> str:
    """Format an epoch as a line."""
    words = [f"epoch {row.epoch}/{num_epochs}", f"loss {row.loss:.4f}"]
    if row.val_loss is not None:
        words.append(f"validation {row.val_loss:.4f}")
    if row.accuracy is not None:
        words.append(f"accuracy {row.accuracy:.4f}")
    return "  ".join([*words, f"{row.throughput:.0f} samples/s"])


def make_sinks(job: TrainingJob) -> list[Sink]:
    """Create the sinks that the configuration names."""
    sinks: list[Sink] = []
    if job.config.tensorboard:
        from distlab.monitor.tensorboard import TensorBoard

        sinks.append(TensorBoard(Path(job.config.tensorboard_dir or "runs")))
    if job.mlflow_run:
        from distlab.monitor.mlflow import MLflow

        uri, run_id = job.mlflow_run
        mlflow = needed("mlflow", "mlflow_tracking")
        mlflow.set_tracking_uri(uri)
        sinks.append(MLflow(mlflow, run_id))
    return sinks


def gpu_figures() -> dict[str, float]:
    """Return this rank's GPU utilisation in percent, if the driver tells us."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {"gpu_utilisation": float(torch.cuda.utilization())}
    except (ImportError, RuntimeError):  # without nvidia-ml-py, or without rights
        return {}


class TrackedRun:
    """The MLflow run of a training: the active one, or one that we start.

    Without `mlflow_tracking`, it does nothing.

    Raises:
        ModuleNotFoundError: MLflow isn't installed.
        EngineError: MLflow can't start a run.
    """

    def __init__(self, config: DistributedConfig, experiment: str | None) -> None:
        self.place: tuple[str, str] | None = None
        self._mlflow: Any = None
        self._is_ours = False
        if not config.mlflow_tracking:
            return
        mlflow = self._mlflow = needed("mlflow", "mlflow_tracking")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        run = mlflow.active_run()
        self._is_ours = run is None
        try:
            if run is None:
                mlflow.set_experiment(experiment or config.mlflow_experiment)
                run = mlflow.start_run(run_name=f"{config.backend}-{config.world_size}")
            named = {k: v for k, v in vars(config).items() if v is not None}
            mlflow.log_params(
                {**named, "num_gpus": config.world_size}, run_id=run.info.run_id
            )
        except Exception as error:  # MLflow's, SQLAlchemy's or the network's
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise EngineError(f"MLflow cannot begin a run: {first}") from error
        self.place = mlflow.get_tracking_uri(), run.info.run_id

    def end(self, status: str) -> None:
        """End the run if we started it."""
        if self._is_ours:
            self._is_ours = False
            self._mlflow.end_run(status)
