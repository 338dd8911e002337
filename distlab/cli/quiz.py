"""`distlab quiz N`: ask a phase's questions one at a time, without grading them."""

from __future__ import annotations

import secrets
import textwrap

from distlab.cli.prompt import QuitError, ask_line
from distlab.cli.screen import show, warn
from distlab.curriculum import Progress, ProgressUnavailableError, load_curriculum
from distlab.curriculum.path import current_task
from distlab.curriculum.quiz import (
    LETTERS,
    AnswerError,
    Posed,
    QuizError,
    read_questions,
)
from distlab.terminal import screen_width

_GIVE_UP = "?"
_TRIES = 2
Lines = list[tuple[str, str]]


def quiz(
    phase: int = 0,
    *,
    sheet: bool = False,
    answers: str | None = None,
    seed: int | None = None,
) -> int:
    """Ask questions, or read `answers`, and say which answers are right; return 0.

    `answers` are separated by semicolons. Without a number, we ask about the phase of
    the current task. With `sheet`, we ask the questions of its accounting sheet.

    Raises:
        ValueError: no such phase, no questions, or more answers than questions.
    """
    curriculum = load_curriculum()
    phase = phase or int(current_task(curriculum, Progress(curriculum.root)).number[0])
    folder = curriculum.root / curriculum.phase(phase).folder
    questions = read_questions(folder / ("sheet.toml" if sheet else "answers.toml"))
    seed = secrets.randbelow(10_000) if seed is None else seed
    given = None if answers is None else [a.strip() for a in answers.split(";")]
    if given is not None and len(given) > len(questions):
        raise QuizError(
            f"you gave {len(given)} answers, but there are only {len(questions)} "
            "questions"
        )
    head = f"{len(questions)} questions with the numbers of --seed {seed}"
    if sheet:
        head = f"{len(questions)} questions to answer with formulas (--seed {seed})"
    show([("dim", f"{head}; type {_GIVE_UP} to see an answer, or q to leave")])
    kept: dict[str, dict[str, object]] = {}
    for number, question in enumerate(questions, 1):
        posed = question.drawn(seed)
        show(_asked(number, posed))
        try:
            if given is None:
                answer, is_right = _typed(posed)
            else:
                text = given[number - 1] if number <= len(given) else ""
                answer, is_right = _taken(posed, text) or ("", False)
        except QuitError:
            break
        show(_told(posed, answer, is_right=is_right))
        if answer:
            name = f"sheet/{question.id}" if sheet else question.id
            kept[f"{phase}/{name}"] = {"answer": answer, "right": is_right}
    _end(Progress(curriculum.root), kept)
    return 0


def _typed(posed: Posed) -> tuple[str, bool]:
    """Ask for an answer until we get a valid one; return it, and True if it's right.

    A wrong answer may be just a typo, so the learner gets a second try.

    Raises:
        QuitError: the learner has had enough.
    """
    left = _TRIES
    while True:
        text = ask_line("> ")
        answer = _taken(posed, text) if text else None
        if answer is None:
            show(
                [
                    (
                        "dim",
                        f"   type an answer, or {_GIVE_UP} to see it, or q to leave",
                    )
                ]
            )
            continue
        given, is_right = answer
        left -= 1
        if is_right or not given or not left:
            return answer
        show(
            [
                (
                    "plain",
                    f"   {given} isn't right; try once more, or type {_GIVE_UP} for "
                    "the answer",
                )
            ]
        )
        show(_where(posed, given))


def _taken(posed: Posed, text: str) -> tuple[str, bool] | None:
    """Return the answer and whether it's right; "" if the learner gives up."""
    if text in ("", _GIVE_UP):
        return "", False
    try:
        return text, posed.is_right(text)
    except AnswerError as error:
        show([("plain", f"{text}: {error}")])
        return None


def _where(posed: Posed, answer: str) -> Lines:
    """Return the lines that say where a wrong formula differs from the right one."""
    return _wrapped(posed.difference(answer))


def _wrapped(text: str, label: str = "   ") -> Lines:
    """Return the lines of a text, which begins with `label` and is indented by it."""
    rows = textwrap.wrap(
        text,
        screen_width() - 3,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
    )
    return [("plain", row) for row in rows]


def _asked(number: int, posed: Posed) -> Lines:
    lines = [("plain", ""), *_wrapped(posed.ask, f"{number}. ")]
    for letter, option in zip(LETTERS, posed.question.options, strict=False):
        lines += _wrapped(option, f"     {letter}) ")
    for name, symbol in posed.question.symbols.items():
        lines += _wrapped(symbol.meaning, f"     {name}  ")
    if len(posed.question.answer) > 1 and posed.question.options:
        lines.append(("dim", "   (several letters)"))
    elif posed.question.unit:
        lines.append(("dim", f"   (in {posed.question.unit})"))
    return lines


def _told(posed: Posed, answer: str, *, is_right: bool) -> Lines:
    if is_right:
        lines = [("pass", f"   right: {posed.right_answer}")]
    elif answer:
        said = f"   {answer} isn't right; the answer is {posed.right_answer}"
        lines = [("fail", said), *_where(posed, answer)]
    else:
        lines = [("plain", f"   the answer is {posed.right_answer}")]
    return lines + _wrapped(posed.why)


def _end(progress: Progress, kept: dict[str, dict[str, object]]) -> None:
    right = sum(entry["right"] is True for entry in kept.values())
    show([("plain", ""), ("plain", f"{right} of {len(kept)} answers were right")])
    if kept:
        try:
            progress.keep("quiz", kept)
        except ProgressUnavailableError as error:
            warn(str(error))
