"""The scripts of 4.9: each can happen, and the shortest that is shown can, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distlab import curriculum
from distlab.grading.checks.elastic.resize import _faults_of, faults
from distlab.grading.checks.elastic.scripts import (
    BY_HAND,
    ByHand,
    MembershipContract,
    Script,
    play_agents,
    scripts,
    settings,
    shorter,
)
from distlab.grading.kit.histories import (
    History,
    Row,
    first_by_clause,
    last_rows,
    rows_of,
)
from tests.workbench.golden import Golden

UNIT = curriculum.load("elastic", "reference")


def impossible(script: Script, history: History = ()) -> list[Row]:
    """The events that refer to what never was."""
    history, found = rows_of(history or play_agents(script, UNIT)), []
    for agent in {row.peer for row in history}:
        contract = MembershipContract(settings(script))
        for row in (row for row in history if row.peer == agent):
            if not contract.could_happen(tuple(row.request)):
                found.append(row)
            contract.offer(row)
    return found


def test_all_scripts_can_happen_and_the_reference_passes_them() -> None:
    for script in scripts(5)[: len(BY_HAND) + 60]:
        history = play_agents(script, UNIT)
        assert not impossible(script, history)
        assert not _faults_of(script, history)


def test_a_script_without_the_form_that_it_refers_to_cannot_happen() -> None:
    told = ("0 join a", "0.1 join b", "9 join a 7 1", "20 join a 7 1")
    assert not impossible(ByHand(told))
    assert impossible(ByHand(told[1:]))
    assert not impossible(ByHand((*told, "30 join a 7 1")))
    assert impossible(ByHand((*told[:3], "9.1 join b 7 1", "30 join a 8 1")))


class RefusesCopies(UNIT.Membership):  # type: ignore[name-defined, misc]
    """A natural first mistake: every older generation is refused."""

    def join(self, event: Any) -> list[object]:
        if event.generation < self.generation and event.member in self.members:
            return [UNIT.Refuse(event.member, "old")]
        return list(super().join(event))


def test_the_shortest_script_of_a_mistake_can_happen(golden: Golden) -> None:
    broken = SimpleNamespace(Membership=RefusesCopies)
    known: tuple[Script, ...] = BY_HAND
    found = first_by_clause(
        known, lambda script: play_agents(script, broken), _faults_of, shorter
    )
    assert found
    told = []
    for script, history in found:
        assert not impossible(script)
        (fault,) = _faults_of(script, history).values()
        told.append(f"{fault.message}\n{fault.rule}")
        # The last row is the event of the headline.
        assert "Refuse" in fault.evidence[-1].text
        assert len(fault.evidence) <= 8
    golden("units/elastic-faults", "\n".join(told))


def test_a_join_of_a_generation_that_never_was_is_no_fault() -> None:
    broken = SimpleNamespace(Membership=RefusesCopies)
    script = ByHand(("0.1 join b", "21 join a 7 1"))
    what = "", vars(script.settings)
    assert faults(what, play_agents(script, broken)) == {}


def test_the_rows_that_are_shown_end_with_the_one_that_decides() -> None:
    rows = [Row(float(k), -1, ("tick",), [("wake", k)]) for k in range(1, 30)]
    shown = last_rows(rows, lambda row: f"at {row.time_s:g}", 19, beside=2)
    before, *texts = [row.text for row in shown]
    assert before.startswith("15 ")
    assert texts == [f"at {k}" for k in (16, 17, 18, 19, 20)]
    assert len(last_rows(rows[:6], lambda row: "", beside=2)) == 6


class StopsAtOnce(UNIT.Membership):  # type: ignore[name-defined, misc]
    """It gives up where a wait begins."""

    def end_round(self, now_s: float) -> list[object]:
        return [UNIT.Stop("nobody is here")]


def test_a_tick_that_is_due_is_said_with_its_time() -> None:
    broken = SimpleNamespace(Membership=StopsAtOnce)
    script = ByHand(("0 join a", "1 join b"))
    (fault,) = _faults_of(script, play_agents(script, broken)).values()
    given, _, expected = fault.message.partition(", expected ")
    assert f"WakeAt({script.settings.timeout_s:g})" in expected
    assert given.endswith("returned Stop")
