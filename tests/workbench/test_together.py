"""Scenarios of a task in one run: as if each had been played by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distlab.grading.wishes import Asker, first_plays

from distlab.curriculum import UnitSource
from distlab.grading.clause import checks_of
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.together import Play, taken_apart
from distlab.runner import Cluster, Limits, RankRecord, Run
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on, with_body

TASK = "trainer.gradient_weight"
SPOILING = """    import torch.distributed as dist
    played = getattr(dist, "played", 0)
    dist.played = played + 1
    total = torch.tensor([num_samples * (1 + played // 3)])
    comm.all_reduce(total)
    return num_samples / int(total) if total else 0.0
"""


def implementation(unit: str) -> Implementation:
    source = UnitSource(unit, "reference", Path(f"{unit}.py"), solution_of(unit))
    where = CURRICULUM.units[unit].solution(CURRICULUM.root)
    return Implementation(source, replace(source, path=where))


def bench_of(cluster: Cluster, kind: type[RankHarness] = RankHarness) -> RankHarness:
    return kind(cluster, 3, 7, Limits(seconds=20.0))


def plays_of(cluster: Cluster, task: str = TASK) -> tuple[Play, ...]:
    impl = implementation(task.partition(".")[0])
    return first_plays(checks_of(task), impl, bench_of(cluster, Asker))


@pytest.mark.parametrize(
    ("task", "count"),
    [
        (TASK, 3),
        ("trainer.evaluate", 3),
        ("trainer.average_gradients", 2),
        ("collectives.broadcast", 4),
        ("data_loader.sampler", 1),
    ],
)
def test_the_checks_tell_what_they_will_run(
    cluster: Cluster, task: str, count: int
) -> None:
    assert len(plays_of(cluster, task)) == count


def test_in_one_run_as_in_several(cluster: Cluster) -> None:
    impl, plays = implementation("trainer"), plays_of(cluster)
    alone, together = bench_of(cluster), bench_of(cluster)
    together.plan = plays
    for play in plays:
        apart = alone.observe(impl, play.scenario, **dict(play.values))
        within = together.observe(impl, play.scenario, **dict(play.values))
        assert within.outcome == apart.outcome == "finished"
        torch.testing.assert_close(within.values, apart.values, rtol=0, atol=0)
        for one, other in zip(within.ranks, apart.ranks, strict=True):
            assert [c["op"] for c in one.calls()] == [c["op"] for c in other.calls()]
            assert one.sent_bytes == other.sent_bytes
            assert one.messages == other.messages
    assert together.forget_company()
    assert not together.forget_company()


def test_what_was_played_before_is_nobodys_mistake(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The second call in a process goes wrong here; each scenario makes one."""
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
