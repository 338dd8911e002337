"""Unit `planning`: its formulas beside published numbers and those of the guide."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distlab.curriculum.units import load
from distlab.given.planning import (
    BATCH,
    DGX_H100,
    LLAMA_70B,
    Batch,
    Cluster,
    Layout,
    Model,
    Precision,
    Recovery,
    show_degrees,
    show_goodput,
)
from distlab.grading.checks.planning import asked, forms
from distlab.grading.checks.planning.questions import settings
from distlab.grading.verdict import NotYetError

LLAMA_2_7B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000
)
GPT_3 = Model(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    ffn=4 * 12288,
    vocab=51200,
    gated=False,
    tied=True,
)


@pytest.fixture(scope="module", params=["reference", "forms"])
def unit(request: pytest.FixtureRequest) -> ModuleType:
    """The reference, and the judge's own formulas."""
    return forms if request.param == "forms" else load("planning", "reference")


@pytest.mark.parametrize(
    ("model", "parameters"),
    [  # as the model cards' safetensors list them
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_70B, 70_553_706_496),
        (
            replace(LLAMA_70B, layers=32, hidden=4096, heads=32, ffn=14336),
            8_030_261_248,
        ),
        (
            replace(LLAMA_70B, layers=126, hidden=16384, heads=128, ffn=53248),
            405_853_388_800,
        ),
    ],
)
def test_the_weights_are_those_of_the_published_models(
    unit: ModuleType, model: Model, parameters: int
) -> None:
    assert unit.model_size(model, 8192).parameters == parameters


def test_operations_are_those_of_megatrons_formula(unit: ModuleType) -> None:
    """2104.04473, equation 3, where nothing is recomputed: 72 rather than 96."""
    h, layers, s = GPT_3.hidden, GPT_3.layers, 2048
    size = unit.model_size(GPT_3, s)
    wanted = 72 * layers * h * h * (1 + s / (6 * h) + GPT_3.vocab / (12 * layers * h))
    assert size.flops_per_token == pytest.approx(wanted)


@pytest.mark.parametrize("t", [1, 8])
def test_activations_are_those_of_the_paper_without_dropout(
    unit: ModuleType, t: int
) -> None:
    """2205.05198, table 2: without masks, 34 becomes 32 (10 becomes 8), and 5 is 2."""
    s, h, a = 2048, GPT_3.hidden, GPT_3.heads
    batch, layout = Batch(sequence=s, global_batch=1), Layout(tensor=t)
    both = Layout(tensor=t, sequence_parallel=t > 1)

    def kept(layout: Layout, recompute: str) -> float:
        return float(unit.layer_activation_bytes(GPT_3, layout, batch, recompute))

    softmax = 2 * a * s / (h * t)
    assert kept(layout, "none") == pytest.approx(s * h * (8 + 24 / t + softmax))
    assert kept(both, "none") == pytest.approx(s * h * (32 / t + softmax))
    assert kept(both, "selective") == pytest.approx(s * h * 32 / t)
    assert kept(layout, "full") == pytest.approx(2 * s * h)


def test_states_are_those_of_the_zero_paper(unit: ModuleType) -> None:
    """1910.02054, figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5 billion weights."""
    batch = Batch(sequence=128, global_batch=64)
    size = unit.stage_parameters(LLAMA_2_7B, Layout(), 0)
    gathered = 2 * unit.layer_parameters(LLAMA_2_7B, Layout())
    for stage, wanted in enumerate((120, 31.4, 16.6, 1.9)):
        layout = Layout(data=64, zero_stage=stage)
        memory = unit.stage_memory(LLAMA_2_7B, layout, batch, 0)
        held = memory.total_bytes - memory.activations_bytes
        held -= gathered if stage == 3 else 0
        assert held * 7.5 / size == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_that_is_not_finite_is_wrong(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{"": value} for _ in asked.expected("ring_s", 0)]
    told = SimpleNamespace(values=[answers])
    monkeypatch.setattr(asked, "worked_out", lambda *_, **__: told)
    runs: Any = SimpleNamespace(seed=0)
    with pytest.raises(NotYetError):
        asked.expect_answers(runs, "ring_s")


def test_the_largest_stage_is_at_an_end() -> None:
    reference = load("planning", "reference")
    for model, layout, batch in settings(7):
        own = reference.step_memory(model, layout, batch).total_bytes
        assert own == pytest.approx(forms.step_memory(model, layout, batch).total_bytes)


def test_a_pipeline_takes_m_plus_p_minus_1_microbatches(unit: ModuleType) -> None:
    batch = Batch(sequence=256, global_batch=12)
    links = replace(DGX_H100.inter_node, alpha_s=0.0, bytes_per_s=math.inf)
    silent = replace(DGX_H100, intra_node=links, inter_node=links)
    layout = Layout(pipeline=8, tensor=2)
    step = unit.step_time(LLAMA_70B, layout, batch, silent)
    assert step.total_s - step.update_s == pytest.approx(step.compute_s * 19 / 12)
    halved = unit.step_time(LLAMA_70B, replace(layout, chunks=2), batch, silent)
    assert halved.bubble_s == pytest.approx(step.bubble_s / 2)


