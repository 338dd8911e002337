"""The corpus of `distlab bench autopsy`: its headers and rules, and how it's judged."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks._autopsy_runs import Ended, run_and_explain
from benchmarks._bars import missed
from benchmarks.autopsy import figures, problems_of
from tests.corpora.autopsy_scripts import APART, KINDS, Script, read, scripts

HANGS = scripts("hangs")
RIGHT = scripts("right")

LONGEST = 40  # lines of code: a script is read as a whole
REPORTS = re.compile(r"https://(github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|discuss)")


def code_lines(script: Script) -> int:
    text = script.path.read_text().partition('"""\n\n')[2]
    return sum(bool(line.strip()) for line in text.splitlines())


def test_there_are_sixty_hangs_of_every_kind_on_two_three_and_four_ranks() -> None:
    assert len(HANGS) >= 60
    assert {script.kind for script in HANGS} == set(KINDS)
    sizes = Counter(script.world_size for script in HANGS)
    assert set(sizes) == {2, 3, 4}
    assert min(sizes.values()) >= 10


def test_no_report_stands_behind_more_than_two_hangs() -> None:
    assert max(Counter(script.report for script in HANGS).values()) <= 2


@pytest.mark.parametrize("script", HANGS, ids=lambda script: script.name)
def test_a_hang_names_its_report_and_marks_its_lines(script: Script) -> None:
    assert REPORTS.match(script.report)
    assert code_lines(script) <= LONGEST
    apart = {mark.call == APART for mark in script.marks if mark.ranks & script.guilty}
    assert apart == ({True} if script.kind == APART else apart - {True})


def test_a_header_without_its_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text('"""Hangs.\n\nRanks: 2\nKind: deadlock\n"""\n')
    with pytest.raises(ValueError, match="Report"):
        read(path)
    header = "Report: x\nRanks: 2\nKind: deadlock\nGuilty: 1\nPlain: hang\n"
    path.write_text(f'"""Hangs.\n\n{header}"""\n\nwait()  # HERE 2: wait\n')
    with pytest.raises(ValueError, match=r"script\.py"):
        read(path)
    path.write_text(f'"""Hangs.\n\n{header}"""\n\nwait()  # HERE 0,1: wait\n')
    (mark,) = read(path).marks
    assert (mark.line, mark.ranks, mark.call) == (10, {0, 1}, "wait")


def test_there_are_sixty_right_scripts_on_two_three_and_four_ranks() -> None:
    assert len(RIGHT) >= 60
    sizes = Counter(script.world_size for script in RIGHT)
    assert set(sizes) == {2, 3, 4}
    assert min(sizes.values()) >= 10
    assert all(code_lines(script) <= LONGEST for script in RIGHT)
    assert not any(script.hangs or script.marks for script in RIGHT)


# ── how a run is judged ─────────────────────────────────────────────────────────────


def reported(
    *rows: tuple[int, str, int], named: list[int], status: str = "mismatch"
) -> Ended:
    """A run whose report has these rows of rank, file and line."""
    report: dict[str, Any] = {
        "status": status,
        "sentence": "",
        "ranks_named": named,
        "ranks": [{"rank": r, "file": f"/x/{f}", "line": n} for r, f, n in rows],
    }
    return Ended(exit_code=1, seconds=1.0, report=report)


def test_a_hang_is_named_by_its_guilty_ranks_at_their_lines() -> None:
    script = next(s for s in HANGS if s.name == "barrier_after_early_return")
    file, (barrier, reduce) = script.path.name, (mark.line for mark in script.marks)
    assert problems_of(script, reported((0, file, barrier), named=[0, 1])) == []
    for wrong in (
        reported((0, file, barrier), named=[1, 2]),
        reported((0, file, reduce), named=[0]),
        reported((0, "other.py", barrier), named=[0]),
        reported((0, file, barrier), named=[0], status="no-progress"),
        Ended(exit_code=1, seconds=1.0),
    ):
        assert problems_of(script, wrong)


def test_a_rank_that_has_left_is_named_beside_one_that_waits_for_it() -> None:
    script = next(s for s in HANGS if s.name == "barrier_under_a_rank_condition")
    file, (barrier,) = script.path.name, (mark.line for mark in script.marks)
    assert problems_of(script, reported((1, file, barrier), named=[3])) == []
    assert problems_of(script, reported((1, file, barrier), named=[0]))
    assert problems_of(script, reported((1, file, barrier + 1), named=[3]))


def test_a_rank_apart_has_to_be_at_its_line_after_no_progress() -> None:
    script = next(s for s in HANGS if s.name == "lock_taken_twice")
    file, line = script.path.name, script.marks_of(1)[0].line
    quiet = reported((1, file, line), named=[], status="no-progress")
    assert problems_of(script, quiet) == []
    assert problems_of(script, reported((0, file, line), named=[]))


def test_a_right_script_must_not_get_a_report() -> None:
    script = RIGHT[0]
    assert problems_of(script, Ended(exit_code=0, seconds=1.0)) == []
    assert problems_of(script, Ended(exit_code=1, seconds=1.0))
    assert problems_of(script, reported(named=[0]))


def test_the_figures_are_taken_from_the_runs() -> None:
    common = {"exit_code": 1, "problems": []}
    lines = [
        {**common, "kind": "deadlock", "status": "deadlock", "since_progress_s": 0.2},
        {**common, "kind": "apart", "status": "no-progress", "since_progress_s": 9.0},
        {**common, "kind": "absent", "status": "", "problems": ["no report"]},
        {**common, "kind": "", "status": "mismatch"},
    ]
    results = figures(lines)
    values = {line["name"]: line["value"] for line in results}
    assert values["named"] == 0.667
    assert values["false_alarms"] == 1
    assert values["seconds_max_s"] == 0.2
    assert {"named", "false_alarms"} <= set(missed(results))


@pytest.mark.slow
def test_a_hang_runs_through_distlab_run(tmp_path: Path) -> None:
    script = next(s for s in HANGS if s.name == "both_send_first")
    ended = run_and_explain(script, tmp_path, limit_s=300.0)
    assert problems_of(script, ended) == []
    assert ended.exit_code == 1
