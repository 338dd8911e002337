"""The corpus of `distlab bench autopsy`: its headers, its marks and its rules."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks._autopsy_corpus import APART, KINDS, Script, read, scripts

HANGS = scripts("hangs")

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
