"""Send the figures of a run to an OpenTelemetry collector, with OpenTelemetry's SDK.

We use OTLP over HTTP, which Prometheus and most vendors' databases understand too. The
metrics have the same names as in `prometheus`, and the job is the resource's
`service.name`, from which Prometheus makes its label `job`. The SDK's own variables
apply: OTEL_EXPORTER_OTLP_ENDPOINT and …_HEADERS say where and how to send, and
OTEL_METRIC_EXPORT_INTERVAL how often, in milliseconds (default: every minute).

Source: opentelemetry.io/docs/specs/otel/protocol/exporter;
opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics, for `job`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distlab.monitor.extras import needed
from distlab.monitor.metrics import COUNTERS, PREFIX, Metrics


class OpenTelemetry(Metrics):
    """Sends the newest figures to `endpoint`, such as http://127.0.0.1:4318/v1/metrics.

    Without an endpoint, the SDK's variables name one, and by default it is port 4318 on
    this machine. `run` may have "job", "world_size" and "restarts".

    Raises:
        ModuleNotFoundError: the SDK or its exporter isn't installed.
    """

    name = "OpenTelemetry"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        run: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        exporters = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
        metrics = needed("opentelemetry.sdk.metrics", self.name)
        export = needed("opentelemetry.sdk.metrics.export", self.name)
        resources = needed("opentelemetry.sdk.resources", self.name)
        exporter = needed(exporters, self.name).OTLPMetricExporter(endpoint)
        send, pid = exporter.export, os.getpid()

        def send_from_here(*given: Any, **named: Any) -> Any:
            # The SDK starts its thread again in each process that we fork, such as
            # data workers, and their figures are out of date.
            if os.getpid() == pid:
                return send(*given, **named)
            return export.MetricExportResult.SUCCESS

        exporter.export = send_from_here
        self.endpoint = endpoint
        job = str(run.get("job", "run"))
        self._provider = metrics.MeterProvider(
            [export.PeriodicExportingMetricReader(exporter)],
            resources.Resource.create({"service.name": job}),
            shutdown_on_exit=False,
        )
        self._meter = self._provider.get_meter("distlab")
        self._metrics: dict[str, Any] = {}
        super().__init__(run)

    def count(self, name: str, number: int) -> None:
        """Add `number` to a counter of COUNTERS."""
        self._metric(self._meter.create_counter, name, COUNTERS[name]).add(number)

    def set(self, name: str, text: str, value: float, rank: int | None = None) -> None:
        """Set a gauge, of one rank or of the whole run; `text` explains it."""
        labels = {} if rank is None else {"rank": str(rank)}
        self._metric(self._meter.create_gauge, name, text).set(value, labels)

    def close(self) -> None:
        """Send the last figures, and end the SDK's thread."""
        self._provider.shutdown()

    def _metric(self, create: Any, name: str, text: str) -> Any:
        if name not in self._metrics:
            self._metrics[name] = create(PREFIX + name, description=text)
        return self._metrics[name]
