"""The file for Perfetto: sound, whole or honestly cut, and a broken one found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distlab.sim import AlphaBeta, run
from distlab.trace import to_perfetto
from distlab.trace.journals import trace_of
from distlab.trace.perfetto import faults_in
from tests.workbench.traces import (
    ring,
)

S = 10**12  # picoseconds
NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)


# ── for Perfetto ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("journal", [True, False])
def test_a_file_for_perfetto_is_sound_and_whole(tmp_path: Path, journal: bool) -> None:
    done = run(ring, 4, 100, net=NET, journal=journal)
    path = tmp_path / "run.json"
    assert to_perfetto(done, path) == 0
    assert faults_in(path) == []
    whole = json.loads(path.read_text())
    phases = [e["ph"] for e in whole["traceEvents"]]
    trace = trace_of(done)
    assert phases.count("X") == len(trace.calls)
    assert phases.count("s" if journal else "b") == len(trace.messages) == 24
    names = [
        e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "thread_name"
    ]
    assert names == [f"rank {rank}" for rank in range(4)]
    assert whole["otherData"]["left_out"] == 0
    ends = [e["ts"] + e["dur"] for e in whole["traceEvents"] if e["ph"] == "X"]
    assert max(ends, default=done.seconds * 1e6) == pytest.approx(done.seconds * 1e6)


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    done, path = run(ring, 4, 100, net=NET), tmp_path / "run.json"
    left_out = to_perfetto(done, path, most=50)
    whole = json.loads(path.read_text())
    assert faults_in(path) == []
    assert len(whole["traceEvents"]) <= 50
    assert whole["otherData"]["left_out"] == left_out > 0


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("[1,", "not JSON"),
        ("{}", "no list named traceEvents"),
        ({"ph": "?"}, "event 0: no known phase"),
        ({"ph": "X", "pid": 1, "tid": 0, "name": "a", "ts": 1}, "dur is missing"),
        (
            {"ph": "X", "pid": 1, "tid": 0, "name": "a", "ts": 1, "dur": -1},
            "below zero",
        ),
        (
            {"ph": "s", "pid": 1, "tid": 0, "name": "a", "cat": "m", "ts": 1, "id": 4},
            "id 4: a beginning without an end",
        ),
        (
            {"ph": "f", "pid": 1, "tid": 0, "name": "a", "cat": "m", "ts": 1, "id": 4},
            "id 4: an end without a beginning",
        ),
    ],
)
def test_a_broken_file_is_found_out(
    tmp_path: Path, broken: Any, complaint: str
) -> None:
    path = tmp_path / "run.json"
    text = broken if isinstance(broken, str) else json.dumps({"traceEvents": [broken]})
    path.write_text(text)
    (said,) = faults_in(path)
    assert complaint in said
