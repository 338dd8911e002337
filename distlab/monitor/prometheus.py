"""Serve a `/metrics` page for Prometheus from the run itself, with prometheus-client.

All metrics have the label `job`, so set honor_labels: true in Prometheus's
scrape_config, or else it renames the label to exported_job.

Source: prometheus.io/docs/prometheus/latest/configuration/configuration, scrape_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distlab.monitor.extras import needed
from distlab.monitor.metrics import COUNTERS, PREFIX, Metrics


class Prometheus(Metrics):
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
        self._metrics: dict[str, Any] = {}
        super().__init__(run)
        try:
            self._server, self._thread = client.start_http_server(
                port, addr=address, registry=self._registry
            )
        except OSError as error:
            raise OSError(f"port {port} on {address}: {error.strerror}") from error
        self.address, self.port = address, int(self._server.server_port)

    def count(self, name: str, number: int) -> None:
        """Add `number` to a counter of COUNTERS."""
        counter = self._metric(self._client.Counter, name, COUNTERS[name], "job")
        counter.labels(job=self.job).inc(number)

    def set(self, name: str, text: str, value: float, rank: int | None = None) -> None:
        """Set a gauge, of one rank or of the whole run; `text` explains it."""
        labels = {"job": self.job} | ({} if rank is None else {"rank": str(rank)})
        self._metric(self._client.Gauge, name, text, *labels).labels(**labels).set(
            value
        )

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _metric(self, kind: Any, name: str, text: str, *labels: str) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(
                PREFIX + name, text, labels, registry=self._registry
            )
        return self._metrics[name]
