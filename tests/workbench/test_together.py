"""Scenarios of a task in one run: as if each had been played by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.curriculum.units import read_source
from distlab.grading.clause import checks_of
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.runs import RunSpec
from distlab.grading.together import taken_apart
from distlab.runner import Cluster, Limits, RankRecord, Run
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on, with_body

TASK = "trainer.gradient_weight"
SPOILING = """    import torch.distributed as dist
    played = getattr(dist, "played", 0)
    dist.played = played + 1
    total = torch.tensor([num_samples * (1 + played // 5)])
    comm.all_reduce(total)
    return num_samples / int(total) if total else 0.0
"""


class Counting(Cluster):
    """Hands its runs on to another cluster, and counts them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.count = cluster, 0

    def run(self, *values: Any, **named: Any) -> Run:
        self.count += 1
        return self._cluster.run(*values, **named)


@pytest.fixture
def counting(cluster: Cluster) -> Counting:
    return Counting(cluster)


def plan_of(task: str) -> tuple[RunSpec, ...]:
    """What the clauses of a task want in any case, on three ranks."""
    specs = [s for c in checks_of(task) if 3 in c.worlds for s in c.runs(3)]
    return tuple(dict.fromkeys(specs))


def runs_of(
    cluster: Cluster, plan: tuple[RunSpec, ...] = (), text: str = ""
) -> PlayedRuns:
    reference = read_source(CURRICULUM, CURRICULUM.units["trainer"], "reference")
    source = replace(reference, text=text or reference.text)
    impl = Implementation(source, reference)
    return PlayedRuns(cluster, impl, 3, 7, Limits(seconds=20.0), plan)


def test_in_one_run_as_in_several(cluster: Cluster, counting: Counting) -> None:
    plan = plan_of(TASK)
    assert len(plan) > 1
    alone, together = runs_of(cluster), runs_of(counting, plan)
    for spec in plan:
        apart, within = alone.read(spec), together.read(spec)
        assert within.outcome == apart.outcome == "finished"
        torch.testing.assert_close(within.values, apart.values, rtol=0, atol=0)
        for one, other in zip(within.ranks, apart.ranks, strict=True):
            assert [c["op"] for c in one.calls()] == [c["op"] for c in other.calls()]
            assert one.sent_bytes == pytest.approx(other.sent_bytes)
            assert one.messages == other.messages
    assert counting.count == 1


def test_each_by_itself_plays_again_what_had_company(counting: Counting) -> None:
    plan = plan_of(TASK)
    together = runs_of(counting, plan)
    together.read(plan[0])
    assert together.shared == set(plan)
    alone = together.alone()
    assert not alone.shared
    assert [alone.read(spec).outcome for spec in plan] == ["finished"] * len(plan)
    assert counting.count == 1 + len(plan)


def test_what_was_played_by_itself_is_not_played_again(counting: Counting) -> None:
    first, *others = plan_of(TASK)
    runs = runs_of(counting, tuple(others))
    runs.read(first)
    runs.read(others[0])
    assert runs.alone().read(first) is runs.read(first)


def test_of_a_run_that_fails_only_the_first_scenario_is_known(
    counting: Counting,
) -> None:
    text = with_body(solution_of("trainer"), TASK, "raise KeyError", "gradient_weight")
    plan = plan_of(TASK)
    runs = runs_of(counting, plan, text)
    assert [runs.read(spec).outcome for spec in plan] == ["raised"] * len(plan)
    assert counting.count == len(plan)


def test_the_same_run_is_played_once(counting: Counting) -> None:
    (spec, *_), runs = plan_of(TASK), runs_of(counting)
    assert runs.ended(spec) is runs.ended(spec.scenario, **dict(spec.values))
    assert counting.count == 1


def test_another_implementation_has_records_of_its_own(counting: Counting) -> None:
    spec = plan_of(TASK)[0]
    runs = runs_of(counting)
    other = runs.of(runs.impl.reference_alone)
    assert runs.read(spec) is not other.read(spec)


def test_what_was_played_before_is_nobodys_mistake(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The sixth call in a process goes wrong here; no scenario makes as many."""
    text = with_body(solution_of("trainer"), TASK, SPOILING, "gradient_weight")
    verdict = verdict_on(cluster, tmp_path, TASK, text)
    assert verdict.status == "pass", verdict.message


def finished(marks: list[int], count: int) -> tuple[Run, list[list[Any]]]:
    record = RankRecord(rank=0, status="finished", marks=marks)
    run = Run(world_size=1, outcome="finished", ranks=(record,), seconds=0, limit_s=1)
    return run, [[["a value", 8.0, 1]] * count]


def test_only_whole_runs_are_taken_apart() -> None:
    run, told = finished([2, 4], 2)
    assert [part.values for part in taken_apart(run, told, 2)] == [["a value"]] * 2
    assert taken_apart(replace(run, outcome="deadlock"), told, 2) == []
    assert taken_apart(run, [told[0][:1]], 2) == []
    assert taken_apart(run, [[*told[0], ["forged", 0.0, 0]]], 2) == []
    assert taken_apart(run, [[told[0][0], "forged"]], 2) == []
    assert taken_apart(run, [[told[0][0], ["forged", "many", 1]]], 2) == []


def test_reports_of_a_scenario_are_its_own() -> None:
    record = RankRecord(
        rank=0, status="finished", marks=[1, 2, 3, 3], journal=[{}, {}, {}]
    )
    run = Run(world_size=1, outcome="finished", ranks=(record,), seconds=0, limit_s=1)
    told = [["begun", ["first", 8.0, 1], "begun", ["second", 0.0, 0]]]
    first, second = taken_apart(run, told, 2)
    assert [first.values, second.values] == [["first"], ["second"]]
    assert [first.ranks[0].marks, second.ranks[0].marks] == [[1], [1]]
    assert [len(part.ranks[0].journal) for part in (first, second)] == [2, 1]
    assert taken_apart(run, [[*told[0][:3], "never ended"]], 1) == []
