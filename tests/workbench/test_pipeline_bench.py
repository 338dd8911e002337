"""`distlab bench pipeline` must be able to fail: what is wrong misses its bar."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from benchmarks import pipeline
from distlab.cli.bench import bench
from distlab.curriculum.units import load

SMALL = 2, 4  # stages, microbatches


@pytest.fixture
def unit() -> ModuleType:
    return load("pipeline_parallel", "reference")


def test_the_reference_is_as_fast_as_the_formulas_and_keeps_no_more(
    unit: ModuleType,
) -> None:
    lines = pipeline.measure(unit, *SMALL)
    assert [line["name"] for line in lines] == [*pipeline.AT_MOST, *pipeline.AT_LEAST]
    assert pipeline.missed(lines) == []
    assert lines[0]["time_s"] == pytest.approx(5 * 3e-3)
    assert (lines[0]["peaks"], lines[1]["peaks"]) == ([4, 4], [2, 1])


def test_gpipe_under_the_name_of_1f1b_keeps_too_much(unit: ModuleType) -> None:
    unit.one_f_one_b = unit.gpipe  # type: ignore[attr-defined]
    lines = pipeline.measure(unit, *SMALL)
    assert pipeline.missed(lines) == ["f1b_peak_activations_ok"]
    assert "MISSED, the bar is 1" in pipeline.text(lines)[-1]


def test_a_schedule_that_waits_is_off_its_formula(unit: ModuleType) -> None:
    def in_turns(rank: int, n: int, m: int) -> list[Any]:
        return [unit.Action(kind, number) for number in range(m) for kind in "FB"]

    unit.gpipe = in_turns  # type: ignore[attr-defined]
    lines = pipeline.measure(unit, *SMALL)
    assert pipeline.missed(lines) == ["gpipe_rel_err"]
    assert lines[0]["value"] == pytest.approx((8 - 5) / 5)


def test_less_than_a_picosecond_is_no_error() -> None:
    assert pipeline.rel_err(0.117, 0.117 + 1e-16) == 0
    assert pipeline.rel_err(0.117 + 1e-12, 0.117) == pytest.approx(1e-12 / 0.117)


@pytest.mark.slow
def test_the_command_measures_at_full_size(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench("pipeline", as_json=True) == 0
    report = json.loads(capfd.readouterr().out)
    found = {line["name"]: line for line in report["results"]}
    assert report["bench"] == "pipeline"
    assert all(line["met"] for line in found.values())
    assert found["gpipe_rel_err"]["time_s"] == pytest.approx(39 * 3e-3)
    assert found["gpipe_rel_err"]["peaks"] == [32] * 8
    assert found["f1b_rel_err"]["peaks"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found["interleaved_rel_err"]["time_s"] == pytest.approx(71 * 3e-3)
