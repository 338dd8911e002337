"""`distlab drill`: real faults drawn by a seed, right and wrong answers to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distlab.chaos.incidents import PAUSE, RANKS, SAVE_EVERY, STEPS, InjectedFault, draw
from distlab.cli.drill import ask, truth
from distlab.curriculum import load
from distlab.given.drill import (
    ACTIONS,
    DESYNC,
    KILLED,
    NOTHING,
    SLOW,
    TORN,
    Cause,
    Incident,
)
from distlab.grading.checks.drill.histories import recorded
from tests.workbench.course import ROOT

SOLUTION = ROOT / "solutions/phase4_production/drill.py"


def first(what: str) -> int:
    return next(seed for seed in range(1000) if draw(seed).what == what)


def test_a_seed_draws_each_kind_of_fault_where_it_can_be_seen() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert drawn[7] == draw(7)
    assert {one.what for one in drawn} == {*ACTIONS, PAUSE}
    for one in drawn:
        if one.what == NOTHING:
            continue
        assert 0 <= one.rank < RANKS
        assert SAVE_EVERY < one.step <= STEPS - 5
        if one.what == TORN:
            assert one.torn == (one.rank, one.step)
    assert {one.rank for one in drawn if one.what == KILLED} == {0, 1, 2, 3}


def test_the_truth_is_what_was_injected_and_a_pause_is_nothing() -> None:
    assert InjectedFault(PAUSE, 2, 9).cause == Cause(NOTHING)
    run, cause = recorded("killed_and_torn")
    assert truth(run, cause) == Incident(KILLED, 1, 12, "restart", 6)


def test_an_answer_that_raises_or_is_no_incident_is_none() -> None:
    class Unit:
        def __init__(self, says: Any) -> None:
            self.says = says

        def incident(self, reports: Any, events: Any) -> Any:
            if self.says is None:
                raise KeyError("rank")
            return self.says

    run, cause = recorded("slow")
    assert ask(Unit(None), run) == (None, "KeyError: 'rank'")
    assert ask(Unit((SLOW, 3)), run)[0] is None
    right, error = ask(load("drill", "reference"), run)
    assert (right, error) == (truth(run, cause), "")


def drilled(seed: int, code: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            *f"-m distlab drill --json --seed {seed} --code".split(),
            code,
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_solution_names_what_was_injected_into_a_live_run() -> None:
    code, data = drilled(first(KILLED), "reference")
    assert data["expected"]["what"] == KILLED
    assert data["answer"] == data["expected"]
    assert (code, data["is_right"]) == (0, True)


@pytest.mark.slow
def test_a_wrong_incident_is_not_accepted(tmp_path: Path) -> None:
    """It takes the last step in which ranks differ, in place of the first."""
    path = tmp_path / "drill.py"
    text = SOLUTION.read_text(encoding="utf-8")
    right = "in by_step(reports).items():\n        checksums"
    wrong = "in [*by_step(reports).items()][::-1]:\n        checksums"
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    code, data = drilled(first(DESYNC), str(path))
    assert data["error"] == ""
    assert data["answer"]["what"] == DESYNC
    assert data["answer"]["step"] > data["expected"]["step"]
    assert (code, data["is_right"]) == (1, False)
