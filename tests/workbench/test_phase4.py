"""Phase 4: its demo, the lab's numbers, and how traces are read and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.demo import demo
from distlab.cli.demo_monitor import demo_monitor
from distlab.given.monitoring import Record, checksum, pack, read_spans, unpack
from distlab.grading.checks.monitoring.explained import RECORDED, TRACES
from tests.workbench.golden import Golden
from tests.workbench.judging import solution_of
from tests.workbench.refusals import without_figures


def broken(tmp_path: Path, old: str, new: str) -> str:
    text = solution_of("monitoring")
    assert text.count(old) == 1
    path = tmp_path / "monitoring.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


def test_the_demo_finds_what_it_hid(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert demo_monitor(as_json=True, seed=3) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["named"] == told["faults"]
    assert all(len(ranks) == 1 for ranks in told["faults"].values())
    demo_monitor(seed=3)
    golden("demo/phase4-search", without_figures(capsys.readouterr().out))


def test_the_demo_says_what_was_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = broken(tmp_path, "r.data_s + r.compute_s", "r.communication_s")
    assert demo_monitor(code=code, as_json=True, seed=3) == 1
    told = json.loads(capsys.readouterr().out)
    missed = {
        key for key in told["faults"] if told["named"][key] != told["faults"][key]
    }
    assert missed == {"stragglers"}
    assert told["named"]["stragglers"] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"phase": 4, "world_size": 8}, r"\bphase 4\b.*\b64\b"),
        ({"phase": 4, "epochs": 1}, r"\bphase 4\b.*\bepochs\b"),
        ({"phase": 4, "code": "nowhere.py"}, r"\bnowhere\.py\b"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        demo(**arguments)


@pytest.mark.parametrize("phase", [1, 2, 4])
def test_a_file_that_is_no_python_is_named(tmp_path: Path, phase: int) -> None:
    path = tmp_path / "own.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(ValueError, match=r"\bown\.py: line 2\b"):
        demo(phase=phase, code=str(path))


def test_a_record_survives_its_numbers() -> None:
    record = Record(7, 0.1, 0.2, 0.3, 1.5, 4, 3, 2**32 - 1)
    assert unpack(pack(record)) == record


def test_a_checksum_sees_one_bit_and_the_order() -> None:
    one, other = torch.zeros(3, dtype=torch.float64), torch.ones(2)
    before = checksum([one, other])
    assert before == checksum([one.clone(), other.clone()])
    assert before != checksum([other, one])
    one[1] = -0.0
    assert before != checksum([one, other])
    assert checksum([torch.zeros(2, 3).T]) < 2**32


def event(name: str, cat: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1}


def test_kernels_of_nccl_are_communication_where_there_is_a_gpu(
    tmp_path: Path,
) -> None:
    events = [
        event("aten::mm", "cpu_op", 0, 5),
        event("nccl:all_reduce", "gpu_user_annotation", 20, 30),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 21, 9),
        event("ampere_sgemm_128x64_nn", "kernel", 10, 15),
        {"ph": "s", "name": "flow"},
    ]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_spans(path) == ([(21.0, 30.0)], [(10.0, 25.0)])


def test_the_recorded_traces_are_small_and_name_no_machine() -> None:
    assert sorted(path.stem for path in TRACES.glob("*")) == sorted(RECORDED)
    for path in TRACES.glob("*.json"):
        trace = json.loads(path.read_text(encoding="utf-8"))
        assert set(trace) == {"schemaVersion", "displayTimeUnit", "traceEvents"}
        assert path.stat().st_size < 60_000
