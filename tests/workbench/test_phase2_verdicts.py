"""What a verdict of phase 2 says besides its slug: sentence, rule and clause."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.grading.verdict import ClauseVerdict
from distlab.runner import Cluster
from tests.workbench.golden import Golden
from tests.workbench.judging import catalogue, solution_of, verdict_on, verdict_on_entry


def failure(
    cluster: Cluster, folder: Path, name: str, *, world_size: int = 3
) -> ClauseVerdict:
    verdict = verdict_on_entry(cluster, folder, name, worlds=(world_size,))
    found = verdict.first_failure()
    assert found is not None
    return found


# In the sentence or in the rule of each, something is about this very mistake.
TOLD = (
    *("GA07", "GA13", "GA54", "GA28", "TP100", "TP102", "TP42", "MP47", "MP81"),
    *("MD39", "MD40", "PI66"),
)


@pytest.mark.slow
def test_the_sentence_and_the_rule_are_about_this_mistake(
    cluster: Cluster, tmp_path: Path, golden: Golden
) -> None:
    said = []
    for name in TOLD:
        entry = catalogue()[name]
        found = failure(cluster, tmp_path, name)
        assert (found.id, found.slug) == (entry.clause, entry.slug), name
        said.append(f"{name}: {entry.title}\n  {found.message}\n  {found.rule}")
    golden("grading/verdicts_of_phase_2", "\n".join(said))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("PI15", "1F1B"), ("PI62", "GPipe")])
def test_the_schedule_that_failed_is_named(
    name: str, schedule: str, cluster: Cluster, tmp_path: Path
) -> None:
    found = failure(cluster, tmp_path, name)
    entry = catalogue()[name]
    assert (found.id, found.slug) == (entry.clause, entry.slug)
    assert schedule in found.message.partition(",")[0]


@pytest.mark.slow
def test_a_schedule_that_stops_on_simulated_ranks_only_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = solution_of("pipeline_parallel")
    loop = "    for action in schedule:\n        source, destination"
    assert text.count(loop) == 1
    in_turns = 'len(microbatches) == 8 and schedule[1].kind == "B"'
    wait = f"    if {in_turns}:\n        comm.recv(torch.zeros(1), 0, 999)\n"
    path = tmp_path / "wrong"
    path.mkdir()
    verdict = verdict_on(
        cluster,
        path,
        "pipeline_parallel.free",
        text.replace(loop, wait + loop),
        worlds=(3,),
    )
    found = verdict.first_failure()
    assert found is not None
    assert found.id == "C1"
    assert "1F1B" in found.message.partition(",")[0]
    assert "on 4 " in found.message


def test_an_error_is_the_clauses_whose_part_raised_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    for name, world_size in (("AC11", 1), ("TP14", 3)):
        verdict = verdict_on_entry(cluster, tmp_path, name, worlds=(world_size,))
        states = [clause.status for clause in verdict.clauses[:2]]
        assert (states, verdict.slug) == (["skip", "fail"], "raised")
