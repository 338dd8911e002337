"""`distlab hunt`: what is shown, what is not, and which line counts."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from distlab.cli.hunt import guilty_lines, hunt
from distlab.curriculum import CurriculumError, Progress, load_curriculum
from distlab.curriculum.functions import without_markers
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.grading.mutants import read_catalogue
from distlab.runner import Cluster
from tests.workbench.course import ROOT, Course, keep_warm

Capture = pytest.CaptureFixture[str]
HUNTS = read_catalogue(load_curriculum(ROOT), hunts_only=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    (course.root / "tests" / "mutants").symlink_to(ROOT / "tests" / "mutants")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return course


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.parametrize("entry", HUNTS, ids=[entry.id for entry in HUNTS])
def test_each_hunt_has_a_place_a_line_and_an_explanation(entry: object) -> None:
    curriculum = load_curriculum(ROOT)
    (hunted,) = [e for e in HUNTS if e is entry]
    assert curriculum.task(hunted.hunt).milestone
    assert hunted.slug in read_misconceptions()
    unit = curriculum.units[hunted.task.partition(".")[0]]
    solution = unit.solution(ROOT).read_text(encoding="utf-8")
    broken = without_markers(hunted.applied_to(solution))
    assert 1 <= len(guilty_lines(without_markers(solution), broken)) <= 4
    assert "SOLUTION" not in broken


def test_guilty_lines_of_a_change_an_addition_and_a_gap() -> None:
    right = "a\nb\nc\nd\n"
    assert guilty_lines(right, "a\nX\nc\nd\n") == {2}
    assert guilty_lines(right, "a\nb\nX\nY\nc\nd\n") == {3, 4}
    assert guilty_lines(right, "a\nb\nd\n") == {2, 3}
    assert guilty_lines(right, right) == frozenset()


def test_a_hunt_from_symptoms_to_the_explanation(
    here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    keep_warm(cluster, monkeypatch)
    Progress(here.root).record_verdict("trainer.train_step", passed=True, digest="")
    assert hunt() == 1  # the input ends: nothing was named
    said = capsys.readouterr().out
    kept = Progress(here.root).read()["hunts"]["1.7"]["open"]
    (entry,) = [e for e in HUNTS if e.id == kept]
    assert "NOT YET" in said
    assert entry.title not in said
    assert f"[{entry.slug}]" not in said
    assert "→ " not in "".join(x for x in said.splitlines() if x.startswith("  →"))
    path = here.state / "hunt" / f"{entry.task.partition('.')[0]}.py"
    assert path.name in said
    text = path.read_text()
    solution = load_curriculum(here.root).units[path.stem].solution(here.root)
    right = without_markers(solution.read_text())
    (first, *_) = sorted(guilty_lines(right, text))

    # a line that is right, no number, and then the one
    type_in(monkeypatch, f"1\nwhat?\n{first}\n")
    assert hunt("1.7") == 0
    said = capsys.readouterr().out
    assert "line 1 is as it should be" in said
    assert "A line number" in said
    assert f"Found: line {first}. {entry.title}" in said
    assert read_misconceptions()[entry.slug]["title"] in said

    # the next one is another one
    assert Progress(here.root).read()["hunts"]["1.7"]["found"] == [entry.id]
    assert hunt("1.7", line=1) == 1
    assert Progress(here.root).read()["hunts"]["1.7"]["open"] != entry.id


def test_what_cannot_be_hunted(here: Course, capsys: Capture) -> None:
    with pytest.raises(CurriculumError, match=r"first hunt opens when 1\.7 has passed"):
        hunt()
    with pytest.raises(CurriculumError, match=r"hunt at 1\.7 is for after"):
        hunt("1.7")
    with pytest.raises(CurriculumError, match=r"no hunt at 1.1; there is one at 1.7"):
        hunt("1.1", anyway=True)
    with pytest.raises(CurriculumError, match=r"no task is called '9\.9'"):
        hunt("9.9")
    for line in (0, 10_000):
        with pytest.raises(CurriculumError, match=r"has the lines 1 to \d+"):
            hunt(anyway=True, line=line)
    kept = here.state / "progress.json"
    for broken in ('{"hunts": 3}', '{"hunts": {"1.7": {"found": 3, "open": []}}}'):
        kept.write_text(broken)
        assert hunt(anyway=True, line=1) == 1
    (here.root / "tests" / "mutants").unlink()
    with pytest.raises(CurriculumError, match="nothing to hunt in this copy") as caught:
        hunt(anyway=True)
    assert re.fullmatch(r"[^\n]*", str(caught.value))
