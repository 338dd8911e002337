"""The checked questions of a phase: `phaseN_*/answers.toml`, and what is right.

    [[question]]                          [[question]]
    id = "bytes"                          id = "where"
    ask = "… on {n} ranks?"               ask = "Where …?"
    draw = { n = [2, 4, 8] }              options = ["here", "there"]
    let = { size = "4 * 4810" }           answer = "b"      (or "ab": both)
    answer = "(n - 1) * size"             why = "…"
    unit = "bytes"
    tolerance = 0.01
    why = "… {answer} …"

`draw` lists the values that a name can have; `let` works further ones out, in order;
`tolerance` is relative.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.curriculum.arithmetic import FormulaError, evaluate

LETTERS = "abcdefgh"
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {
        "": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9,
        "kib": 2**10, "mib": 2**20, "gib": 2**30,
    },
    "seconds": {"": 1, "s": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6},
    "percent": {"": 1, "%": 1, "percent": 1},
    "": {"": 1},
}  # fmt: skip
_KEYS = {
    "id", "ask", "answer", "why", "options", "draw", "let", "unit", "tolerance",
}  # fmt: skip
_SPLIT = re.compile(r"(?P<number>.*?)\s*(?P<unit>[a-zµ%]*)", re.IGNORECASE)


class QuizError(ValueError):
    """The questions of a phase cannot be used; one sentence with file and question."""


class AnswerError(ValueError):
    """This is no answer to that question, neither right nor wrong."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question as it is written; `options` make it one of choosing."""

    id: str
    ask: str
    answer: str
    why: str
    options: tuple[str, ...] = ()
    draw: dict[str, list[float]] = field(default_factory=dict)
    let: dict[str, str] = field(default_factory=dict)
    unit: str = ""
    tolerance: float = 0.0

    def drawn(self, seed: int) -> Posed:
        """The question with numbers in it; the same seed gives the same ones.

        Raises:
            FormulaError: a formula in it has no value with these.
        """
        dice = random.Random(f"{seed} {self.id}")
        names = {name: float(dice.choice(some)) for name, some in self.draw.items()}
        for name, formula in self.let.items():
            names[name] = evaluate(formula, names)
        value = None
        if not self.options:
            value = names["answer"] = evaluate(self.answer, names)
        return Posed(question=self, names=names, value=value)


@dataclass(frozen=True, kw_only=True)
class Posed:
    """A question with its numbers; `value` is the right one, where one is asked for."""

    question: Question
    names: dict[str, float]
    value: float | None

    @property
    def ask(self) -> str:
        """What is asked."""
        return _filled(self.question.ask, self.names)

    @property
    def why(self) -> str:
        """The explanation."""
        return _filled(self.question.why, self.names)

    @property
    def right_answer(self) -> str:
        """What would have been right."""
        if self.value is None:
            return ", ".join(self.question.answer)
        return f"{written(self.value)} {self.question.unit}".rstrip()

    def is_right(self, text: str) -> bool:
        """Whether `text` is the answer.

        Raises:
            AnswerError: it is no number, has another unit, or is no option.
        """
        if self.value is None:
            return _letters(text, len(self.question.options)) == {*self.question.answer}
        given = _number(text, self.question.unit)
        room = max(self.question.tolerance * abs(self.value), 1e-9)
        return math.isclose(given, self.value, rel_tol=0, abs_tol=room)


def read_questions(path: Path) -> list[Question]:
    """The questions of a phase.

    Raises:
        QuizError: there are none, or one cannot be used.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuizError("there are no questions for this phase yet") from None
    except OSError as error:
        raise QuizError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QuizError(f"{path} is not valid TOML: {error}") from error
    rows = data.get("question", [])
    if not isinstance(rows, list) or not rows or set(data) != {"question"}:
        raise QuizError(f"{path} must be a list of [[question]]")
    questions = [
        _question(row, f"{path}: question {n}") for n, row in enumerate(rows, 1)
    ]
    ids = [question.id for question in questions]
    for name in ids:
        if ids.count(name) > 1:
            raise QuizError(f"{path}: two questions are called {name}")
    return questions


def written(value: float) -> str:
    """19,240 and 0.25: as one writes numbers."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}"


def _question(row: Any, where: str) -> Question:
    if not isinstance(row, dict):
        raise QuizError(f"{where} is no table")
    where = f"{where} ({row.get('id', 'without id')})"
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise QuizError(f"{where}: {unknown[0]} means nothing here")
    for key in ("id", "ask", "answer", "why"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise QuizError(f"{where}: {key} is missing")
    _check_tables(row, where)
    question = Question(**{**row, "options": tuple(row.get("options", ()))})
    _check_answer(question, where)
    return question


def _check_tables(row: dict[str, Any], where: str) -> None:
    options = row.get("options", [])
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise QuizError(f"{where}: options is a list of texts")
    draw = row.get("draw", {})
    if not isinstance(draw, dict) or not all(map(_are_numbers, draw.values())):
        raise QuizError(f"{where}: draw names lists of numbers")
    let = row.get("let", {})
    if not isinstance(let, dict) or not all(isinstance(f, str) for f in let.values()):
        raise QuizError(f"{where}: let names formulas")
    tolerance = row.get("tolerance", 0)
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise QuizError(f"{where}: tolerance is a share below 1")
    if row.get("unit", "") not in _UNITS:
        raise QuizError(f"{where}: unit is {', '.join(filter(None, _UNITS))} or absent")


def _are_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) in (int, float) for value in values)
    )


def _check_answer(question: Question, where: str) -> None:
    if question.options:
        known = set(LETTERS[: len(question.options)])
        if len(question.options) < 2 or len(question.options) > len(LETTERS):
            raise QuizError(f"{where}: there are 2 to {len(LETTERS)} options")
        if not set(question.answer) <= known:
            raise QuizError(f"{where}: {question.answer!r} is none of its options")
    try:
        for seed in range(50):  # of a formula that fails at times, one is found
            posed = question.drawn(seed)
            _ = posed.ask, posed.why
    except FormulaError as error:
        raise QuizError(f"{where}: {error}") from None


def _filled(text: str, names: dict[str, float]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in names:
            raise FormulaError(f"there is no {match[1]} for {match[0]}")
        return written(names[match[1]])

    return re.sub(r"\{(\w+)\}", value, text)


def _letters(text: str, count: int) -> set[str]:
    letters = set(re.sub(r"[\s,]|and", "", text.lower()))
    if not letters or not letters <= set(LETTERS[:count]):
        raise AnswerError(f"choose from the options {', '.join(LETTERS[:count])}")
    return letters


def _number(text: str, unit: str) -> float:
    match = _SPLIT.fullmatch(text.strip())
    number, given = (match["number"], match["unit"].lower()) if match else ("", "")
    if not any(character.isdigit() for character in number):
        raise AnswerError("the answer is a number")
    factor = _UNITS[unit].get(given)
    if factor is None:
        raise AnswerError(
            f"{given!r} isn't the right unit"
            + (f"; please answer in {unit}" if unit else "")
        )
    try:
        return factor * evaluate(re.sub(r"(?<=\d)[,_](?=\d)", "", number))
    except FormulaError:
        raise AnswerError("the answer is a number") from None
