"""Figures of a run's steps as metrics of an MLflow run that somebody has opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlab.monitor.records import StepRecord


class MLflow:
    """Logs `step/<figure>` into the run `run_id`; `mlflow` is the library itself.

    The records of single ranks are left out: a server gets one row for all of them.
    """

    name = "MLflow"

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow, self._run_id = mlflow, run_id

    def record(self, record: StepRecord) -> None:
        """Nothing: see the class."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """One point of each of the run's curves."""
        named = {f"step/{name}": value for name, value in figures.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def close(self) -> None:
        """Nothing: who opened the run ends it."""
