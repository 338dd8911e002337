"""`distlab score-test`: tests that a learner writes, scored with the catalogue."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.score_test import path_of_tests, score_test
from distlab.curriculum import CurriculumError, Progress, load_curriculum
from distlab.grading.catalogue import read_catalogue
from distlab.grading.written_tests import (
    Score,
    read_tests,
    read_unseen,
    score,
    units_with_tests,
)
from distlab.runner import Cluster
from tests.workbench.course import ROOT, Course, keep_warm

Capture = pytest.CaptureFixture[str]
CURRICULUM = load_curriculum(ROOT)
UNITS = [unit.name for unit in units_with_tests(CURRICULUM)]
FIRST = "collectives.exchange"


def scored(cluster: Cluster, path: Path, unit: str, task: str = "") -> Score:
    found = CURRICULUM.units[unit]
    return score(CURRICULUM, cluster, found, read_tests(found, path), task=task)


def written(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "test_collectives.py"
    path.write_text(body, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_the_reference_catches_all_that_can_be_seen(
    unit: str, cluster: Cluster
) -> None:
    done = scored(cluster, ROOT / "solutions" / "tests" / f"{unit}.py", unit)
    assert done.refused == {}
    assert [entry.id for entry in done.escaped] == []
    assert len(done.wrong) > 80


@pytest.mark.parametrize("unit", UNITS)
def test_what_cannot_be_seen_is_in_the_catalogue_and_is_little(unit: str) -> None:
    unseen = read_unseen(CURRICULUM, unit)
    known = {entry.id for entry in read_catalogue(CURRICULUM, unit=unit)}
    assert set(unseen) <= known
    assert len(unseen) <= 0.05 * len(known)
    assert all(unseen.values())


NOTHING = """
def test_all(run):
    def program(comm, unit):
        pass
    run(program, 3)

def test_names_it(unit):
    unit.send_recv
"""
ALWAYS = """
def test_fails(unit):
    unit.send_recv
    assert False
"""
VALUES = """
import torch

def test_values(run):
    def program(comm, unit):
        tensor = torch.tensor([5.0 + comm.rank])
        unit.send_recv(comm, tensor)
        return tensor.item()

    assert run(program, 3) == [5.0, 5.0, 7.0]
"""


def test_what_asserts_nothing_scores_nothing(tmp_path: Path, cluster: Cluster) -> None:
    done = scored(cluster, written(tmp_path, NOTHING), "collectives", FIRST)
    assert (done.caught, done.refused) == ({}, {})
    assert len(done.wrong) > 20


def test_what_fails_with_right_solutions_does_not_count(
    tmp_path: Path, cluster: Cluster
) -> None:
    done = scored(cluster, written(tmp_path, ALWAYS), "collectives", FIRST)
    assert done.caught == {}
    assert done.refused == {"test_fails": ("reference", "AssertionError (line 4)")}


def test_the_command_begins_a_file_and_keeps_the_score(
    here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    keep_warm(cluster, monkeypatch)
    (here.root / "tests" / "mutants").symlink_to(ROOT / "tests" / "mutants")
    assert score_test("collectives") == 10
    curriculum = load_curriculum(here.root)
    path = path_of_tests(curriculum, curriculum.units["collectives"])
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^def test_send_recv\(run\):$", text, re.MULTILINE)
    assert "tree_broadcast" in text
    path.write_text(VALUES, encoding="utf-8")
    capsys.readouterr()
    played: list[Score] = []

    def once(*args: Any, **options: Any) -> Score:
        """It is played for the report as JSON; the one in words tells of the same."""
        played[:] = played or [score(*args, **options)]
        return played[0]

    monkeypatch.setattr("distlab.grading.written_tests.score", once)
    assert score_test("1.1", as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["score"] < told["of"] == told["score"] + len(told["escaped"])
    # CO05 sends nothing, CO18 ends its process; CO17 has another dtype only
    assert {"CO05", "CO18"} <= set(told["caught"])
    assert "CO17" in told["escaped"]
    assert told["do_not_count"] == {}
    assert score_test("1.1") == 1
    said = capsys.readouterr().out
    assert re.search(rf"^1\.1 +exchange +{told['score']} of +{told['of']}$", said, re.M)
    assert played[0].escaped[0].title in " ".join(said.split())
    assert "comm." not in said  # titles only, no code
    assert "tests" not in Progress(here.root).read() or not Progress(
        here.root
    ).read().get("tests")
    with pytest.raises(CurriculumError, match=r"\bring_allreduce\b.*\btrainer$"):
        score_test("trainer")
