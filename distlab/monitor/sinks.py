"""The sinks of a run: the folder of records, and the places that `--also` names.

    --monitor runs/one --also tensorboard --also prometheus:0.0.0.0:9400

In Prometheus, the last part of the folder's name is the name of the job. `otlp` sends
the same metrics to an OpenTelemetry collector.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.monitor.jsonl import JsonLines
from distlab.monitor.monitor import Sink
from distlab.monitor.otlp import OpenTelemetry
from distlab.monitor.prometheus import Prometheus

PORT = 9400  # Prometheus's own is 9090, and node exporters begin at 9100
_PORTS = {"prometheus": PORT, "otlp": 4318}  # 4318: OTLP over HTTP
_KNOWN = "tensorboard, prometheus, prometheus:[ADDRESS:]PORT, otlp, otlp:[ADDRESS:]PORT"
_LOOPBACK = "127.0.0.1"


def num_restarts() -> int:
    """Return how often the launcher has restarted this rank; 0 without a launcher."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def job_name(folder: Path) -> str:
    """Return the name of a folder's job, which is the last part of its path."""
    return folder.absolute().name or "run"


def expect_known(also: Sequence[str]) -> None:
    """Require that we know each of these places.

    Raises:
        ValueError: a place is unknown, or its port is impossible.
    """
    for name in also:
        if name != "tensorboard":
            place(name)


def place(name: str) -> tuple[str, int]:
    """Return the address and the port in `prometheus` or `otlp`, or the defaults.

    Raises:
        ValueError: the form is wrong, or the port is above 65535.
    """
    kind, has_place, where = name.partition(":")
    address, _, port = where.rpartition(":")
    is_port = port.isdecimal() and len(port) <= 5
    if kind not in _PORTS or (has_place and not is_port):
        raise ValueError(f"--also {name}: there are {_KNOWN}")
    if has_place and int(port) > 65535:
        raise ValueError(f"--also {name}: a port is at most 65535")
    return address or _LOOPBACK, int(port) if has_place else _PORTS[kind]


def open_sinks(
    folder: Path,
    run: Mapping[str, Any],
    also: Sequence[str] = (),
    *,
    same: Mapping[str, Any] | None = None,
    after: int = 0,
) -> list[Sink]:
    """Open the folder and all places of `also`; `same` and `after` as in JsonLines.

    `run` has the world size; we add the name of the job and its restarts so far.

    Raises:
        ValueError: the folder has the records of another run, or a place is unknown.
        ModuleNotFoundError: a library is missing; the message says how to install it.
        OSError: the folder can't be written, or a port is taken.
    """
    expect_known(also)
    about = {"job": job_name(folder), "restarts": num_restarts(), **run}
    # The ports first: they may be refused, and then no folder is left behind.
    sinks: list[Sink] = []
    try:
        sinks += [_open(name, folder, about) for name in also]
        return [JsonLines(folder, about, same=same, after=after), *sinks]
    except BaseException:
        for sink in sinks:
            sink.close()
        raise


def _open(name: str, folder: Path, run: Mapping[str, Any]) -> Sink:
    if name.startswith("prometheus"):
        address, port = place(name)
        return Prometheus(port, address=address, run=run)
    if name == "otlp":  # the SDK's own variables say where
        return OpenTelemetry(run=run)
    if name.startswith("otlp"):
        address, port = place(name)
        return OpenTelemetry(f"http://{address}:{port}/v1/metrics", run=run)
    from distlab.monitor.tensorboard import TensorBoard

    return TensorBoard(folder / "tensorboard")


def announced(folder: Path, sinks: Sequence[Sink]) -> list[str]:
    """Return a line for each place besides the folder: how to look at it."""
    lines = []
    for sink in sinks:
        if isinstance(sink, Prometheus):
            lines.append(f"http://{sink.address}:{sink.port}/metrics")
        elif isinstance(sink, OpenTelemetry) and sink.endpoint:
            lines.append(f"sent to {sink.endpoint}")
        elif sink.name == "TensorBoard":
            lines.append(f"tensorboard --logdir {folder}/tensorboard")
    return lines