# ── the figures that the guide page quotes ──────────────────────────────────────────


def test_figures_of_the_worked_example(unit: ModuleType) -> None:
    batch = Batch(sequence=4096, global_batch=1024)
    layout = Layout(data=64, zero_stage=3)
    kept = {
        recompute: unit.stage_memory(
            LLAMA_2_7B, replace(layout, recompute=recompute), batch, 0
        ).activations_bytes
        / 1e9
        for recompute in ("none", "selective", "full")
    }
    assert kept == pytest.approx(
        {"none": 52.2, "selective": 17.8, "full": 2.2}, abs=0.06
    )
    step = unit.step_time(LLAMA_2_7B, layout, batch, DGX_H100)
    again = replace(layout, recompute="full")
    assert step.total_s == pytest.approx(6.57, abs=0.005)
    assert step.data_s == 0
    assert unit.step_time(LLAMA_2_7B, again, batch, DGX_H100).total_s == pytest.approx(
        8.73, abs=0.005
    )
    mfu = unit.mfu(LLAMA_2_7B, batch, DGX_H100, 64, step.total_s)
    assert mfu == pytest.approx(0.464, abs=0.001)


def test_figures_of_the_predictions(unit: ModuleType) -> None:
    size = unit.model_size(LLAMA_70B, 8192)
    assert size.attention_flops / size.flops_per_token == pytest.approx(0.13, abs=0.005)
    most = unit.useful_degrees(LLAMA_70B, BATCH, DGX_H100, 16, 0.1)
    assert (int(most.data), int(most.tensor)) == (456, 26)
    layout = Layout(
        data=32,
        tensor=8,
        pipeline=4,
        zero_stage=1,
        recompute="selective",
        sequence_parallel=True,
    )
    for one, seconds in ((layout, 6.4), (replace(layout, tensor=4, data=64), 6.8)):
        step = unit.step_time(LLAMA_70B, one, BATCH, DGX_H100)
        assert step.total_s == pytest.approx(seconds, abs=0.05)


def test_a_fleet_of_llama_3_fails_every_three_hours(unit: ModuleType) -> None:
    """2407.21783, section 3.3.4: 419 interruptions in 54 days on 16,384 GPUs."""
    recovery = Recovery(
        save_s=60, detection_s=60, restart_s=300, repair_s=86_400, spare_nodes=16
    )
    plan = unit.goodput(DGX_H100, 16_384, recovery, 30 * 86_400)
    assert plan.mtbf_s / 3600 == pytest.approx(54 * 24 / 419, rel=0.01)
    assert plan.share == pytest.approx(0.874, abs=0.0005)
    quick = unit.goodput(DGX_H100, 16_384, replace(recovery, save_s=5), 1.0)
    assert quick.share == pytest.approx(0.938, abs=0.0005)


def test_the_tables_have_a_line_for_each_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = load("planning", "reference")
    show_degrees(reference.useful_degrees)
    show_goodput(reference.goodput)
    assert len(capsys.readouterr().out.splitlines()) == 3 + 8


# ── layouts ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (Layout(zero_stage=1), "one rank"),
        (Layout(zero_stage=4, data=2), "stage 4"),
        (Layout(tensor=16), "heads"),
        (Layout(pipeline=81), "80 layers"),
        (Layout(chunks=2), "single stage"),
        (Layout(pipeline=8, chunks=3), "3 chunks"),
        (Layout(pipeline=8, chunks=2, microbatch=128), "4 microbatches"),
        (Layout(context=3), "3 context"),
        (Layout(sequence_parallel=True), "1 tensor"),
        (Layout(data=3), "512 sequences"),
    ],
)
def test_a_layout_that_can_train_nothing_says_why(layout: Layout, word: str) -> None:
    assert word in layout.problem(LLAMA_70B, BATCH)


def test_a_layout_that_can_train_has_no_problem() -> None:
    layout = Layout(
        data=8,
        tensor=8,
        pipeline=4,
        context=2,
        chunks=5,
        zero_stage=1,
        sequence_parallel=True,
    )
    assert not layout.problem(LLAMA_70B, BATCH)
    assert layout.num_gpus == 512
    assert layout.shards == 16
    assert [Layout(pipeline=3).stage_layers(LLAMA_70B, i) for i in range(3)] == [
        27,
        27,
        26,
    ]


def test_nothing_fits_without_memory() -> None:
    reference = load("planning", "reference")
    tiny = replace(LLAMA_2_7B, layers=2)
    batch = Batch(sequence=64, global_batch=2, precision=Precision(moments=4))
    none: Cluster = replace(DGX_H100, memory_bytes=0.0)
    assert reference.choose_layout(tiny, batch, none, 2) is None
    assert reference.choose_layout(tiny, batch, DGX_H100, 2).num_gpus == 2
