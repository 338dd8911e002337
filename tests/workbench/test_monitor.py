"""Records of steps, what they say together, and every place they go to."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import re
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.monitor import Monitor, StepRecord, Work, combined
from distlab.monitor.extras import INSTALL, needed
from distlab.monitor.flops import flops_per_sample
from distlab.monitor.jsonl import JsonLines, newest_folder, read_folder
from distlab.monitor.meter import StepMeter
from distlab.monitor.sinks import PORT, expect_known, open_sinks, place
from distlab.monitor.view import bar, view

RECORD = StepRecord(
    rank=0,
    step=10,
    epoch=1,
    time_s=1000.0,
    num_steps=10,
    seconds=2.0,
    samples=80,
    loss=1.0,
    data_wait_s=0.5,
    communication_s=1.0,
    learning_rate=0.1,
    grad_norm=3.0,
    memory_bytes=1 << 20,
    gpu_utilization=None,
)


MUST = bool(os.environ.get("DISTLAB_TEST_TRACKING"))  # then missing is a failure


def library(name: str) -> Any:
    """A library of the extra `tracking`; without it the test is skipped."""
    if MUST:
        return importlib.import_module(name)
    reason = f"{name.partition('.')[0]} is not installed: {INSTALL}"
    return pytest.importorskip(name, reason=reason)


# ── what records say together ───────────────────────────────────────────────────────


def test_a_rank_counts_by_its_samples_and_the_slowest_sets_the_pace() -> None:
    slow = replace(RECORD, rank=1, samples=20, loss=2.0, seconds=4.0, grad_norm=5.0)
    found = combined([RECORD, slow], Work(flops_per_sample=40.0, peak_flops=4000.0))
    assert found["loss"] == pytest.approx(1.2)
    assert found["throughput"] == 25.0  # 100 samples in the 4 s of the slower one
    assert found["step_s"] == 0.4
    assert found["communication_share"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["mfu"] == 0.25
    assert "gpu_utilization" not in found


def test_a_rank_without_samples_has_no_part_in_the_loss() -> None:
    none = replace(RECORD, rank=1, samples=0, loss=None)
    assert combined([RECORD, none])["loss"] == 1.0
    assert "loss" not in combined([none])


@pytest.mark.parametrize("order", [1, -1])
def test_a_nan_is_seen_wherever_it_stands(order: int) -> None:
    records = [RECORD, replace(RECORD, rank=1, grad_norm=math.nan, loss=math.nan)]
    found = combined(records[::order])
    assert math.isnan(found["grad_norm"])
    assert math.isnan(found["loss"])


def test_records_of_other_steps_are_not_combined() -> None:
    with pytest.raises(ValueError, match=r"\bsteps\b"):
        combined([RECORD, replace(RECORD, rank=1, step=11)])


# ── the meter ───────────────────────────────────────────────────────────────────────


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.communicated = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def passes(self, seconds: float, *, communicating: bool = False) -> None:
        self.now += seconds
        self.communicated += seconds * communicating


def test_the_meter_divides_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    heard: list[StepRecord] = []
    meter = StepMeter(
        3,
        heard.append,
        log_every_n_steps=3,
        in_communication_s=lambda: clock.communicated,
        optimizer=optimizer,
    )
    clock.passes(100.0)  # before the first epoch: nobody's
    for _ in range(2):
        meter.begin_epoch()
        for step in range(4):
            with meter.waiting_for_data():
                clock.passes(1.0)
            clock.passes(2.0)
            clock.passes(4.0, communicating=True)
            model.weight.grad = torch.tensor([[3.0, 4.0]])
            optimizer.step()
            samples = 0 if step == 1 else 2
            meter.end_step(torch.tensor(float(step)), samples=samples)
        meter.end_epoch()
        clock.passes(50.0)  # an evaluation
    steps = [(r.epoch, r.step, r.num_steps) for r in heard]
    assert steps == [(1, 3, 3), (1, 4, 1), (2, 6, 2), (2, 8, 2)]
    first = heard[0]
    assert (first.rank, first.samples, first.loss) == (3, 4, 1.0)
    assert (first.seconds, first.data_wait_s, first.communication_s) == (21, 3, 12)
    assert first.compute_share == pytest.approx(6 / 21)
    assert first.learning_rate == 0.25
    assert [r.grad_norm for r in heard] == [5.0, None, 5.0, None]


def test_the_loss_is_read_once_for_all_steps_of_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a loss waits for the GPU that computes it."""
    reads: list[Any] = []
    for name in ("__float__", "item", "tolist"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, plain=plain: (reads.append(1), plain(self))[1],
        )
    meter = StepMeter(0, lambda record: None, log_every_n_steps=5)
    meter.begin_epoch()
    for _ in range(10):
        meter.end_step(torch.tensor(1.0), samples=1)
    assert len(reads) == 2


