"""Serve a `/metrics` page for Prometheus from the run itself, with prometheus-client.

The names follow Prometheus's rules: base units and a common prefix. All metrics have
the label `job`, so set honor_labels: true in Prometheus's scrape_config, or else it
renames the label to exported_job. Those called `distlab_rank_…` also have a label
`rank`, and the others describe the whole run. `grafana.json` in the same folder is a
dashboard for them.

Source: prometheus.io/docs/prometheus/latest/configuration/configuration, scrape_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distlab.monitor.extras import needed
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


class Prometheus:
    """Serves the newest figures on `http://{address}:{port}/metrics`.

    If you pass port 0, we use any free one, which you find in `port`. `run` may have
    "job", "world_size" and "restarts".

    Raises:
        ModuleNotFoundError: prometheus-client isn't installed.
        OSError: the port is in use, or we aren't allowed to use it.
    """

    def __init__(
        self,
        port: int,
        *,
        address: str = "127.0.0.1",
        run: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        client = needed("prometheus_client", "the Prometheus endpoint")
        self.name = f"the Prometheus endpoint on port {port}"
        self._client, self._registry = client, client.CollectorRegistry()
        self._job = str(run.get("job", "run"))
        self._gauges: dict[str, Any] = {}
        self._counters = {name: self._counter(name) for name in COUNTERS}
        self._num_restarts = 0
        self._count_restarts(int(run.get("restarts", 0)))
        if "world_size" in run:
            self._set_figure("world_size", run["world_size"])
        try:
            self._server, self._thread = client.start_http_server(
                port, addr=address, registry=self._registry
            )
        except OSError as error:
            raise OSError(f"port {port} on {address}: {error.strerror}") from error
        self.address, self.port = address, int(self._server.server_port)

    def record(self, record: StepRecord) -> None:
        """Set the gauges of one rank; the run's steps are those of rank 0."""
        if record.rank == 0:
            self._counters["steps"].inc(record.num_steps)
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
                gauge = self._gauge(name, text, "rank")
                gauge.labels(job=self._job, rank=str(record.rank)).set(value)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Set the gauges of the whole run; "restarts" counts the restarts so far."""
        self._set("step", "Steps that all ranks have done", step)
        for figure, value in figures.items():
            if figure == "restarts":
                self._count_restarts(int(value))
            else:
                self._set_figure(figure, value)

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _count_restarts(self, number: int) -> None:
        self._counters["restarts"].inc(max(0, number - self._num_restarts))
        self._num_restarts = max(number, self._num_restarts)

    def _set_figure(self, figure: str, value: float) -> None:
        name, text = OF_RUN.get(figure, (figure, figure))
        self._set(name, text, value)

    def _set(self, name: str, text: str, value: float) -> None:
        self._gauge(name, text).labels(job=self._job).set(value)

    def _counter(self, name: str) -> Any:
        counter = self._client.Counter(
            PREFIX + name, COUNTERS[name], ("job",), registry=self._registry
        )
        return counter.labels(job=self._job)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        if name not in self._gauges:
            gauge = self._client.Gauge(
                PREFIX + name, text, ("job", *labels), registry=self._registry
            )
            self._gauges[name] = gauge
        return self._gauges[name]
