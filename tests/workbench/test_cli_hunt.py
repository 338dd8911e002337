"""`distlab hunt`: what is shown, what is not, and which line counts."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from distlab.cli.hunt import bare, hunt, right_text
from distlab.cli.hunt_text import guilty_lines, hunted_text
from distlab.curriculum import CurriculumError, Progress, load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.regions import find_regions
from distlab.grading.catalogue import Entry, read_catalogue
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
from distlab.runner import Cluster
from distlab.runner.autopsy import Evidence
from tests.workbench.course import ROOT, Course, keep_warm
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
READ = read_catalogue(load_curriculum(ROOT), hunts_only=True)
HUNTS = [entry for entry in READ if entry.hunt]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return course


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.parametrize("entry", HUNTS, ids=[entry.id for entry in HUNTS])
def test_each_hunt_has_a_place_a_line_and_an_explanation(entry: Entry) -> None:
    curriculum = load_curriculum(ROOT)
    assert curriculum.task(entry.hunt).milestone
    assert entry.slug in read_misconceptions()
    solution = solution_of(entry)
    broken = hunted_text(entry.applied_to(solution), {entry.task})
    right = hunted_text(right_text(solution, entry, READ), {entry.task})
    assert 1 <= len(guilty_lines(right, broken)) <= 4
    assert "SOLUTION" not in broken
    # every other task is a hole still
    others = {region.id for region in find_regions(solution)} - {entry.task}
    for task in others:
        assert f'NotImplementedError("{task}")' in broken
    assert f'NotImplementedError("{entry.task}")' not in broken


def test_every_milestone_of_the_course_has_a_hunt() -> None:
    milestones = {t.number for t in load_curriculum(ROOT).tasks if t.milestone}
    assert {entry.hunt for entry in HUNTS} == milestones
    assert {"2.7", "2.14", "2.18", "2.21"} <= milestones


def test_a_mistake_in_another_right_variant_is_told_by_that_variant() -> None:
    """Backward in two halves: the solution has one, and none of its lines is guilty."""
    (entry,) = [entry for entry in HUNTS if entry.id == "PI62"]
    solution = solution_of(entry)
    (twin,) = [other for other in READ if other.id == entry.twin]
    assert right_text(solution, entry, READ) == twin.applied_to(solution)
    broken = hunted_text(entry.applied_to(solution), {entry.task})
    right = hunted_text(right_text(solution, entry, READ), {entry.task})
    (line,) = guilty_lines(right, broken)
    assert "torch.autograd.grad(" in broken.splitlines()[line - 1]
    assert len(guilty_lines(hunted_text(solution, {entry.task}), broken)) > 10


def solution_of(entry: Entry) -> str:
    unit = load_curriculum(ROOT).units[entry.unit]
    return unit.solution(ROOT).read_text(encoding="utf-8")


def test_what_has_passed_is_filled_and_nothing_else() -> None:
    (entry,) = [e for e in HUNTS if e.id == "TR65"]
    passed = {entry.task, "trainer.average_gradients"}
    text = hunted_text(entry.applied_to(solution_of(entry)), passed)
    assert "grad /= comm.world_size" in text
    assert 'Error("trainer.average_gradients")' not in text
    assert 'Error("trainer.fit")' in text


def test_a_moved_line_is_guilty_where_it_stands() -> None:
    (entry,) = [e for e in HUNTS if e.id == "TR65"]
    solution = solution_of(entry)
    broken = hunted_text(entry.applied_to(solution), {entry.task})
    (line,) = guilty_lines(hunted_text(solution, {entry.task}), broken)
    assert broken.splitlines()[line - 1].strip() == "optimizer.zero_grad()"
    assert guilty_lines("z\nl\nb\na\n", "l\nb\nz\na\n") == {3}
    assert guilty_lines("a\nb\n", "b\na\n") == {1, 2}  # either of them was moved


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
    assert not any(line.startswith("  →") for line in said.splitlines())  # no rule
    path = here.state / "hunt" / f"{entry.task.partition('.')[0]}.py"
    assert path.name in said
    text = path.read_text()
    solution = load_curriculum(here.root).units[path.stem].solution(here.root)
    right = hunted_text(solution.read_text(), {entry.task, "trainer.train_step"})
    (first, *_) = sorted(guilty_lines(right, text))

    # a line that is right, no number, and then the one
    type_in(monkeypatch, f"1\nwhat?\n{first}\n")
    assert hunt("1.7") == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"^line 1 ", said, re.MULTILINE)) == 1
    assert f"line {first}. {entry.title}" in said
    assert read_misconceptions()[entry.slug]["title"] in said

    # the next one is another one
    assert Progress(here.root).read()["hunts"]["1.7"]["found"] == [entry.id]
    # an answer begins none: it is not about the file that was looked at
    for name in ("", "1.7"):
        with pytest.raises(CurriculumError, match=f"hunt {name}".strip() + "$"):
            hunt(name, line=first)
    assert path.read_text() == text
    assert hunt("1.7") == 1
    assert Progress(here.root).read()["hunts"]["1.7"]["open"] not in ("", entry.id)


def test_the_line_numbers_stay_while_a_hunt_is_open(
    here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    keep_warm(cluster, monkeypatch)
    assert hunt("1.7", anyway=True) == 1
    (path,) = (here.state / "hunt").glob("*.py")
    kept = Progress(here.root).read()["hunts"]["1.7"]["open"]
    (entry,) = [e for e in HUNTS if e.id == kept]
    page = path.with_name("trace.html").read_text(encoding="utf-8")
    assert entry.title not in page
    assert read_misconceptions()[entry.slug]["title"] not in page
    assert not (here.state / "last").exists()  # that is for the learner's own runs
    before = path.read_text()
    for task in load_curriculum(here.root).tasks:
        Progress(here.root).record_verdict(task.id, passed=True, digest="")
    assert hunt("1.7", line=1) == 1
    assert path.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("milestone", "unit"),
    [("1.11", "trainer"), ("1.16", "trainer"), ("2.21", "pipeline_parallel")],
)
def test_hunts_of_later_milestones(
    here: Course,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    milestone: str,
    unit: str,
) -> None:
    keep_warm(cluster, monkeypatch)
    assert hunt(milestone, anyway=True) == 1
    said = capsys.readouterr().out
    assert milestone in said
    numbers = {"2.21": "2.12"}  # its hunts are in what runs a schedule
    number = numbers.get(milestone, milestone)
    assert re.search(rf"^{number} C\d ", said, re.MULTILINE)
    both = rf"\b{number}\b.*\b{milestone}\b"  # a task, and where it is on the way to
    assert bool(re.search(both, said)) == (number != milestone)
    assert "HARNESS" not in said
    path = here.state / "hunt" / f"{unit}.py"
    kept = Progress(here.root).read()["hunts"][milestone]["open"]
    (entry,) = [e for e in HUNTS if e.id == kept]
    right = hunted_text(right_text(solution_of(entry), entry, READ), {entry.task})
    assert hunt(line=min(guilty_lines(right, path.read_text()))) == 0
    assert entry.title in " ".join(capsys.readouterr().out.split())


def test_figures_are_shown_and_what_they_mean_is_not() -> None:
    rows = tuple(
        Evidence(rank=r, state="wrong", text="got 4   expected 1") for r in range(2)
    )
    clause = ClauseVerdict(
        id="C1", text="it is the mean", status="fail", world_size=2, evidence=rows,
        message="summed and never divided", slug="sum-not-mean", rule="divide",
    )  # fmt: skip
    verdict = TaskVerdict(
        id="t.a", number="1.1", title="", status="fail", path="", digest="",
        slug="sum-not-mean", clauses=[clause],
    )  # fmt: skip
    (told,) = bare(verdict).clauses
    assert told.evidence == rows
    assert clause.text in told.message
    assert clause.message not in told.message
    assert len(re.findall(r"\b2\b", told.message)) == 2  # played, and wrong alike
    assert (told.slug, told.rule) == ("", "")


def test_what_cannot_be_hunted(
    here: Course, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for name, anyway, named in (
        ("", False, r"\b1\.7 .* hunt --anyway$"),
        ("1.7", False, r"\b1\.7 .* hunt 1\.7 --anyway$"),
        ("1.1", True, r"\b1\.1\b.*\b1\.7\b"),
        ("9.9", False, r"'9\.9'"),
    ):
        told.append(refusal(CurriculumError, hunt, name, anyway=anyway))
        assert re.search(named, told[-1]), told
    # a line of no open hunt: never advice that would be refused
    for name, named in (
        ("", r"\b1\.7 .* hunt --anyway$"),
        ("1.7", r"\b1\.7 .* hunt 1\.7 --anyway$"),
        ("1.4", r"\b1\.4\b.*\b1\.7\b"),
    ):
        told.append(refusal(CurriculumError, hunt, name, line=3))
        assert re.search(named, told[-1]), told
        assert not re.search(r"hunt 1\.4\b", told[-1])
    kept = here.state / "progress.json"
    kept.parent.mkdir()
    for broken in ('{"hunts": 3}', '{"hunts": {"1.7": {"found": 3, "open": []}}}'):
        kept.write_text(broken)
        told.append(refusal(CurriculumError, hunt, anyway=True, line=1))
        assert re.search(r"distlab hunt --anyway$", told[-1])
    kept.write_text('{"hunts": {"1.7": {"filled": 3, "open": "TR65"}}}')
    assert hunt(line=1) == 1
    (path,) = (here.state / "hunt").glob("*.py")
    length = len(path.read_text().splitlines())
    for line in (0, 10_000):
        with pytest.raises(CurriculumError, match=rf"\b1\b.* {length}$"):
            hunt(line=line)
    monkeypatch.setattr("distlab.cli.hunt.read_catalogue", lambda *_, **__: [])
    told.append(refusal(CurriculumError, hunt, anyway=True))
    assert not any("\n" in one for one in told)
    golden("cli/hunt-refused", "\n".join(told))
