"""Which catalogues `distlab mutants --touched` plays again, and what it leaves out."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from distlab.cli.mutants import _each_task_first
from distlab.curriculum import Curriculum
from distlab.grading.catalogue import FOLDER, RECORDS, CatalogueError, Entry
from distlab.grading.verified import NAME, digest_of, stamp, touched, unverified
from tests.workbench.judging import CURRICULUM as COURSE
from tests.workbench.judging import catalogue

ENTRIES = [*catalogue().values()]
UNIT = "topology"


def of(unit: str) -> set[str]:
    return {e.id for e in ENTRIES if e.unit == unit}


@pytest.fixture
def course(tmp_path: Path) -> Curriculum:
    """The course as far as a digest looks at it."""
    for folder in (FOLDER, RECORDS, "solutions", "distlab/grading"):
        shutil.copytree(COURSE.root / folder, tmp_path / folder)
    (tmp_path / RECORDS / NAME).unlink(missing_ok=True)
    return replace(COURSE, root=tmp_path)


def names(entries: list[Entry]) -> set[str]:
    return {entry.id for entry in entries}


def test_without_notes_everything_is_played(course: Curriculum) -> None:
    assert unverified(course) == [*COURSE.units]
    assert touched(course, ENTRIES) == ENTRIES


def test_a_unit_is_noted_once_every_entry_was_right(course: Curriculum) -> None:
    right = dict.fromkeys(of(UNIT), True)
    last = right.popitem()[0]
    assert stamp(course, ENTRIES, right) == []
    assert stamp(course, ENTRIES, right | {last: True}) == [UNIT]
    assert UNIT not in unverified(course)


def test_what_is_cut_short_has_graded_a_right_and_a_wrong_one_of_each_task() -> None:
    order = _each_task_first(ENTRIES)
    assert names(order) == names(ENTRIES)
    tasks = {entry.task for entry in ENTRIES}
    kinds = {(entry.task, entry.is_mutant) for entry in ENTRIES}
    first = [(entry.task, entry.is_mutant) for entry in order[: len(kinds)]]
    assert {*first} == kinds
    assert {task for task, is_mutant in first[: len(tasks)] if not is_mutant} == tasks


def test_one_wrong_entry_undoes_the_note(course: Curriculum) -> None:
    right = dict.fromkeys(of(UNIT), True)
    stamp(course, ENTRIES, right)
    assert stamp(course, ENTRIES, {min(right): False}) == []
    assert UNIT in unverified(course)


@pytest.mark.parametrize(
    "file",
    FILES := [
        f"{FOLDER}/{UNIT}/choose.toml",
        f"distlab/grading/checks/{UNIT}/estimate.py",
        f"solutions/phase3_multi_node/{UNIT}.py",
    ],
)
def test_a_change_of_the_unit_is_played_whole(course: Curriculum, file: str) -> None:
    stamp(course, ENTRIES, dict.fromkeys(names(ENTRIES), True))
    assert unverified(course) == []
    with (course.root / file).open("a", encoding="utf-8") as text:
        text.write("changed = 1\n")
    assert unverified(course) == [UNIT]
    assert of(UNIT) <= names(touched(course, ENTRIES))


@pytest.mark.parametrize("file", FILES)
def test_comments_and_docstrings_change_no_verdict(
    course: Curriculum, file: str
) -> None:
    before = digest_of(course, UNIT)
    path = course.root / file
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = re.sub(r'"""[A-Z]\w+', '"""Others', text)
        assert text != path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n# a comment\n", encoding="utf-8")
    assert digest_of(course, UNIT) == before


def test_a_check_may_be_called_as_its_unit(course: Curriculum) -> None:
    checks = course.root / "distlab" / "grading" / "checks" / UNIT
    (checks / f"{UNIT}.py").write_text("one = 1\n", encoding="utf-8")
    before = digest_of(course, UNIT)
    solution = course.units[UNIT].solution(course.root)
    solution.write_text(solution.read_text("utf-8") + "two = 2\n", encoding="utf-8")
    assert digest_of(course, UNIT) != before


def test_of_each_unit_that_is_noted_one_entry_is_played_in_turn(
    course: Curriculum,
) -> None:
    stamp(course, ENTRIES, dict.fromkeys(names(ENTRIES), True))
    turns = set()
    for number in range(3):
        chosen = touched(course, ENTRIES)
        units = [entry.unit for entry in chosen]
        assert sorted(units) == sorted(COURSE.units)
        assert not any(entry.limit_s for entry in chosen)
        turns.add(frozenset(names(chosen)))
        shared = course.root / "distlab" / "grading" / "grade.py"
        shared.write_text(f"number = {number}\n", encoding="utf-8")
    assert len(turns) == 3


def test_notes_that_cannot_be_read_are_an_error(course: Curriculum) -> None:
    (course.root / RECORDS / NAME).write_text("topology =", encoding="utf-8")
    with pytest.raises(CatalogueError, match=re.escape(NAME)):
        unverified(course)


def test_the_digest_is_of_the_text_alone(course: Curriculum) -> None:
    assert digest_of(course, UNIT) == digest_of(COURSE, UNIT)
