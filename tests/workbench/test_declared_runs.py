"""What clauses declare: runs for each world size, each of them written in one way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from distlab.curriculum import UnitSource
from distlab.grading import clause as register
from distlab.grading.clause import Check, checks_of, declared_runs
from distlab.grading.report import lines_of, plain
from distlab.grading.runs import (
    RecordedRuns,
    Runs,
    RunSpec,
    in_rounds,
    in_virtual_time,
    on_ranks,
)
from distlab.grading.verdict import HARNESS, NotYetError
from distlab.runner import Cluster, ErrorRecord, RankContext, RankRecord, Run
from distlab.runner.rank import resolve
from distlab.runner.wire import decode, encode
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on
from tests.workbench.naming import named

TASKS_OF: dict[str, list[str]] = {}
for _task in CURRICULUM.tasks:
    TASKS_OF.setdefault(_task.unit, []).append(_task.id)
UNITS = list(TASKS_OF)


def declared(task: str) -> list[tuple[Check, int, RunSpec]]:
    return [
        (check, n, spec)
        for check in checks_of(task)
        for n in check.worlds
        for spec in (*check.runs(n), *check.later(n))
    ]


@pytest.mark.parametrize("unit", UNITS)
def test_every_clause_is_judged_and_declares_a_run_at_each_world_size(
    unit: str,
) -> None:
    for task in TASKS_OF[unit]:
        checks = checks_of(task)
        assert {check.clause for check in checks} == set(CURRICULUM.task(task).clauses)
        wanted = {(check.judge, n) for check in checks for n in check.worlds}
        assert {(check.judge, n) for check, n, _ in declared(task)} == wanted


@pytest.mark.parametrize("unit", UNITS)
def test_runs_are_equal_if_and_only_if_they_are_written_alike(unit: str) -> None:
    """Or one run would be played twice, or two would share a record."""
    for task in TASKS_OF[unit]:
        by_text: dict[str, RunSpec] = {}
        by_value: dict[RunSpec, str] = {}
        for _, _, spec in declared(task):
            assert by_text.setdefault(str(spec), spec) == spec
            assert by_value.setdefault(spec, str(spec)) == str(spec)


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_run_is_about_is_said_in_one_way(unit: str) -> None:
    for task in TASKS_OF[unit]:
        said: dict[RunSpec, str] = {}
        for check, _, spec in declared(task):
            assert said.setdefault(spec, spec.situation) == spec.situation, check.clause


def test_a_run_that_failed_says_what_it_is_about() -> None:
    error = ErrorRecord(type="IndexError", message="it is empty")
    rank = RankRecord(rank=0, status="raised", error=error)
    run = Run(world_size=1, outcome="failed", ranks=(rank,), seconds=0.0, limit_s=1.0)
    spec = on_ranks(_play)
    source = UnitSource("topology", "file", Path("topology.py"), "")
    for read in (_play, spec):
        runs = RecordedRuns(source, 1, 0, {spec: run})
        runs.declared = frozenset([spec.when("with an empty tensor")])
        with pytest.raises(NotYetError) as failed:
            runs.finished(read)
        assert failed.value.situation == "with an empty tensor"
        assert failed.value.headline.startswith(f"{failed.value.situation}, ")


def _play(context: RankContext, unit: ModuleType, seed: int) -> None:
    raise AssertionError("only its record is read")


@pytest.mark.parametrize("unit", UNITS)
def test_a_rank_finds_the_scenario_and_gets_its_values(unit: str) -> None:
    for task in TASKS_OF[unit]:
        for spec in {spec for _, _, spec in declared(task)}:
            assert resolve(spec.name) is spec.scenario
            assert decode(encode(spec.values)) == spec.values


def scenario() -> None:
    """Only its name is of interest."""


def test_the_order_of_values_makes_no_other_run() -> None:
    assert on_ranks(scenario, a=1, b=2) == on_ranks(scenario, b=2, a=1)
    assert on_ranks(scenario, a=1) != on_ranks(scenario, a=2)
    assert in_rounds(scenario, 4, 8) == in_virtual_time(scenario, 4, bytes_per_s=8)
    assert in_rounds(scenario, 4, 8) != on_ranks(scenario)


def test_an_undeclared_run_is_our_mistake_and_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "collectives.exchange"
    first, second = checks_of(task)

    def reads_what_it_did_not_declare(runs: Runs) -> str | None:
        runs.finished(scenario, times=3)
        return None

    checks = [first, replace(second, judge=reads_what_it_did_not_declare)]
    monkeypatch.setitem(register._CHECKS, task, checks)
    text = solution_of("collectives")
    verdict = verdict_on(cluster, tmp_path, task, text, worlds=(2,), exit_code=HARNESS)
    assert verdict.status == "error"
    values = ("C2", 2, "UndeclaredRunError", f"{__name__}:scenario(times=3)")
    assert named(verdict.message, *values)
    assert named(plain(lines_of(verdict)), *values)


def test_what_one_clause_declares_another_may_read() -> None:
    task = "collectives.exchange"
    everything = {spec for check, n, spec in declared(task) if n == 2}
    assert declared_runs(task, 2) == everything
