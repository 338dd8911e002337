"""Assertions of the checks: found, taken out, put back. All of them: make ablation."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from distlab.grading.ablation import FOLDER, Finding, Site, ablate, sites_of
from distlab.grading.catalogue import Entry
from distlab.grading.mutants import judge
from distlab.runner import Cluster
from tests.ablation import EXCUSED
from tests.workbench.judging import CURRICULUM, catalogue

BY_ID = catalogue()


@pytest.fixture(scope="module", autouse=True)
def whole_heap(small_heap: None) -> None:
    """The ablation finds functions among all objects, which frozen ones aren't."""
    gc.unfreeze()


CHECK = """
def check(run, runs):
    expect_values(run)
    if run:
        raise NotYetError("wrong")
    runs.finished(scenario)
    helper(run)
    values = expect_values(run)
    raise ValueError("our own mistake")
    raise NotJudgedError(
        "see C1"
    )
"""


def test_assertions_are_found(tmp_path: Path) -> None:
    path = tmp_path / "checks.py"
    path.write_text(CHECK, encoding="utf-8")
    found = [(site.first, site.last, site.text) for site in sites_of(path)]
    assert found == [
        (3, 3, "expect_values(run)"),
        (5, 5, "raise NotYetError('wrong')"),
        (6, 6, "runs.finished(scenario)"),
        (10, 12, "raise NotJudgedError('see C1')"),
    ]


@pytest.fixture(scope="module")
def findings(cluster: Cluster) -> dict[str, Finding]:
    """What two wrong solutions of 1.1 tell: one is silent, one changes a value."""
    entries = [BY_ID["CO05"], BY_ID["CO04"]]
    found = ablate(CURRICULUM, cluster, entries, lambda _: None)
    return {finding.site.text: finding for finding in found}


@pytest.mark.slow
def test_an_assertion_without_which_a_verdict_changes_is_needed(
    findings: dict[str, Finding],
) -> None:
    needed = {f.entry: f.site.text for f in findings.values() if f.state == "needed"}
    assert needed["CO05"].startswith("expect_messages(run, ")
    assert "CO04" in needed


@pytest.mark.slow
def test_an_assertion_that_no_wrong_solution_makes_speak_is_silent(
    findings: dict[str, Finding],
) -> None:
    silent = [text for text, finding in findings.items() if finding.state == "silent"]
    assert any(text.startswith("raise ") and "rank 1" in text for text in silent)
    assert all(findings[text].entry == "" for text in silent)


@pytest.mark.slow
def test_everything_is_in_its_place_again(
    cluster: Cluster, findings: dict[str, Finding]
) -> None:
    assert findings
    entries: list[Entry] = [BY_ID["CO05"], BY_ID["CO04"]]
    assert all(result.as_named for result in judge(CURRICULUM, cluster, entries))


def test_every_excuse_is_for_an_assertion_that_is_there() -> None:
    for file, start in EXCUSED:
        sites: list[Site] = sites_of(FOLDER / file)
        assert any(site.text.startswith(start) for site in sites), (file, start)
