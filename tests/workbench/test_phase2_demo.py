"""`distlab demo --phase 2`, its text, and what the walkthrough of phase 2 draws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.demo import demo
from distlab.cli.demo_mesh import demo_mesh
from distlab.cli.screen import command
from distlab.cli.use import use
from distlab.data.text import Text, load_text
from distlab.digests import digest
from distlab.models.transformer import TransformerConfig
from distlab.runner import Cluster
from distlab.saved_tensors import SavedTensors
from distlab.training.mesh import (
    LAYOUTS,
    PRELOADS,
    MeshConfig,
    MeshResult,
    compare,
)
from distlab.training.mesh_code import (
    NEEDED,
    UnfinishedError,
    choose_units,
    needed_parts,
)
from distlab.walkthroughs import phase2, phase2_lab
from tests.workbench.course import ROOT, Course, pristine
from tests.workbench.golden import Golden
from tests.workbench.judging import solution_of
from tests.workbench.refusals import without_figures

Capture = pytest.CaptureFixture[str]
TINY = MeshConfig(
    num_steps=3, batch_size=4, num_microbatches=2, context=8, dim=8, num_layers=2
)


# ── the text ────────────────────────────────────────────────────────────────────────


def test_the_text_is_as_it_was() -> None:
    text = load_text()
    assert (len(text.tokens), len(text.letters)) == (31_740, 68)
    assert digest(text.tokens) == "7717ecc2"  # or the losses are no longer those quoted


def test_a_batch_is_passages_of_the_text_and_the_same_for_all() -> None:
    text = Text("abc", torch.tensor([0, 1, 2, 0, 1]))
    batches = [text.batch((40, 4), seed=1, step=step) for step in (0, 0, 1)]
    assert {tuple(row) for row in batches[0].tolist()} == {(0, 1, 2, 0), (1, 2, 0, 1)}
    assert batches[0].equal(batches[1])
    assert not batches[0].equal(batches[2])


# ── the demo ────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def warm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are there already; they end with the session."""
    cluster.warm("distlab.grading.warmup:one_step", *PRELOADS)

    class Warm:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Cluster:
            return cluster

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("distlab.runner.Cluster", Warm)
    monkeypatch.delenv("DISTLAB_IMPL", raising=False)


@pytest.mark.slow
def test_both_meshes_are_one_process(capsys: Capture, golden: Golden) -> None:
    assert demo_mesh(as_json=True, config=TINY) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], found["exit"], found["failures"]) == (True, 0, [])
    assert set(found["meshes"]) == set(LAYOUTS)
    for mesh in found["meshes"].values():
        zero, one, two, three = mesh["step_bytes"]
        assert mesh["difference"] <= 1e-10
        assert zero == one
        assert two == three
    demo_mesh(config=TINY)
    said = capsys.readouterr().out
    assert f" {1_168 + 2 * 872:,} " in said
    assert not set(said) & {"\r", "\x1b"}
    golden("demo/phase2", without_figures(said.replace(command(""), "distlab")))


@pytest.mark.slow
def test_a_missing_way_in_is_seen_in_both(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.py"
    right = solution_of("tensor_parallel")
    wrong = right.replace("        ctx.comm.all_reduce(total)\n", "")
    assert wrong != right
    path.write_text(wrong, encoding="utf-8")
    assert demo_mesh(code=str(path), as_json=True, config=TINY) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], found["exit"], len(found["failures"])) == (False, 1, 2)
    for mesh in found["meshes"].values():
        assert mesh["difference"] > 1e-6
        # The first step is right: only what comes after it is not.
        assert mesh["losses"][0][0] == pytest.approx(found["losses_alone"][0], 1e-12)
        assert len(set(mesh["pids"])) == 4


