"""`distlab quiz`: what counts as right, what is told wrong, and what is no question."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from distlab.cli.quiz import quiz
from distlab.curriculum import CurriculumError, Progress, load_curriculum
from distlab.curriculum.arithmetic import FormulaError, evaluate
from distlab.curriculum.quiz import (
    AnswerError,
    Question,
    QuizError,
    read_questions,
)
from tests.workbench.course import ROOT, Course
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
CURRICULUM = load_curriculum(ROOT)
FILES = [
    path
    for phase in CURRICULUM.phases
    if (path := ROOT / phase.folder / "answers.toml").exists()
]
GOOD = '[[question]]\nid = "x"\nask = "{n}?"\ndraw = { n = [2, 3] }\nwhy = "{answer}"\n'


# ── formulas ────────────────────────────────────────────────────────────────────────


def test_formulas_are_worked_out() -> None:
    assert evaluate("2 * (n - 1) / n", {"n": 4}) == 1.5
    assert evaluate("ceil(log2(7)) + -3 // 2 + 2 ** 3") == 3 - 2 + 8
    assert evaluate("-1003 % 4") == 1


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')", "().__class__", "open('x')", "n", "1;2",
        "1 if 1 else 2", "9**9**9", "9**99", "1e300*1e300", "1/0", "'a'*9", "True",
        "[1]", "(lambda: 1)()", "max()", "ceil(x=1)", "", "(-8)**0.5", "9" * 300,
        "(" * 150, "1e400",
    ],
)  # fmt: skip
def test_what_is_no_formula(formula: str) -> None:
    with pytest.raises(FormulaError) as caught:
        evaluate(formula)
    assert "\n" not in str(caught.value)


# ── the questions that there are ────────────────────────────────────────────────────


@pytest.mark.parametrize("path", FILES, ids=[path.parent.name for path in FILES])
def test_every_question_can_be_answered_and_missed(path: Path) -> None:
    questions = read_questions(path)
    assert len(questions) >= 10
    for question in questions:
        for seed in range(5):
            posed = question.drawn(seed)
            assert "{" not in posed.ask + posed.why
            assert posed.is_right(posed.right_answer.replace(" ", ""))
            if posed.value is None:
                wrong = "b" if question.answer != "b" else "a"
            else:
                wrong = f"{posed.value * 1.5 + 1}"
            assert not posed.is_right(wrong), question.id


def test_phase_1_by_hand() -> None:
    by_id = {q.id: q for q in read_questions(FILES[0])}
    size = by_id["bytes-per-step"]
    seeds = range(20)
    for hidden, right in ((64, 19240), (256, 76840)):
        posed = next(p for s in seeds if (p := size.drawn(s)).names["hidden"] == hidden)
        assert posed.value == right
    assert {by_id["dropped"].drawn(seed).value for seed in seeds} <= set(range(8))
    assert by_id["smallest-counterexample"].drawn(0).is_right("3")


def test_numbers_units_and_tolerance() -> None:
    posed = Question(
        id="x", ask="", answer="19240", why="", unit="bytes", tolerance=0.005
    ).drawn(0)
    for right in ("19240", "19,240", "19.24 kB", "19240 B", "4*4810", "18.79 KiB"):
        assert posed.is_right(right), right
    for wrong in ("19", "19240 kB", "2e4", "-19240"):
        assert not posed.is_right(wrong), wrong
    for no_answer in ("19240 s", "many", "", "open('x')"):
        with pytest.raises(AnswerError):
            posed.is_right(no_answer)


# ── the verb ────────────────────────────────────────────────────────────────────────


def test_right_wrong_and_left_out_are_told_and_kept(
    here: Course, capsys: Capture
) -> None:
    questions = read_questions(FILES[0])
    right = [q.drawn(3).right_answer for q in questions]
    assert quiz(1, answers=f"{right[0]};7;;furlongs", seed=3) == 0
    said = capsys.readouterr().out
    told = [line for line in said.splitlines() if line.startswith("   ")]
    for answer in right[:3]:
        assert any(line.endswith(f" {answer}") for line in told)
    assert any(re.search(rf"\b7\b.* {right[1]}$", line) for line in told)
    assert "furlongs: " in said
    assert re.search(r"^1 of 2\b", said, re.MULTILINE)
    kept = Progress(here.root).read()["quiz"]
    assert kept["1/rank-0-sends"] == {"answer": "7", "right": False}
    assert kept["1/bytes-per-step"]["right"] is True
    assert not Progress(here.root).read()["tasks"]
    quiz(1, answers=";".join(right), seed=3)
    said = capsys.readouterr().out
    assert re.search(rf"^{len(right)} of {len(right)}\b", said, re.MULTILINE)


def test_one_at_a_time_until_q(
    here: Course, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("what\n1\n1\nq\n"))
    assert quiz(1, seed=1) == 0
    said = capsys.readouterr().out
    assert re.search(r"^what: ", said, re.MULTILINE)
    assert re.search(r"^0 of 1\b", said, re.MULTILINE)


def test_an_empty_line_asks_again_and_a_question_mark_gives_up(
    here: Course, monkeypatch: pytest.MonkeyPatch, capsys: Capture, golden: Golden
) -> None:
    path = here.root / "phase1_data_parallel" / "answers.toml"
    second = GOOD.replace('"x"', '"y"') + 'answer = "n * n"\nunit = "bytes"\n'
    third = GOOD.replace('"x"', '"z"').replace('"{answer}"', '"so"')
    third += 'answer = "b"\noptions = ["one", "two"]\n'
    path.write_text(f'{GOOD}answer = "n"\n{second}{third}', encoding="utf-8")
    right = [q.drawn(1).right_answer for q in read_questions(path)]
    typed = f"\n  \nmany\n{right[0]}\n?\na\na\nq\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert quiz(1, seed=1) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"\?.*\bq\b", said)) == 1 + 3  # and once in the head
    assert re.search(r"^1 of 2\b", said, re.MULTILINE)
    kept = Progress(here.root).read()["quiz"]
    assert {name: entry["right"] for name, entry in kept.items()} == {
        "1/x": True,
        "1/z": False,
    }
    golden("cli/quiz", said)


def test_what_cannot_be_asked(here: Course) -> None:
    with pytest.raises(CurriculumError, match=r"\b9\b"):
        quiz(9)
    there_are = len(read_questions(FILES[0]))
    with pytest.raises(QuizError, match=rf"\b40\b.*\b{there_are}\b"):
        quiz(1, answers=";".join("a" * 40))
    (here.root / "phase1_data_parallel" / "answers.toml").unlink()
    done = here.distlab("quiz", "1")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"distlab: .+\n", done.err)


BAD = [
    ("", r"\[\[question\]\]"),
    ("question = 3", r"\[\[question\]\]"),
    ("question = [3]", r"\b1\b"),
    ("[[question", r"\bTOML\b"),
    ('[[question]]\nid = "x"', r"\b1 \(x\): ask\b"),
    (GOOD + 'answer = "m"', r"\(x\): 'm'"),
    (GOOD + 'answer = "1 / (n - 2)"', r"'1 / \(n - 2\)'"),
    (GOOD + 'answer = "__import__"', "__import__"),
    (GOOD + 'answer = "n"\ncolour = 1', r"\bcolour\b"),
    (GOOD + 'answer = "n"\nunit = "pounds"', r"\(x\): unit\b.*\bbytes\b"),
    (GOOD + 'answer = "n"\ntolerance = 2', r"\(x\): tolerance\b.*\b1\b"),
    (GOOD + 'answer = "n"\nlet = { m = "k" }', "'k'"),
    (GOOD + 'answer = "c"\noptions = ["1", "2"]', "'c'"),
    (GOOD + 'answer = "a"\noptions = ["1"]', r"\b2\b.*\b8\b"),
    (GOOD + 'answer = "a"\noptions = [1, 2]', r"\(x\): options\b"),
    (GOOD.replace("{n}?", "{k}?") + 'answer = "n"', r"\{k\}"),
    (GOOD.replace("[2, 3]", "[]") + 'answer = "n"', r"\(x\): draw\b"),
    ((GOOD + 'answer = "n"\n') * 2, r"\bx$"),
]


def test_a_bad_file_is_one_sentence(here: Course, golden: Golden) -> None:
    path = here.root / "phase1_data_parallel" / "answers.toml"
    told = []
    for text, named in BAD:
        path.write_text(text, encoding="utf-8")
        said = refusal(QuizError, quiz, 1)
        assert re.search(named, said), (said, named)
        assert re.fullmatch(r".*\banswers\.toml\b.*", said)
        told.append(re.sub(r"(\bTOML: ).*", r"\1<why>", said))
    golden("cli/quiz-refused", "\n".join(told))
