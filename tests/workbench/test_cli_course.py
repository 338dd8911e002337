"""The manifest, the progress file, and the verbs that only read and write them."""

from __future__ import annotations

import os
import re

import pytest

from distlab.cli.check import next_task
from distlab.cli.explain import explain
from distlab.cli.hint import hint
from distlab.cli.reset import reset
from distlab.cli.screen import waiting, warn
from distlab.cli.status import status
from distlab.curriculum import CurriculumError, Progress, load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.path import current_task, following
from distlab.tutor.concepts import read_concepts
from tests.workbench.course import FIRST, ROOT, SECOND, Course
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]


# ── the manifest and the progress file ──────────────────────────────────────────────

CORE = sum(not task.stretch for task in load_curriculum(ROOT).tasks)
WHOLE = (ROOT / "curriculum.toml").read_text(encoding="utf-8")
GOOD = "[[phase]]".join(WHOLE.split("[[phase]]")[:2])  # the first phase is enough
FIRST_CLAUSES = next(re.finditer(r"^(clauses\..*\n)+", GOOD, re.MULTILINE))[0]


BROKEN = [
    ("[[phase]]", "[[phase", r"\bTOML\b.*\bline \d+\b"),
    ("[[phase]]", "[phase]", r"\[\[phase\]\]"),
    ('folder = "phase1_data_parallel"', "", "'folder'"),
    ("number = 1\n", "number = true\n", r"'number'.*\bTrue\b"),
    ('id = "collectives.exchange"', "", "'id'"),
    ('number = "1.2"', 'number = "1.1"', r"\b1\.1\b"),
    ('number = "1.2"', 'number = "one"', f"'one'.*{SECOND}"),
    ('number = "1.2"', "number = 1.2", rf"'number'.*{SECOND}.*\b1\.2\b"),
    ('id = "collectives.pass_around"', 'id = "round"', "'round'"),
    ('id = "collectives.pass_around"', 'id = "trainer.round"', r"trainer\.round"),
    ('  "collectives.exchange",', '  "no.task",', r"\bddp\b.*\bno\.task\b"),
    ('id = "collectives.broadcast"', f'id = "{SECOND}"', SECOND),
    ("needs = []", f'needs = ["{SECOND}"]', f"{FIRST}.*{SECOND}"),
    ("needs = []", "needs = 3", rf"'needs'.*{FIRST}.*\b3\b"),
    ("minutes = 5", "minutes = 0", FIRST),
    ("minutes = 5", 'minutes = "5"', f"'minutes'.*{FIRST}.*'5'"),
    ("points = 1", "points = 1\ntime_limit_s = 0", FIRST),
    ('name = "trainer"', 'name = "collectives"', r"\bcollectives$"),
    (FIRST_CLAUSES, "clauses = {}\n", FIRST),
    (GOOD, "", ""),
    (GOOD, "phase = 3", r"\[\[phase\]\]"),
]


def test_a_broken_manifest(here: Course, golden: Golden) -> None:
    path = here.root / "curriculum.toml"
    told = []
    for old, new, named in BROKEN:
        assert old in GOOD
        path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
        said = refusal(CurriculumError, load_curriculum)
        assert re.fullmatch(rf".*\bcurriculum\.toml\b.*{named}.*", said), (said, named)
        told.append(re.sub(r"(\bTOML: ).*", r"\1<why>", said))
    golden("curriculum/broken", "\n".join(told))


def test_a_manifest_that_is_no_text(here: Course) -> None:
    (here.root / "curriculum.toml").write_bytes(b"\xff")
    done = here.distlab("status")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"distlab: .*\bcurriculum\.toml\b.*\n", done.err)


@pytest.mark.parametrize(
    "state",
    [
        "xx{",
        "[]",
        '{"tasks": []}',
        '{"tasks": {"collectives.exchange": 3}, "predictions": 4}',
        '{"tasks": {"collectives.exchange": {"checks": null, "hint": "b"}}}',
    ],
)
def test_a_progress_file_that_is_broken(
    here: Course, capsys: Capture, state: str
) -> None:
    here.state.mkdir()
    (here.state / "progress.json").write_text(state)
    assert status() == hint("1.1") == 0
    assert f"0 of {CORE}" in capsys.readouterr().out
    Progress(here.root).record_verdict(FIRST, passed=True, digest="")
    assert here.progress()[FIRST]["checks"] == 1
    kept = here.state / "progress.unreadable.json"
    assert not kept.exists() or kept.read_text() == state
    assert kept.exists() == (state in ("xx{", "[]"))


# ── hint, explain, status ───────────────────────────────────────────────────────────


def test_hints_deepen_and_stop(here: Course, capsys: Capture) -> None:
    heads = []
    for _ in range(6):
        assert hint() == 0
        heads.append(capsys.readouterr().out.splitlines()[0][-24:])
    assert [re.findall(r"\d of 4", head)[0][0] for head in heads] == list("123444")
    assert hint("exchange", level=2) == 0
    assert re.search(r"\b2 of 4\b", capsys.readouterr().out.splitlines()[0])
    for level in (0, 5, -1):
        with pytest.raises(ValueError, match=rf"\b1\b.*\b4\b.* {level}$"):
            hint("1.1", level=level)


