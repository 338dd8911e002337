"""Log the figures of a run's steps as metrics of an MLflow run that is already open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlab.monitor.records import StepRecord


class MLflow:
    """Logs `step/<figure>` into the run `run_id`; `mlflow` is the library itself.

    We don't log the records of single ranks: a server gets one row for all of them.
    """

    name = "MLflow"

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow, self._run_id = mlflow, run_id

    def record(self, record: StepRecord) -> None:
        """Do nothing, because the server only gets rows for all ranks."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each of the run's curves."""
        named = {f"step/{name}": value for name, value in figures.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def close(self) -> None:
        """Do nothing, because the caller who opened the run also ends it."""
