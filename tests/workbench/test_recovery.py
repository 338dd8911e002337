"""The recorded runs of 4.6, the scripts of 4.7, and that both can tell mistakes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from distlab.given.recovery import RUNS, RecordedRun
from distlab.grading.checks.recovery import reports
from distlab.grading.checks.recovery.contract import SupervisorContract
from distlab.grading.checks.recovery.faults import BY_HAND, scripts
from distlab.grading.checks.recovery.supervise import faults, play_supervisor
from distlab.grading.kit.histories import rows_of
from solutions.phase4_production import recovery as unit

FROZEN = {"stopped": [1], "stopped_waiting": [2], "hang": [0]}
DEAD = {"killed": [0]}


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.json")), ids=lambda p: p.stem)
def test_a_recorded_run_ends_with_what_was_done_to_it(path: Path) -> None:
    run = RecordedRun.read(path.stem)
    fault_s, end_s = run.faults[0][0], run.messages[-1][0]
    before = unit.detect(run.reports(fault_s), fault_s)
    after = unit.detect(run.reports(end_s), end_s)
    assert before == ([], [], [])
    assert after.dead == DEAD.get(path.stem, [])
    assert after.frozen == FROZEN.get(path.stem, [])


def test_no_rank_is_frozen_at_any_moment_of_a_run_without_a_hang() -> None:
    for name in ("slow", "saves", "replaced", "killed"):
        run = RecordedRun.read(name)
        last_s = run.messages[-1][0]
        for now_s in (k * last_s / 60 for k in range(61)):
            assert not unit.detect(run.reports(now_s), now_s).frozen, (name, now_s)


def test_a_new_process_of_a_rank_has_no_steps_of_the_old_one() -> None:
    run = RecordedRun.read("replaced")
    started_s = [m[0] for m in run.messages if m[1:3] == (1, "started")]
    old, new = (
        run.reports(s)[0 if s == 0 else 1] for s in (started_s[1] - 1e-3, started_s[1])
    )
    assert old.has_ended
    assert old.steps
    assert not new.has_ended
    assert not new.steps


def test_both_kinds_of_reports_have_every_answer() -> None:
    for cases in (reports.recorded(), reports.cases(3)):
        lists = [reports.right(case) for case in cases]
        for which in range(3):
            assert any(ranks[which] for ranks in lists)
        assert any(not any(ranks) for ranks in lists)


def test_scripts_reach_every_reason_and_the_reference_passes_all() -> None:
    reasons = Counter[str]()
    for script in scripts(5):
        history = play_supervisor(unit, script)
        assert not faults(script, history)
        contract = SupervisorContract(script)
        for row in history:
            due = contract.due(tuple(row.request), row.time_s)
            contract.fault(due, [tuple(action) for action in row.reply])
            reasons[due.reason] += 1
    rare = {name for name, count in reasons.items() if count < 3}
    assert not rare
    assert {"limit", "loop", "limited", "stale", "frozen", "done", "kill"} <= set(
        reasons
    )


def test_a_supervisor_of_one_rank_has_no_survivor() -> None:
    supervisor = unit.Supervisor(1, 1)
    supervisor.on(unit.Begin(), 0.0)
    (first,) = supervisor.on(unit.Ready(1), 1.0)
    assert first == unit.Form(1, {0: 1})
    assert supervisor.on(unit.Ended(1, -9), 2.0) == [unit.Start(2)]
    assert supervisor.on(unit.Ready(0), 3.0) == [unit.Form(2, {0: 0})]


def test_whatever_is_done_instead_the_verdict_has_a_name_or_a_fact() -> None:
    """Each event of a script, answered with nothing, too much, or an end."""
    instead: tuple[list[tuple[Any, ...]], ...] = (
        [],
        [("start", 99)],
        [("finish", 3)],
        [("signal", 0, SIGTERM)],
        [("form", 9, [(0, 0), (1, 1), (2, 2)])],
    )
    seen = Counter[str]()
    for script in BY_HAND[::2]:
        history = rows_of(play_supervisor(unit, script))
        for place, row in enumerate(history[:-1]):  # the last one is the end
            for actions in instead:
                wrong = [*history[:place], row._replace(reply=actions)]
                for fault in faults(script, wrong).values():
                    assert fault.slug or fault.rule, (fault.message, fault.evidence)
                    seen[fault.rule] += 1
    assert len(seen) > 15
