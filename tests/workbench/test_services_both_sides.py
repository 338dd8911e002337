"""Store, Endpoint and services give the same values simulated and on real processes."""

from __future__ import annotations

import pytest

from distlab.runner import Cluster, Run
from tests.workbench.conformance import own_processes, services
from tests.workbench.conformance.both_sides import CASES, Case, table

WITH_DEATHS = [case for case in CASES if case.faults]


def statuses(run: Run) -> list[str]:
    return [record.status for record in run.ranks]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_gives_the_same_on_both_sides(cluster: Cluster, case: Case) -> None:
    simulated = case.simulated()
    real = case.real(cluster)
    assert simulated.values == real.values == [*case.expected]
    assert statuses(simulated) == statuses(real)
    assert real.outcome == "finished"  # its deaths were declared


@pytest.mark.parametrize("case", WITH_DEATHS, ids=lambda case: case.name)
def test_the_transport_of_comm_does_not_matter(cluster: Cluster, case: Case) -> None:
    assert case.real(cluster, "gloo").values == [*case.expected]


def test_all_programs_are_in_the_table() -> None:
    programs = {
        name
        for module in (services, own_processes)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and getattr(value, "__annotations__", {}).get("ctx") == "RankContext"
    } - {"seams", "meet", "insist"}
    assert {case.name for case in CASES} == programs
    assert len(CASES) >= 20


def test_a_difference_shows_in_the_table() -> None:
    shown = table([("good", [1], [1], [1]), ("bad", [1], [2], [1])])
    _, *rows = (line.split() for line in shown.splitlines())
    assert rows == [["good", "yes", "yes", "yes"], ["bad", "yes", "NO", "NO"]]
