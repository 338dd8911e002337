"""`distlab plan`: what it ranks, derives and asserts, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.plan import count, plan
from distlab.curriculum import load_curriculum
from distlab.curriculum.units import load
from distlab.given.planning import Batch, Layout
from distlab.plan.catalog import find_cluster, find_model, tables
from distlab.plan.derivation import Derivation, derivations
from distlab.plan.formulas import formulas
from distlab.plan.plans import Question, plan_of, ranked
from distlab.plan.played import (
    members_of,
    one_pipeline,
    play,
    play_ring,
    rings_of,
)
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
UNIT = formulas("reference")
SMALL: dict[str, Any] = {"num_gpus": 8, "global_batch": 8, "sequence": 2048}


def question(model: str, cluster: str, num_gpus: int, batch: Batch) -> Question:
    return Question(
        model=find_model(model).value,
        cluster=find_cluster(cluster).value,
        batch=batch,
        num_gpus=num_gpus,
    )


def planned(capsys: Capture, *args: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    code = plan(*args, as_json=True, **kwargs)
    return code, json.loads(capsys.readouterr().out)


# ── the catalog ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-70b", 68.98),
        ("llama-8b", 8.03),
        ("llama-70b", 70.55),
        ("llama-405b", 405.85),
        ("gpt3", 174.6),
        ("megatron-1t", 1008.0),
        ("mpt-30b", 29.96),
    ],
)
def test_models_have_as_many_parameters_as_published(
    name: str, billions: float
) -> None:
    size = UNIT.model_size(find_model(name).value, 2048)
    assert size.parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_each_number_has_a_source_and_each_alias_one_meaning() -> None:
    names: list[str] = []
    for kind, find in (("model", find_model), ("cluster", find_cluster)):
        for name, table in tables(kind).items():
            entry: Any = find(name)
            names += [name, *table.get("aliases", ())]
            urls = entry.sources.values()
            assert urls, name
            assert all(url.startswith("https://") for url in urls), name
            if kind == "cluster":
                measured = set(table) - {"aliases", "sources", "gpus_per_node"}
                assert measured <= set(entry.sources), name
    assert len(names) == len(set(names))


def test_a_file_of_yours_describes_a_model_and_a_cluster(
    tmp_path: Path, capsys: Capture
) -> None:
    model = tmp_path / "mine.toml"
    model.write_text("layers=4\nhidden=512\nheads=8\nffn=2048\nvocab=1000\n")
    cluster = tmp_path / "lab.toml"
    cluster.write_text(
        "[lab]\ngpus_per_node=2\npeak_flops=1e13\nmemory_bytes=8e9\n"
        "memory_bytes_per_s=5e11\nintra_node={alpha_s=1e-5,bytes_per_s=1e10}\n"
        "inter_node={alpha_s=1e-5,bytes_per_s=1e9}\n"
    )
    code, data = planned(
        capsys, str(model), num_gpus=4, cluster=str(cluster), global_batch=8
    )
    assert code == 0
    assert (data["model"]["name"], data["cluster"]["name"]) == ("mine", "lab")
    assert (data["model"]["kv_heads"], data["model"]["gated"]) == (8, False)
    assert data["cluster"]["gpu_mtbf_s"] is None
    assert data["plans"][0]["memory_bytes"] <= 8e9

    with_price = cluster.read_text() + "price_per_gpu_hour=3\n"
    cluster.write_text(with_price)
    _, data = planned(
        capsys,
        str(model),
        num_gpus=4,
        cluster=str(cluster),
        tokens="1B",
        claims=["price > 0"],
    )
    assert data["asserts"] == {"price > 0": True}
    assert data["best"]["price"] == pytest.approx(3 * data["best"]["gpu_hours"])
    cluster.write_text(with_price.replace("peak_flops=1e13", "peak_flops=0"))
    with pytest.raises(ValueError, match="peak_flops"):
        find_cluster(str(cluster))


def test_only_fields_without_a_default_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("layers = 4\n")
    words = set(re.findall(r"\w+", refusal(ValueError, find_model, str(path))))
    assert words >= {"hidden", "heads", "ffn", "vocab"}
    assert words.isdisjoint({"layers", "kv_heads", "gated", "tied"})


# ── the ranking ─────────────────────────────────────────────────────────────────────


def test_the_first_plan_is_what_choose_layout_chooses(capsys: Capture) -> None:
    asked = question("llama-8b", "dgx-h100", 8, Batch(sequence=2048, global_batch=8))
    ranking = ranked(UNIT, asked)
    chosen = UNIT.choose_layout(asked.model, asked.batch, asked.cluster, 8)
    best = plan_of(UNIT, asked, chosen)
    assert ranking.plans[0].time.total_s == best.time.total_s
    steps = [one.time.total_s for one in ranking.plans]
    assert steps == sorted(steps)
    assert len({one.shape for one in ranking.plans}) == len(steps)
    assert ranking.num_valid > ranking.num_fitting >= len(steps)


def test_a_fixed_part_of_the_layout_stays_fixed(capsys: Capture) -> None:
    code, data = planned(
        capsys,
        "llama-8b",
        layout="tensor=4,zero=1,recompute=full,sequence=yes",
        **SMALL,
    )
    assert code == 0
    assert data["plans"]
    for one in data["plans"]:
        layout = one["layout"]
        assert (layout["tensor"], layout["zero_stage"]) == (4, 1)
        assert (layout["recompute"], layout["sequence_parallel"]) == ("full", True)


def test_less_memory_leaves_fewer_layouts(capsys: Capture) -> None:
    _, all_of_it = planned(capsys, "llama-8b", **SMALL)
    _, half = planned(capsys, "llama-8b", max_memory="40GB", **SMALL)
    assert 0 < half["fitting"] < all_of_it["fitting"]
    assert all(one["memory_bytes"] <= 40e9 for one in half["plans"])


def test_nothing_fits_is_a_failure_that_says_how_much_is_needed(
    capsys: Capture, golden: Golden
) -> None:
    assert plan("llama-70b", **SMALL) == 1
    golden("cli/plan-nothing-fits", capsys.readouterr().out)
    code, data = planned(capsys, "llama-70b", claims=["fits", "mfu > 0"], **SMALL)
    assert code == 1
    assert (data["best"], data["plans"]) == (None, [])
    assert data["smallest_bytes"] > 80e9
    assert data["asserts"] == {"fits": False, "mfu > 0": False}


@pytest.mark.parametrize(
    ("gpus", "layout", "why"),
    [
        (8, "tensor=7", "7 ranks do not divide 8 GPUs"),
        (7, "tensor=7", "7 tensor ranks do not divide"),
        (776, "", "776 does not divide 512 sequences"),
        (8, "data=8,context=2", "16 ranks do not divide 8 GPUs"),
    ],
)
def test_a_layout_that_cannot_be_is_a_failure_with_its_reason(
    capsys: Capture, gpus: int, layout: str, why: str
) -> None:
    assert plan("llama-70b", num_gpus=gpus, layout=layout) == 1
    assert why in " ".join(capsys.readouterr().out.split())


def test_days_hours_and_price_come_from_the_step(capsys: Capture) -> None:
    _, data = planned(capsys, "llama-8b", tokens="1T", price=2.0, **SMALL)
    best = data["best"]
    steps = 1e12 / (8 * 2048)
    assert best["days"] == pytest.approx(steps * best["step_s"] / 86400)
    assert best["gpu_hours"] == pytest.approx(best["days"] * 24 * 8)
    assert best["price"] == pytest.approx(2 * best["gpu_hours"])
    with_failures = data["goodput"]
    assert with_failures["mtbf_s"] == pytest.approx(1.824e8 / 8)
    assert with_failures["wall_s"] > best["days"] * 86400
    assert with_failures["price"] > best["price"]
    more = {**SMALL, "cluster": "dgx-a100", "tokens": "1T"}
    assert planned(capsys, "llama-8b", **more)[1]["goodput"] is None


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        (["fits"], 0),
        (["fits", "mfu >= 0.2", "step_s<100"], 0),
        (["mfu >= 0.99"], 1),
        (["fits", "memory_gb < 1"], 1),
    ],
)
def test_a_false_claim_is_a_failure(
    claims: list[str], code: int, capsys: Capture
) -> None:
    assert planned(capsys, "llama-8b", claims=claims, **SMALL)[0] == code


# ── the derivation ──────────────────────────────────────────────────────────────────

CASES = [
    Layout(data=16, zero_stage=3, recompute="selective"),
    Layout(data=2, tensor=8, zero_stage=1, recompute="full", sequence_parallel=True),
    Layout(tensor=2, pipeline=4, context=2, chunks=2, microbatch=2, recompute="none"),
    Layout(data=2, tensor=4, pipeline=2, zero_stage=2, recompute="selective"),
    Layout(data=8, context=2, microbatch=4),
    Layout(pipeline=16, recompute="full"),
]


def evaluated(shown: Derivation) -> float:
    text = re.sub(r"(?<=\d),(?=\d{3})", "", shown.numbers)
    text = text.replace("·", "*").replace("²", "**2")
    return float(eval(text, {"__builtins__": {}}, {"max": max}))


@pytest.mark.parametrize("layout", CASES, ids=str)
@pytest.mark.parametrize(
    ("model", "sequence"), [("llama-8b", 4096), ("gpt3", 2048), ("llama-8b", 16)]
)
def test_the_arithmetic_that_is_shown_gives_the_number(
    model: str, sequence: int, layout: Layout
) -> None:
    batch = Batch(sequence=sequence, global_batch=32)
    asked = question(model, "dgx-h100", layout.num_gpus, batch)
    chosen = plan_of(UNIT, asked, layout)
    shown = derivations(UNIT, asked, chosen)
    for one in shown:
        assert evaluated(one) == pytest.approx(one.value, rel=1e-6, abs=1e-9), one
    by_name = {one.name: one.value for one in shown}
    memory = sum(v for name, v in by_name.items() if name.startswith("memory:"))
    assert memory == pytest.approx(chosen.memory.total_bytes)
    assert by_name["time: step"] == chosen.time.total_s


def test_each_number_names_a_lesson_that_exists() -> None:
    known = {task.id for task in load_curriculum().tasks}
    for layout in CASES:
        batch = Batch(sequence=2048, global_batch=32)
        asked = question("llama-8b", "dgx-h100", layout.num_gpus, batch)
        for one in derivations(UNIT, asked, plan_of(UNIT, asked, layout)):
            assert one.lesson in known, one.lesson


# ── the simulation ──────────────────────────────────────────────────────────────────

PIPELINE = load("pipeline_parallel", "reference")
PLAYED = [
    Layout(data=4, pipeline=4, zero_stage=1, recompute="full"),
    Layout(data=2, tensor=8, zero_stage=0, recompute="selective"),
    Layout(data=2, tensor=2, pipeline=4, chunks=2, zero_stage=1),
    Layout(data=8, context=2, zero_stage=3, microbatch=2, sequence_parallel=False),
    Layout(tensor=16, recompute="full", microbatch=4, sequence_parallel=True),
    Layout(data=4, tensor=2, pipeline=2, zero_stage=2, recompute="selective"),
]


@pytest.mark.parametrize("layout", PLAYED, ids=str)
def test_the_simulator_agrees_with_the_formulas(layout: Layout) -> None:
    batch = Batch(sequence=2048, global_batch=64)
    asked = question("llama-8b", "dgx-h100", layout.num_gpus, batch)
    planned = plan_of(UNIT, asked, layout)
    played = play(UNIT, PIPELINE, asked, planned)
    assert played.step_s == pytest.approx(planned.time.total_s, rel=0.05)
    drawn = one_pipeline(PIPELINE, asked, played)
    assert drawn.world_size == layout.pipeline
    assert drawn.time_s == pytest.approx(played.step_s, rel=0.05)


@pytest.mark.parametrize(
    ("size", "stride"), [(8, 1), (16, 1), (8, 2), (4, 8), (16, 2), (32, 1)]
)
def test_rings_in_all_groups_at_once_take_what_the_formula_says(
    size: int, stride: int
) -> None:
    cluster = find_cluster("dgx-h100").value
    layout = Layout(data=32)
    link = UNIT.group_link(cluster, size, stride)
    ring = play_ring(cluster, layout, size, stride, 1e9)
    assert ring.seconds == pytest.approx(UNIT.ring_s(size, 1e9, link), rel=0.02)


def test_each_ring_leaves_a_node_through_another_rank() -> None:
    members = members_of(5, size=4, stride=1)
    assert members == [4, 5, 6, 7]
    assert rings_of(members, 8) == [[4, 5, 6, 7]]
    rings = rings_of([0, 1, 2, 3], 2)
    assert rings == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert members_of(5, size=2, stride=4) == [1, 5]


def test_the_simulated_step_is_shown_beside_the_formula(
    tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "step.html"
    _, data = planned(
        capsys, "llama-8b", layout="pipeline=4", simulate=True, html=str(page), **SMALL
    )
    assert abs(data["sim"]["formula_error"]) <= 0.05
    assert data["sim"]["formula_s"] == data["plans"][0]["step_s"]
    assert "<html" in page.read_text(encoding="utf-8")[:200]
    assert plan("llama-8b", simulate=True, html=str(page), **SMALL) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(page), "").splitlines())) <= 80


# ── the report, and refusals ────────────────────────────────────────────────────────


def test_the_report_fits_the_screen(capsys: Capture, golden: Golden) -> None:
    code = plan(
        "llama-8b",
        tokens="15T",
        price=2.5,
        why=True,
        claims=["fits", "mfu >= 0.99"],
        **SMALL,
    )
    out = capsys.readouterr().out
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    golden("cli/plan", re.sub(r"lesson [\d.]*", "lesson", out))


REFUSED: dict[str, Callable[[], object]] = {
    "no model": lambda: plan("", num_gpus=8),
    "unknown model": lambda: plan("llama-60b", num_gpus=8),
    "unknown cluster": lambda: plan("llama-8b", num_gpus=8, cluster="dgx-h1000"),
    "no GPUs": lambda: plan("llama-8b", num_gpus=0),
    "half a node": lambda: plan("llama-8b", num_gpus=12),
    "a sequence of -1": lambda: plan("llama-8b", num_gpus=8, sequence=-1),
    "a batch of 0": lambda: plan("llama-8b", num_gpus=8, global_batch=0),
    "memory without a unit": lambda: plan("llama-8b", num_gpus=8, max_memory="3"),
    "unknown part": lambda: plan("llama-8b", num_gpus=8, layout="tensr=8"),
    "odd degree": lambda: plan("llama-8b", num_gpus=8, layout="tensor=two"),
    "odd choice": lambda: plan("llama-8b", num_gpus=8, layout="recompute=some"),
    "no claim": lambda: plan("llama-8b", num_gpus=8, claims=["it is fast"]),
    "unknown figure": lambda: plan("llama-8b", num_gpus=8, claims=["mfuu > 1"]),
    "odd bound": lambda: plan("llama-8b", num_gpus=8, claims=["mfu > much"]),
    "days of no tokens": lambda: plan("llama-8b", **SMALL, claims=["days < 3"]),
    "a price of no tokens": lambda: plan("llama-8b", num_gpus=8, claims=["price<3"]),
    "too many ranks": lambda: plan("llama-8b", num_gpus=2048, simulate=True),
    "odd tokens": lambda: count("many"),
}


def test_what_cannot_be_planned_is_refused_in_a_sentence(golden: Golden) -> None:
    said = {name: refusal(ValueError, ask) for name, ask in REFUSED.items()}
    golden("cli/plan-refused", "\n".join(f"{k}: {v}" for k, v in said.items()))


@pytest.mark.parametrize(
    "text",
    [
        "layers = 4",
        "layers = 4.5\nhidden=8\nheads=2\nffn=8\nvocab=8",
        "layers = 4\nhidden=9\nheads=2\nffn=8\nvocab=8",
        "layers = 4\nhidden=8\nheads=2\nffn=8\nvocab=8\nwidth=3",
        "[a]\nlayers=1\n[b]\nlayers=2",
        "layers = ",
        "layers = true\nhidden=8\nheads=2\nffn=8\nvocab=8",
        "layers = 4\nhidden=8\nheads=2\nffn=8\nvocab=8\ntied=1",
        "layers = 4\nhidden=8\nheads=2\nffn=8\nvocab=8\nsequence='long'",
    ],
)
def test_a_model_file_that_is_wrong_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.toml"):
        find_model(str(path))