def test_the_verdict_opens_the_hint(here: Course, capsys: Capture) -> None:
    known = read_misconceptions()

    def level(task: str) -> str:
        assert hint(task) == 0
        head, because, *_ = capsys.readouterr().out.splitlines()
        number = re.findall(r"(\d) of 4", head)[0]
        opened = [word for word in because.split()[-1:] if word in known]
        return " ".join([number, *opened])

    progress = Progress(here.root)
    progress.record_verdict(SECOND, passed=False, digest="", slug="ring-of-sends")
    assert [level("1.2"), level("1.2")] == ["2 ring-of-sends", "3"]
    # the same again: it goes on deeper, and nothing is shown twice
    progress.record_verdict(SECOND, passed=False, digest="", slug="ring-of-sends")
    assert level("1.2") == "4"
    # a verdict that no hint fits opens none; the next one opens the one that fits
    progress.record_verdict(FIRST, passed=False, digest="", slug="raised")
    assert level("1.1") == "1"
    progress.record_verdict(FIRST, passed=False, digest="", slug="send-to-self")
    assert level("1.1") == "3 send-to-self"


def test_explain(here: Course, capsys: Capture) -> None:
    known = read_misconceptions()
    explain("[ring-of-sends] ")
    assert known["ring-of-sends"]["title"] in capsys.readouterr().out
    explain(every=True)
    listed = capsys.readouterr().out
    names = set(re.findall(r"^  ([a-z0-9-]+) ", listed, re.MULTILINE))
    assert names == set(known) | set(read_concepts())
    for near, meant in (
        ("ring-of-send", "ring-of-sends"),
        ("sum", "sum-not-mean"),
    ):
        assert explain(near) == 0
        assert f"  {meant} " in capsys.readouterr().out
    with pytest.raises(ValueError, match="'xyzzy'"):
        explain("xyzzy")
    for slug in known:
        assert explain(slug) == 0


def test_a_bare_explain_explains_the_last_verdict(
    here: Course, capsys: Capture
) -> None:
    assert explain() == 0
    assert "explain --all" in capsys.readouterr().out
    progress = Progress(here.root)
    progress.record_verdict(SECOND, passed=False, digest="", slug="ring-of-sends")
    assert explain() == 0
    assert capsys.readouterr().out.startswith("ring-of-sends: ")
    progress.record_verdict(SECOND, passed=True, digest="")
    assert explain() == 0
    assert "explain --all" in capsys.readouterr().out


def test_a_milestone_is_marked(here: Course, capsys: Capture) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    for task in curriculum.tasks:
        lines = next_task(curriculum, progress, task.id)
        assert bool(task.milestone) == any("◆" in line for _, line in lines)


def test_a_sentence_is_as_wide_as_the_screen(
    here: Course, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, most in (("60", 60), ("200", 80)):
        done = here.distlab("explain", "a text that nobody knows", COLUMNS=width)
        assert done.code == 2
        assert max(map(len, done.err.splitlines())) <= most
        assert len(done.err.splitlines()) > 1
    monkeypatch.delenv("COLUMNS", raising=False)
    warn("one " * 40)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_sign_of_life_on_a_screen_only(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("checking 1.16"):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("distlab.cli.screen.moves", lambda: True)
    with waiting("checking 1.16") as sign:
        sign("checking 1.16: C1, n = 4")
    first, second, gone = capsys.readouterr().out.split("\r\x1b[K")[1:]
    assert (first, second, gone) == (
        "  checking 1.16 …",
        "  checking 1.16: C1, n = 4 …",
        "",
    )
    with waiting("checking 1.16", quiet=True):
        pass
    assert capsys.readouterr().out == ""


# ── reset ───────────────────────────────────────────────────────────────────────────


def test_reset_keeps_every_file(here: Course, capsys: Capture) -> None:
    template, fresh = here.template(), here.template().read_bytes()
    before = here.files()
    assert reset("collectives") == 0
    assert here.files() == before
    capsys.readouterr()
    for number in range(3):  # within one second, most likely
        template.write_text(f"# {number}")
        assert reset("collectives") == 0
        assert template.read_bytes() == fresh
    kept = sorted(template.parent.glob("template_collectives.kept-*.py"))
    assert sorted(file.read_text() for file in kept) == ["# 0", "# 1", "# 2"]
    said = capsys.readouterr().out
    assert all(file.name in said for file in kept)
    template.unlink()
    assert reset("collectives") == 0
    assert template.read_bytes() == fresh


def test_the_path_goes_on_behind_what_passed_last(here: Course) -> None:
    curriculum, progress = load_curriculum(), Progress(here.root)
    core = [task for task in curriculum.tasks if not task.stretch]
    by_number = {task.number: task for task in curriculum.tasks}
    assert current_task(curriculum, progress) is core[0]
    progress.record_verdict(by_number["1.8"].id, passed=True, digest="")
    assert current_task(curriculum, progress).number == "1.9"
    progress.record_verdict(by_number["1.9"].id, passed=False, digest="")
    assert current_task(curriculum, progress).number == "1.9"
    passed = {task.id for task in core[3:]}
    assert following(curriculum, passed, core[-1]) is core[0]
    assert following(curriculum, passed, core[0]) is core[1]
    everything = {task.id for task in core}
    stretch = [task for task in curriculum.tasks if task.stretch]
    assert following(curriculum, everything, core[0]) in stretch
    everything |= {task.id for task in stretch}
    assert following(curriculum, everything, core[0]) is None


def test_a_reset_that_fails_changes_nothing(
    here: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.template().write_text("# mine")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("distlab.curriculum.fetched.os.replace", full)
    named = rf"{here.template().name}.*{os.strerror(28)}"
    with pytest.raises(CurriculumError, match=named):
        reset("collectives")
    assert here.template().read_text() == "# mine"
