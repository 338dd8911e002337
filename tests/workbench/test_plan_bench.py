"""`distlab bench plan`: its corpus is consistent, and wrong formulas miss the bars."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import plan as bench
from benchmarks._bars import missed
from benchmarks._planners import NotModeledError, available
from distlab.curriculum.units import load
from distlab.given.planning import Batch, Layout
from distlab.plan.catalog import find_cluster, find_model
from distlab.plan.formulas import formulas
from distlab.plan.plans import Question

RUNS = list(bench.published_runs())
ONE_OF = ("mfu", "hardware_tflops", "tokens_per_s_per_gpu")


@pytest.fixture
def unit() -> ModuleType:
    return formulas("reference")


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r['model']}-{r['gpus']}")
def test_a_published_run_is_complete_and_its_degrees_multiply(
    run: dict[str, Any],
) -> None:
    layout = bench.layout_of(run)
    assert layout.num_gpus == run["gpus"]
    assert run["batch"] % (layout.data * layout.microbatch) == 0
    assert sum(name in run for name in ONE_OF) == 1
    assert run["url"].startswith("https://")
    assert run["note"]
    assert find_model(run["model"]).sources
    assert find_cluster(run["cluster"]).sources["matmul_efficiency"]


def test_published_runs_are_predicted_within_the_bar(unit: ModuleType) -> None:
    lines, rows = bench.published(unit)
    assert missed(lines) == []
    assert len(rows) == len(RUNS) >= 12
    assert all(0.05 < row["predicted_mfu"] < 1 for row in rows)


def test_formulas_without_messages_and_bubbles_miss_the_bar(unit: ModuleType) -> None:
    step_time = unit.step_time

    def only_compute(*question: Any) -> Any:
        time = step_time(*question)
        none = {"tensor_s": 0.0, "pipeline_s": 0.0, "bubble_s": 0.0}
        return replace(time, compute_s=time.compute_s / 2, **none)

    unit.step_time = only_compute  # type: ignore[attr-defined]
    assert "published_median_error" in missed(bench.published(unit)[0])


def test_the_chosen_layout_is_the_best_of_all(unit: ModuleType) -> None:
    (line,) = bench.choice(unit, cases=6)
    assert line["value"] == 1.0
    unit.choose_layout = lambda *_: Layout()  # type: ignore[attr-defined]
    assert missed(bench.choice(unit, cases=6)) == ["choice_worst_ratio"]


def test_a_formula_without_the_bubble_is_off_the_simulator(unit: ModuleType) -> None:
    pipeline = load("pipeline_parallel", "reference")
    case = bench.SIMULATED[9]
    assert abs(bench.simulate(unit, pipeline, case)["error"]) <= 0.05
    step_time = unit.step_time
    unit.step_time = lambda *q: replace(  # type: ignore[attr-defined]
        step_time(*q), bubble_s=0.0
    )
    assert bench.simulate(unit, pipeline, case)["error"] < -0.05


def test_enough_layouts_are_simulated_and_each_is_valid() -> None:
    assert len(bench.SIMULATED) == 20
    assert max(layout.num_gpus for *_, layout in bench.SIMULATED) == 1024
    for model, _, batch, sequence, layout in bench.SIMULATED:
        asked = Batch(sequence=sequence, global_batch=batch)
        assert layout.problem(find_model(model).value, asked) == ""


def test_the_figures_of_the_page_can_be_written(
    unit: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "plan.md"
    page.write_text(bench.DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    lines, rows = bench.published(unit)
    pipeline = load("pipeline_parallel", "reference")
    simulated = [bench.simulate(unit, pipeline, bench.SIMULATED[0])]
    report: dict[str, Any] = {
        "results": lines,
        "published": rows,
        "simulation": simulated,
        "missing": {"llm-analysis": "it isn't here"},
    }
    bench.write_docs(report, page)
    text = page.read_text(encoding="utf-8")
    assert text.count("| palm-540b,") == 1
    assert simulated[0]["layout"] in text
    printed = bench.text(report)
    assert "MISSED" not in "\n".join(printed)
    assert printed[-1].endswith(report["missing"]["llm-analysis"])


def test_another_planner_is_judged_on_the_runs_that_it_can_predict(
    unit: ModuleType,
) -> None:
    def twice_as_long(question: Question, layout: Layout, parameters: int) -> float:
        if layout.context > 1:
            raise NotModeledError("no context")
        assert parameters > 1e9
        asked = question.model, layout, question.batch, question.cluster
        return 2 * float(unit.step_time(*asked).total_s)

    lines, rows = bench.published(unit, {"Slow-one": twice_as_long})
    (line,) = (one for one in lines if one["name"] == "slow_one_median_error")
    skipped = [row["model"] for row in rows if "skipped" in row["others"]["Slow-one"]]
    assert skipped == ["llama-3-405b"]
    assert line["n"] == len(rows) - 1
    for row in rows:
        other = row["others"]["Slow-one"]
        if "mfu" in other:
            assert other["mfu"] == pytest.approx(row["predicted_mfu"] / 2, abs=1e-4)


def test_a_planner_that_is_not_installed_is_missing_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("mlsysim", "llm_analysis"):
        monkeypatch.setitem(sys.modules, module, None)
    timers, missing = available()
    assert timers == {}
    assert set(missing) == {"MLSys·im", "llm-analysis"}
    assert all("pip install" in why for why in missing.values())
