"""Name the figures of a run as metrics, for databases such as Prometheus.

The names follow Prometheus's rules: base units and a common prefix. Those called
`distlab_rank_…` have a label `rank`, and the others describe the whole run.
`grafana.json` in the same folder is a dashboard for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distlab.monitor.records import StepRecord

OF_RUN = {
    "loss": ("loss", "Mean training loss over all ranks' samples"),
    "learning_rate": ("learning_rate", "Learning rate"),
    "grad_norm": ("gradient_norm", "Norm of the averaged gradient"),
    "throughput": ("throughput_samples_per_second", "Samples of all ranks in a second"),
    "step_s": ("step_seconds", "Duration of a step, of the slowest rank"),
    "data_wait_share": ("data_wait_ratio", "Share of time spent waiting for data"),
    "communication_share": (
        "communication_ratio",
        "Share of time spent in exposed communication",
    ),
    "compute_share": ("compute_ratio", "Share of time spent in everything else"),
    "memory_bytes": ("memory_bytes", "Peak memory of the rank that has most"),
    "gpu_utilization": ("gpu_utilization_ratio", "Share of time a kernel ran"),
    "mfu": ("mfu_ratio", "Model FLOPs utilization"),
    "validation_loss": ("validation_loss", "Loss on held-out samples"),
    "validation_accuracy": ("validation_accuracy_ratio", "Accuracy on held-out ones"),
    "epoch": ("epoch", "Epoch of the newest step, counted from 1"),
    "world_size": ("world_size", "Ranks of the run"),
}
"""Figure → name after the prefix, and help text."""

COUNTERS = {
    "steps": "Steps that this process has heard of",
    "restarts": "Restarts of all ranks by their launcher",
}
"""Name after the prefix, to which Prometheus adds _total, and help text."""

PREFIX = "distlab_"


class Metrics:
    """A sink that knows what each metric is called; a subclass sets the values.

    `run` may have "job", "world_size" and "restarts".
    """

    def __init__(self, run: Mapping[str, Any]) -> None:
        self.job = str(run.get("job", "run"))
        self._num_restarts = 0
        self.count("steps", 0)
        self._count_restarts(int(run.get("restarts", 0)))
        if "world_size" in run:
            self._set_figure("world_size", run["world_size"])

    def count(self, name: str, number: int) -> None:
        """Add `number` to a counter of COUNTERS."""
        raise NotImplementedError

    def set(self, name: str, text: str, value: float, rank: int | None = None) -> None:
        """Set a gauge, of one rank or of the whole run; `text` explains it."""
        raise NotImplementedError

    def record(self, record: StepRecord) -> None:
        """Set the gauges of one rank; the run's steps are those of rank 0."""
        if record.rank == 0:
            self.count("steps", record.num_steps)
        figures = {
            "rank_step": (record.step, "Steps that this rank has done"),
            "rank_loss": (record.loss, "Mean training loss of this rank's samples"),
            "rank_step_seconds": (record.step_s, "Duration of a step of this rank"),
            "rank_data_wait_ratio": (
                record.data_wait_share,
                "Share of time this rank waited for data",
            ),
            "rank_communication_ratio": (
                record.communication_share,
                "Share of time this rank spent in exposed communication",
            ),
            "rank_last_record_timestamp_seconds": (
                record.time_s,
                "Unix time of this rank's newest record",
            ),
        }
        for name, (value, text) in figures.items():
            if value is not None:
                self.set(name, text, value, record.rank)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Set the gauges of the whole run; "restarts" counts the restarts so far."""
        self.set("step", "Steps that all ranks have done", step)
        for figure, value in figures.items():
            if figure == "restarts":
                self._count_restarts(int(value))
            else:
                self._set_figure(figure, value)

    def _count_restarts(self, number: int) -> None:
        self.count("restarts", max(0, number - self._num_restarts))
        self._num_restarts = max(number, self._num_restarts)

    def _set_figure(self, figure: str, value: float) -> None:
        name, text = OF_RUN.get(figure, (figure, figure))
        self.set(name, text, value)