def test_ranks_that_raise_are_no_training(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.py"
    text = solution_of("model_parallel").replace("if not 1 <=", "if 1 <=")
    path.write_text(text, encoding="utf-8")
    assert demo_mesh(code=str(path), config=TINY) == 1
    said = capsys.readouterr()
    assert command("check --phase 2") in said.err
    assert command("status") not in said.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"phase": 5}, r"\bphase 5\b"),
        ({"phase": 2, "world_size": 3}, r"\bphase 2\b.*\b2 × 2\b"),
        ({"phase": 2, "epochs": 1}, r"\bphase 2\b.*\bepochs\b"),
        ({"phase": 2, "code": str(ROOT / "README.md")}, r"README\.md\b.*\bPython\b"),
        ({"phase": 2, "code": __file__}, r"\bpartition, execute, make_mesh\b"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        demo(**arguments)


def test_a_loss_that_is_no_number_is_no_small_difference() -> None:
    alone = MeshResult(losses=((1.0, 2.0),), step_s=0.0)
    ranks = MeshResult(losses=((1.0, 2.0), (1.0, 2.5)), step_s=0.0)
    assert compare(ranks, alone) == 0.5
    ranks = MeshResult(losses=((1.0, 2.0), (math.nan, 2.5)), step_s=0.0)
    assert not compare(ranks, alone) <= 1e-10


# ── whose code ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A learner who has finished tensor_parallel, and nothing else."""
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    folder = course.root / "phase2_advanced"
    for unit in NEEDED:
        (folder / f"template_{unit}.py").write_text(pristine(unit), encoding="utf-8")
    own = solution_of("tensor_parallel")
    (folder / "template_tensor_parallel.py").write_text(own, encoding="utf-8")
    return course


def test_what_is_not_written_is_named(here: Course, capsys: Capture) -> None:
    with pytest.raises(UnfinishedError, match=r"2\.8 model_parallel\.partition, 2\.11"):
        choose_units("mine")
    assert demo_mesh(code="mine", config=TINY) == 1
    assert command("use reference 2.8") in capsys.readouterr().err


def test_the_rest_may_be_set_to_the_reference(here: Course, capsys: Capture) -> None:
    assert use("reference", ["model_parallel", "pipeline_parallel"]) == 0
    units = choose_units("mine")
    whose = {part.number: part.whose for part in needed_parts(units)}
    theirs = dict.fromkeys(("2.8", "2.11", "2.12", "2.13", "2.14"), "reference")
    mine = dict.fromkeys(("2.15", "2.16", "2.17", "2.18"), "mine")
    assert whose == {**theirs, **mine}
    assert list(whose) == [*theirs, *mine]
    capsys.readouterr()
    assert demo_mesh(code="mine", config=TINY) == 0
    assert "◆" in capsys.readouterr().out


def test_without_a_wish_only_what_has_passed_is_the_learners(here: Course) -> None:
    parts = needed_parts(choose_units(None))
    assert {part.whose for part in parts} == {"reference"}
    assert parts[-1].why not in ("", "as set")


# ── the walkthrough ─────────────────────────────────────────────────────────────────


def test_live_bytes_count_once_what_two_operations_keep() -> None:
    x, weight = torch.ones(1_000), torch.nn.Parameter(torch.ones(1_000))
    with SavedTensors([weight]) as live:
        y = x * weight  # keeps x for the weight's gradient
        z = torch.relu(y) * x  # keeps the relu's result, and x once more
        assert live.history == [0, 4_000, 8_000]
        z.sum().backward()
        del y, z
    assert live.history[-1] == 0
    assert live.peak == 8_000


def test_a_played_schedule_counts_what_is_kept() -> None:
    rows = ("F0", "F1", "B0", "B0", ".", "B1", "B1")
    played = phase2.Played(text="", rows=(rows,))
    assert played.live(0) == [1, 2, 2, 2, 1, 1, 1]
    assert played.blocks(0)[1:3] == [("F1", 1, 1), ("B0", 2, 2)]
    assert (played.idle, played.num_chunks) == ([1], 1)


def test_a_pair_of_microbatch_and_model_chunk_is_part_of_a_microbatch() -> None:
    rows = ("F0", "F0'", "B0'", "B0'", "B0", "B0")
    [row] = phase2_lab.schedule_rows(
        {"x": phase2.Played(text="", rows=(rows,))}
    ).values()
    _, idle, kept_by_first, _ = row.values()
    assert (idle, kept_by_first) == (0, 1.0)


def test_a_table_has_a_line_for_each_row(capsys: Capture) -> None:
    rows = {"a": {"x": 1234, "long": 0.5}, "bb": {"x": 2, "long": 0.25}}
    phase2_lab.print_table(phase2_lab.columns(rows, "long"), "row", digits=1)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == [["row", "long"], ["a", "0.5"], ["bb", "0.2"]]
    phase2_lab.print_table(phase2_lab.differences(rows, "x"), "row", digits=2)
    assert capsys.readouterr().out.splitlines()[2].split() == ["bb", "1.75"]


def test_layers_shared_out_evenly_and_what_they_cost() -> None:
    assert phase2.evenly(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert phase2.evenly(5, 2) == [[0, 1], [2, 3, 4]]
    costs = phase2.layer_costs(TransformerConfig(dim=4, context=2, vocab_size=10))
    block = 12 * 4 * 4 + 2 * 2 * 4
    assert list(costs.values()) == [0, block, block, 40]
