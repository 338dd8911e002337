"""The recorded runs of 4.12 show what was injected, and the solution finds it."""

from __future__ import annotations

import re

import pytest

from distlab import curriculum
from distlab.given.drill import ACTIONS, ENTERED, NOTHING, Incident, read_run
from distlab.grading.checks.drill.histories import FOLDER, LISTS, drills, recorded

RUNS = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", RUNS)
def test_the_solution_names_what_was_injected(name: str) -> None:
    run, cause = recorded(name)
    given = curriculum.load("drill", "reference").incident(*run)
    assert given[:3] == cause
    assert given.action == ACTIONS[cause.what]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_in_the_order_of_its_times_and_names_no_machine(name: str) -> None:
    run = read_run(FOLDER / f"{name}.json")
    for rows in run:
        times = [row.time_s for row in rows]
        assert times == sorted(times)
    assert {event.rank for event in run.events if event.kind == ENTERED} == {0, 1, 2, 3}
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert "127.0.0.1" not in text
    assert "/tmp" not in text


def test_every_recorded_run_is_asked_for_and_seeds_renumber_it() -> None:
    used = {name for rows in LISTS.values() for _, name, _, _ in rows}
    assert used == set(RUNS)
    one, other = drills(1)["C2"][0], drills(2)["C2"][0]
    assert one.what == other.what
    assert one.expected.rank != other.expected.rank


def test_a_drill_shows_each_cause() -> None:
    causes = {drill.expected.what for own in drills(0).values() for drill in own}
    assert causes == set(ACTIONS)
    healthy = [d for d in drills(0)["C4"] if d.expected.what == NOTHING]
    assert all(d.expected == Incident(NOTHING, -1, -1, "continue", 0) for d in healthy)


def test_what_a_drill_is_called_names_no_step_for_runs_are_renumbered() -> None:
    called = [drill.what for own in drills(0).values() for drill in own]
    assert not [what for what in called if re.search(r"step \d", what)]