def test_a_record_needs_a_step() -> None:
    with pytest.raises(ValueError, match="log_every_n_steps"):
        StepMeter(0, lambda record: None, log_every_n_steps=0)


def test_operations_are_those_of_the_matrix_products() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5))
    state = torch.get_rng_state()
    # 2·8·16 for the forward, and twice that for the backward
    assert flops_per_sample(model, torch.zeros(4, 8)) == 3 * 2 * 8 * 16
    assert torch.equal(torch.get_rng_state(), state)


# ── sinks ───────────────────────────────────────────────────────────────────────────


class Noted:
    name = "the noting sink"

    def __init__(self, *, breaks: bool = False) -> None:
        self.records: list[int] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.closed, self._breaks = 0, breaks

    def record(self, record: StepRecord) -> None:
        if self._breaks:
            raise OSError(28, "No space left on device")
        self.records.append(record.rank)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.rows.append((step, figures))

    def close(self) -> None:
        self.closed += 1


def test_a_row_is_complete_when_the_last_rank_has_spoken() -> None:
    sink = Noted()
    monitor = Monitor(2, [sink])
    late = replace(RECORD, rank=1, loss=3.0)
    ahead = replace(RECORD, step=20)
    for record in (RECORD, ahead, late):
        monitor.hear(record)
    assert sink.records == [0, 0, 1]
    assert [(step, row["loss"]) for step, row in sink.rows] == [(10, 2.0)]
    monitor.close()
    monitor.close()
    assert sink.closed == 1


def test_a_sink_that_fails_is_named_once_and_the_others_go_on() -> None:
    said: list[str] = []
    sink = Noted()
    monitor = Monitor(1, [Noted(breaks=True), sink], warn=said.append)
    monitor.hear(RECORD)
    monitor.hear(replace(RECORD, step=20))
    assert len(sink.records) == len(sink.rows) == 2
    (sentence,) = said
    assert sentence.startswith("the noting sink ")
    assert os.strerror(errno.ENOSPC) in sentence


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run", {"world_size": 2})
    odd = replace(RECORD, rank=1, loss=math.inf, grad_norm=math.nan)
    for record in (RECORD, odd, replace(RECORD, step=20, loss=None)):
        sink.record(record)
    sink.figures(10, {"loss": math.nan})
    sink.close()
    found = read_folder(tmp_path / "run")
    assert found.run == {"world_size": 2}
    assert found.records[0] == [RECORD, replace(RECORD, step=20, loss=None)]
    assert repr(found.records[1]) == repr([odd])
    assert repr(found.figures) == repr([{"step": 10, "loss": math.nan}])


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path, {"world_size": 1})
    sink.record(RECORD)
    sink.close()
    path = tmp_path / "rank_0.jsonl"
    path.write_text(path.read_text() + '{"rank": 0, "st')
    assert read_folder(tmp_path).records == {0: [RECORD]}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("rank_0.jsonl", "{}\n", "too much or too little"),
        ("rank_0.jsonl", "nonsense\n", "rank_0.jsonl:1 is no line of records"),
        ("figures.jsonl", "[1]\n", "figures.jsonl:1 is no line of records"),
        ("run.json", "{", "cannot be read"),
        ("run.json", "{}", "does not say the world size"),
    ],
)
def test_a_damaged_folder_is_named(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    JsonLines(tmp_path, {"world_size": 1}).close()
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_folder(tmp_path)


def test_two_runs_are_not_mixed(tmp_path: Path) -> None:
    JsonLines(tmp_path, {"world_size": 1}).close()
    with pytest.raises(ValueError, match="another run"):
        JsonLines(tmp_path, {"world_size": 1})


def test_a_missing_library_is_named_with_what_brings_it() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"\bno_such\b.*tracking"):
        needed("no_such", "this sink")


