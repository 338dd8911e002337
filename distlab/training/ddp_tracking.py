"""Log one MLflow run per training: parameters, metrics of each epoch, the digest.

The parent process writes it. No rank needs MLflow, and there is one run rather than one
for each rank. With `--monitor`, we log the figures of the steps while the ranks train.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distlab.cost import SECONDS_AN_HOUR
from distlab.monitor.extras import INSTALL, needed
from distlab.training.ddp import Beside, DdpResult
from distlab.training.ddp_config import DdpConfig


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Where a run was logged."""

    uri: str
    experiment: str
    run_id: str


def require_mlflow() -> Any:
    """Import MLflow and return it.

    Raises:
        ModuleNotFoundError: MLflow isn't installed; the message says how to install it.
    """
    return needed("mlflow", "--track mlflow")


def store_uri(state_folder: Path) -> str:
    """Return where runs go: to MLFLOW_TRACKING_URI, or `state_folder`/mlflow.db."""
    own = os.environ.get("MLFLOW_TRACKING_URI")
    if own:
        return own
    state_folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{(state_folder / 'mlflow.db').resolve()}"


def prepare(dataset: str, uri: str) -> Any:
    """Prepare MLflow before any rank starts, so that no result gets lost.

    Raises:
        ModuleNotFoundError: MLflow, or a library that it needs for this store, is
            missing.
        ValueError: the store can't be used.
    """
    mlflow = require_mlflow()
    if mlflow.active_run() is not None:
        return mlflow  # somebody's own run, in a store and an experiment of theirs
    # A server that is not there is to be known before the training, not minutes later.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        mlflow.set_tracking_uri(uri)
        if not os.environ.get("MLFLOW_RUN_ID"):  # that run has its experiment
            mlflow.set_experiment(experiment_name(dataset))
    except ImportError as error:
        raise ModuleNotFoundError(
            f"--track mlflow needs {error.name}, which is not installed: {INSTALL}"
        ) from error
    except Exception as error:  # MLflow's, SQLAlchemy's or the network's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"MLflow cannot use {uri}: {first}") from error
    return mlflow


def experiment_name(dataset: str) -> str:
    """Return the name of the experiment for the runs of a data set."""
    return f"{dataset}-training"


class TrackedRun:
    """One run, opened before the ranks start: the active one, or else a new one.

    If a training ends with an error, its run gets the status FAILED.
    """

    def __init__(self, mlflow: Any, config: DdpConfig) -> None:
        """Begin the run.

        Raises:
            ValueError: MLflow can't begin it.
        """
        self._mlflow, run = mlflow, mlflow.active_run()
        self._is_ours = run is None
        if run is None:
            try:
                name = f"{config.dataset}-{config.world_size}"
                run = mlflow.start_run(run_name=name)
            except Exception as error:  # MLflow's, SQLAlchemy's or the network's
                first = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(f"MLflow cannot begin a run: {first}") from error
        self._experiment_id, self.run_id = run.info.experiment_id, run.info.run_id

    def finish(
        self,
        result: DdpResult,
        *,
        rate: float,
        beside: Beside | None = None,
        model_file: Path | None = None,
    ) -> Tracked:
        """Log parameters, metrics and the saved model, and end the run."""
        mlflow = self._mlflow
        mlflow.log_params(parameters(result, rate))
        for step, row in enumerate(result.epochs, start=1):
            mlflow.log_metrics(asdict(row), step=step)
        mlflow.log_metrics(metrics(result, rate, beside))
        mlflow.set_tags(
            {
                "digest": result.digests[0],
                "digests_equal": str(len(set(result.digests)) == 1),
                "tool": "distlab ddp",
            }
        )
        if model_file:
            mlflow.log_artifact(str(model_file), artifact_path="model")
        experiment = mlflow.get_experiment(self._experiment_id)
        self._end("FINISHED")
        return Tracked(
            uri=mlflow.get_tracking_uri(),
            experiment=experiment.name,
            run_id=self.run_id,
        )

    def fail(self) -> None:
        """Mark the run as failed, unless it has ended already."""
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if self._is_ours:
            self._is_ours = False
            self._mlflow.end_run(status)


def parameters(result: DdpResult, rate: float) -> dict[str, Any]:
    """Return everything that you need to repeat the training."""
    config = result.config
    return {
        **asdict(config),
        "code": ", ".join(config.code),
        "batch_size": config.samples_per_rank,
        "backend": config.backend,
        "cost_per_worker_hour": rate,
        "host": platform.node(),
        "torch": torch.__version__,
        "num_parameters": result.weights[0].numel(),
    }


def metrics(result: DdpResult, rate: float, beside: Beside | None) -> dict[str, float]:
    """Return the results of the training, as one number each."""
    hours = result.seconds / SECONDS_AN_HOUR
    found = {
        "final_accuracy": result.accuracy,
        "duration_s": result.seconds,
        "cost": result.cost(rate),
        "cost_per_worker": hours * rate,
        "worker_hours": hours * result.config.world_size,
        "final_throughput": result.throughput,
        "communication_share": result.communication,
        "data_wait_share": result.data_wait,
        "step_bytes": result.step_bytes,
        "num_steps": float(result.num_steps),
    }
    if beside:
        found |= {
            "speedup": beside.speedup,
            "difference_to_one_process": beside.difference,
            "difference_after_first_step": beside.first_difference,
        }
    return found
