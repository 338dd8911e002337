"""`distlab bench pipeline` must be able to fail: what is wrong misses its bar."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest

from benchmarks import pipeline
from benchmarks._bars import missed
from distlab.curriculum.units import load

SMALL = 2, 4  # stages, microbatches


@pytest.fixture
def unit() -> ModuleType:
    return load("pipeline_parallel", "reference")


def test_the_reference_is_as_fast_as_the_formulas_and_keeps_no_more(
    unit: ModuleType,
) -> None:
    lines = pipeline.results_of(unit, *SMALL)
    assert [line["name"] for line in lines] == [*pipeline.AT_MOST, *pipeline.AT_LEAST]
    assert missed(lines) == []
    assert lines[0]["time_s"] == pytest.approx(5 * 3e-3)
    assert (lines[0]["peaks"], lines[1]["peaks"]) == ([4, 4], [2, 1])


def test_gpipe_under_the_name_of_1f1b_keeps_too_much(unit: ModuleType) -> None:
    unit.one_f_one_b = unit.gpipe  # type: ignore[attr-defined]
    lines = pipeline.results_of(unit, *SMALL)
    assert missed(lines) == ["f1b_peak_activations_ok"]
    assert "MISSED" in pipeline.BENCH.text(lines)[-1]


def test_a_schedule_that_waits_is_off_its_formula(unit: ModuleType) -> None:
    def in_turns(rank: int, n: int, m: int) -> list[Any]:
        return [unit.Action(kind, number) for number in range(m) for kind in "FB"]

    unit.gpipe = in_turns  # type: ignore[attr-defined]
    lines = pipeline.results_of(unit, *SMALL)
    assert missed(lines) == ["gpipe_rel_err"]
    assert lines[0]["value"] == pytest.approx((8 - 5) / 5)


def test_less_than_a_picosecond_is_no_error() -> None:
    assert pipeline.rel_err(0.117, 0.117 + 1e-16) == 0
    assert pipeline.rel_err(0.117 + 1e-12, 0.117) == pytest.approx(1e-12 / 0.117)


def test_the_command_prints_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--stages", "2", "--microbatches", "4", "--json"]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *small])
    assert pipeline.BENCH.main(pipeline.measure, stages=8, microbatches=32) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "pipeline"
    assert len(report["results"]) == 4