def test_prometheus_serves_what_its_own_parser_reads() -> None:
    parser = library("prometheus_client.parser")
    from distlab.monitor.prometheus import Prometheus

    run = {"job": "one", "world_size": 2, "restarts": 1}
    sink = Prometheus(0, run=run)
    try:
        sink.record(RECORD)
        sink.record(replace(RECORD, rank=1, loss=None))
        sink.figures(10, {"loss": 0.5, "throughput": 40.0, "a_new_one": 7.0})
        for number in (2, 2):  # an absolute number: saying it twice counts once
            sink.figures(10, {"restarts": number, "epoch": 3.0})
        with pytest.raises(OSError, match=f"port {sink.port} on 127.0.0.1"):
            Prometheus(sink.port)
        page = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read()
    finally:
        sink.close()
    families = parser.text_string_to_metric_families(page.decode())
    found = [sample for family in families for sample in family.samples]
    assert {sample.labels["job"] for sample in found} == {"one"}
    samples = {(one.name, one.labels.get("rank")): one.value for one in found}
    assert samples["distlab_steps_total", None] == RECORD.num_steps
    assert samples["distlab_restarts_total", None] == 2
    assert samples["distlab_world_size", None] == 2
    assert samples["distlab_epoch", None] == 3
    assert samples["distlab_step", None] == 10
    assert samples["distlab_loss", None] == 0.5
    assert samples["distlab_throughput_samples_per_second", None] == 40
    assert samples["distlab_a_new_one", None] == 7
    assert samples["distlab_rank_step", "1"] == 10
    assert samples["distlab_rank_communication_ratio", "0"] == 0.5
    assert ("distlab_rank_loss", "1") not in samples
    Prometheus(sink.port).close()  # the port was given back


