"""`distlab quiz N`: the checked questions of a phase, one at a time, never graded."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Callable

from distlab.cli.prompt import QuitError, ask_line
from distlab.cli.screen import show, warn
from distlab.curriculum import Progress, ProgressUnavailableError, load_curriculum
from distlab.curriculum.quiz import (
    LETTERS,
    AnswerError,
    Posed,
    QuizError,
    read_questions,
)

_WIDTH = 78


def quiz(phase: int, *, answers: str | None = None, seed: int | None = None) -> int:
    """Ask, or take `answers` (with semicolons), and say which are right; always 0.

    Raises:
        ValueError: no such phase, no questions, or more answers than questions.
    """
    curriculum = load_curriculum()
    folder = curriculum.root / curriculum.phase(phase).folder
    questions = read_questions(folder / "answers.toml")
    seed = secrets.randbelow(10_000) if seed is None else seed
    given = None if answers is None else [a.strip() for a in answers.split(";")]
    if given is not None and len(given) > len(questions):
        raise QuizError(f"{len(given)} answers to {len(questions)} questions")
    show([("dim", f"{len(questions)} questions, numbers of --seed {seed}; q leaves")])
    kept: dict[str, dict[str, object]] = {}
    for number, question in enumerate(questions, 1):
        posed = question.drawn(seed)
        show(_asked(number, posed))
        try:
            tries = 1 if given else 2
            answer, is_right = _answer(posed, _reader(given, number), tries)
        except QuitError:
            break
        show(_told(posed, answer, is_right=is_right))
        if answer:
            kept[f"{phase}/{question.id}"] = {"answer": answer, "right": is_right}
    _end(Progress(curriculum.root), kept)
    return 0


def _reader(given: list[str] | None, number: int) -> Callable[[], str]:
    if given is None:
        return lambda: ask_line("> ")
    return lambda: given[number - 1] if number <= len(given) else ""


def _answer(posed: Posed, read: Callable[[], str], tries: int) -> tuple[str, bool]:
    """What was answered, and whether it is right; what is no answer is asked again."""
    for _ in range(tries):
        text = read()
        if not text:
            break
        try:
            return text, posed.is_right(text)
        except AnswerError as error:
            show([("plain", f"{text}: {error}")])
    return "", False


def _asked(number: int, posed: Posed) -> list[tuple[str, str]]:
    lines = [("plain", "")]
    ask = textwrap.wrap(posed.ask, _WIDTH - 4, break_long_words=False)
    lines += [
        ("plain", f"{number}. {row}" if not i else f"   {row}")
        for i, row in enumerate(ask)
    ]
    for letter, option in zip(LETTERS, posed.question.options, strict=False):
        rows = textwrap.wrap(option, _WIDTH - 8)
        lines += [
            ("plain", f"     {f'{letter}) ' if not i else '   '}{row}")
            for i, row in enumerate(rows)
        ]
    if len(posed.question.answer) > 1 and posed.question.options:
        lines.append(("dim", "   (several letters)"))
    elif posed.question.unit:
        lines.append(("dim", f"   (in {posed.question.unit})"))
    return lines


def _told(posed: Posed, answer: str, *, is_right: bool) -> list[tuple[str, str]]:
    if is_right:
        lines = [("pass", f"   right: {posed.right_answer}")]
    elif answer:
        lines = [("fail", f"   not {answer}: it is {posed.right_answer}")]
    else:
        lines = [("plain", f"   no answer: it is {posed.right_answer}")]
    rows = textwrap.wrap(posed.why, _WIDTH - 4, break_long_words=False)
    return lines + [("plain", f"   {row}") for row in rows]


def _end(progress: Progress, kept: dict[str, dict[str, object]]) -> None:
    right = sum(entry["right"] is True for entry in kept.values())
    show([("plain", ""), ("plain", f"{right} of {len(kept)} answers were right")])
    if kept:
        try:
            progress.keep("quiz", kept)
        except ProgressUnavailableError as error:
            warn(str(error))
