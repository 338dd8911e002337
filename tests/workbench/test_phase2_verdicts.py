"""What a verdict of phase 2 says besides its slug: sentence, rule and clause."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.grading.verdict import ClauseVerdict
from distlab.runner import Cluster
from tests.workbench.judging import catalogue, solution_of, verdict_on, verdict_on_entry


def failure(
    cluster: Cluster, folder: Path, name: str, *, world_size: int = 3
) -> ClauseVerdict:
    verdict = verdict_on_entry(cluster, folder, name, worlds=(world_size,))
    found = verdict.first_failure()
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says", "rule"),
    [
        ("GA07", "of the old step are still in the sum", "set it to zero before the"),
        ("GA13", "summed over the ranks after every", "after the last microbatch"),
        ("GA54", "and with it those of the old step", "set it to zero before the"),
        ("GA28", "it was wiped out after backward()", "before the first backward()"),
        (
            "TP100",
            "is -inf: the ranks' largest logits were",
            "without an op all_reduce sums",
        ),
        (
            "TP102",
            "so large that every exp() is 0",
            "for each token, the largest of its logits",
        ),
        ("TP42", "is inf, which is not finite", "subtract the largest logit of all"),
        ("MP47", "in the first step and in no later step", "update ends the step"),
        ("MP81", "step 6 was skipped, and so was step 7", "update ends the step"),
        ("MD39", "it was sent in a tensor of 32 bits", "torch.zeros(1) is float32"),
        ("MD40", "it was sent in a tensor of 16 bits", "torch.zeros(1) is float32"),
        ("PI66", "more microbatches are kept than", "retain_graph=True holds them"),
        ("PI15", "1F1B: ", "one side of every pair must receive"),
        ("PI62", "GPipe: rank", ""),
    ],
)
def test_the_sentence_and_the_rule_are_about_this_mistake(
    name: str,
    says: str,
    rule: str,
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    entry = catalogue()[name]
    found = failure(cluster, tmp_path, name)
    assert (found.id, found.slug) == (entry.clause, entry.slug)
    assert says in found.message
    assert rule in found.rule


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
    assert found.message.startswith("1F1B: on 4 simulated ranks: ")


def test_an_error_is_the_clauses_whose_part_raised_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    for name, world_size in (("AC11", 1), ("TP14", 3)):
        verdict = verdict_on_entry(cluster, tmp_path, name, worlds=(world_size,))
        states = [clause.status for clause in verdict.clauses[:2]]
        assert (states, verdict.slug) == (["skip", "fail"], "raised")