@pytest.fixture
def collector() -> Iterator[tuple[int, list[bytes]]]:
    """A server for OTLP over HTTP: its port, and the bodies that it has got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, bodies
        server.shutdown()
        thread.join()


def received(body: bytes) -> tuple[str, dict[tuple[str, str | None], float]]:
    """The name of the service, and the value of each metric, by rank."""
    service = library("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    values = {}
    for metric in resource.scope_metrics[0].metrics:
        assert not metric.HasField("sum") or metric.sum.is_monotonic
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            labels = {one.key: one.value.string_value for one in point.attributes}
            value = getattr(point, point.WhichOneof("value"))
            values[metric.name, labels.get("rank")] = value
    return about["service.name"], values


@pytest.mark.filterwarnings("ignore:.*fork")  # Python 3.12, of threads
def test_a_collector_gets_the_figures_by_otlp(
    collector: tuple[int, list[bytes]], tmp_path: Path
) -> None:
    library("opentelemetry.sdk.metrics")
    library("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    port, bodies = collector
    sinks = open_sinks(tmp_path / "one", {"world_size": 2}, [f"otlp:{port}"])
    for sink in sinks:
        sink.record(RECORD)
        sink.record(replace(RECORD, rank=1, loss=None))
        sink.figures(10, {"loss": 0.5, "throughput": 40.0})
        for number in (2, 2):  # an absolute number: saying it twice counts once
            sink.figures(10, {"restarts": number, "epoch": 3.0})
    pid = os.fork()
    if not pid:  # as a data worker, whose figures are out of date
        with contextlib.suppress(BaseException):
            sinks[1].close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert not bodies
    for sink in sinks:
        sink.close()
    (body,) = bodies
    job, values = received(body)
    assert job == "one"
    assert values["distlab_steps", None] == RECORD.num_steps
    assert values["distlab_restarts", None] == 2
    assert values["distlab_world_size", None] == 2
    assert values["distlab_epoch", None] == 3
    assert values["distlab_loss", None] == 0.5
    assert values["distlab_rank_step", "1"] == 10
    assert values["distlab_rank_communication_ratio", "0"] == 0.5
    assert ("distlab_rank_loss", "1") not in values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prometheus", ("127.0.0.1", PORT)),
        ("prometheus:0", ("127.0.0.1", 0)),
        ("prometheus:0.0.0.0:9000", ("0.0.0.0", 9000)),
        ("prometheus:localhost", None),
        ("prometheus:70000", None),
        ("prometheus2:80", None),
        ("otlp", ("127.0.0.1", 4318)),
        ("otlp:collector:4000", ("collector", 4000)),
        ("otlp:collector", None),
    ],
)
def test_where_metrics_go(name: str, expected: tuple[str, int] | None) -> None:
    if expected:
        assert place(name) == expected
    else:
        with pytest.raises(ValueError, match=f"^--also {name}:"):
            expect_known(["tensorboard", name])


def test_a_folder_names_the_job_and_knows_its_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    (sink,) = open_sinks(tmp_path / "one", {"world_size": 2})
    sink.close()
    run = {"world_size": 2, "job": "one", "restarts": 3}
    assert read_folder(tmp_path / "one").run == run


def test_the_dashboard_shows_what_is_served() -> None:
    library("prometheus_client")
    from distlab.monitor import metrics, prometheus

    dashboard = json.loads(
        Path(prometheus.__file__).with_name("grafana.json").read_text()
    )
    panels = dashboard["panels"]
    shown = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"distlab_\w+", target["expr"])
    }
    sink = prometheus.Prometheus(0)
    try:
        sink.record(RECORD)
        sink.figures(10, dict.fromkeys(metrics.OF_RUN, 1.0))
        served = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read()
    finally:
        sink.close()
    names = set(re.findall(r"^(distlab_\w+)", served.decode(), flags=re.M))
    assert names - shown == {"distlab_step", "distlab_step_seconds"} | {
        "distlab_rank_step",
        "distlab_steps_created",
        "distlab_restarts_created",
    }
    assert shown <= names
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own affairs
def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    reader = library("tensorboard.backend.event_processing.event_accumulator")
    from distlab.monitor.tensorboard import TensorBoard

    sink = TensorBoard(tmp_path)
    sink.record(RECORD)
    sink.figures(10, {"loss": 0.5})
    sink.figures(20, {"loss": 0.25})
    sink.close()
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("run/loss")]
    assert points == [(10, 0.5), (20, 0.25)]
    assert [point.value for point in events.Scalars("ranks/loss/0")] == [1.0]


# ── the view ────────────────────────────────────────────────────────────────────────


def folder_of(tmp_path: Path, records: list[StepRecord], world_size: int) -> Path:
    sink = JsonLines(tmp_path, {"world_size": world_size, "dataset": "digits"})
    for record in records:
        sink.record(record)
    sink.close()
    return tmp_path


def test_a_rank_that_is_behind_comes_first_where_not_all_have_room(
    tmp_path: Path,
) -> None:
    records = [replace(RECORD, rank=rank, step=20) for rank in range(64) if rank != 9]
    records[40] = replace(records[40], step=10)
    recorded = read_folder(folder_of(tmp_path, records, 64))
    lines = view(recorded, 1001.0, width=80, height=24)
    texts = [text for _, text in lines]
    assert len(lines) <= 24
    assert max(map(len, texts)) <= 80
    style, first = lines[5]
    assert (style, first.split()[0]) == ("fail", str(records[40].rank))
    assert first.endswith("  10 behind")
    assert texts[-2].startswith("… and ")
    assert texts[-1].endswith("rank 9")


def test_ranks_that_have_room_stand_in_order(tmp_path: Path) -> None:
    records = [replace(RECORD, rank=1), replace(RECORD, rank=0, step=20)]
    recorded = read_folder(folder_of(tmp_path, records, 2))
    texts = [text for _, text in view(recorded, 0.0, width=80, height=24)]
    assert [text.split()[0] for text in texts[-2:]] == ["0", "1"]


def test_a_run_that_says_nothing_more_is_red_unless_it_has_ended(
    tmp_path: Path,
) -> None:
    recorded = read_folder(folder_of(tmp_path, [RECORD], 1))
    assert recorded.is_over
    assert recorded.ended_s is not None
    now_s = recorded.ended_s + 90
    assert view(recorded, now_s, width=80, height=24)[1][0] == "dim"
    silent = replace(recorded, ended_s=None)
    assert not silent.is_over
    style, text = view(silent, RECORD.time_s + 90, width=80, height=24)[1]
    assert style == "fail"
    assert "1 min 30 s" in text


def test_the_newest_folder_of_records_is_found(tmp_path: Path) -> None:
    assert newest_folder(tmp_path) is None
    for number, name in enumerate((".hidden", "runs/old", "runs/new", "a/b/c/d")):
        folder_of(tmp_path / name, [RECORD], 1)
        for path in (tmp_path / name).iterdir():
            os.utime(path, (number + 9 * name.startswith("."),) * 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("[]")
    assert newest_folder(tmp_path) == tmp_path / "runs" / "new"
    assert newest_folder(tmp_path / "runs" / "old") == tmp_path / "runs" / "old"


@pytest.mark.parametrize(
    "shares", [(0, 0, 0), (1, 0, 0), (0.3, 0.3, 0.4), (0, 0.01, 1)]
)
def test_a_bar_uses_all_its_columns(shares: tuple[float, float, float]) -> None:
    assert len(bar(shares, 24)) == 24
