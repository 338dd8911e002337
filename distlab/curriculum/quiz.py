"""The checked questions of a phase, and what is right.

`phaseN_*/answers.toml` has questions with numbers and questions of choosing:

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

`phaseN_*/sheet.toml` has the accounting sheet. Its questions ask for a formula, and any
formula with the same values is right:

    [[question]]
    id = "star-bytes"
    ask = "…"
    symbols = { n = [2, 64, "ranks"], B = [1, 9e6, "bytes of the tensor"] }
    answer = "2 * (n - 1) * B"
    unit = "bytes"
    why = "…"

We compare both formulas at random values of the symbols, which lie between the two
numbers. They are whole if both of these are.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.curriculum.arithmetic import FormulaError, evaluate, spelled_out

LETTERS = "abcdefgh"
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {
        "": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9,
        "kib": 2**10, "mib": 2**20, "gib": 2**30,
    },
    "seconds": {"": 1, "s": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6},
    "percent": {"": 1, "%": 1, "percent": 1},
    "FLOP": {"": 1, "flop": 1},
    "GPU-seconds": {"": 1},
    "": {"": 1},
}  # fmt: skip
_KEYS = {
    "id", "ask", "answer", "why", "options", "draw", "let", "unit", "tolerance",
    "symbols",
}  # fmt: skip
_SAMPLES = 20  # values at which we compare two formulas
_SAME = 1e-6  # relative; rounding alone stays far below it
_SPLIT = re.compile(r"(?P<number>.*?)\s*(?P<unit>[a-zµ%]*)", re.IGNORECASE)


class QuizError(ValueError):
    """The questions of a phase cannot be used; one sentence with file and question."""


class AnswerError(ValueError):
    """This is no answer to that question, neither right nor wrong."""


@dataclass(frozen=True)
class Symbol:
    """A name that an asked formula may use, with its smallest and largest value."""

    low: float
    high: float
    meaning: str

    def drawn(self, dice: random.Random) -> float:
        """Return a random value."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return float(dice.randint(self.low, self.high))
        return dice.uniform(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question as it is written.

    `options` make it one of choosing, and `symbols` one whose answer is a formula.
    """

    id: str
    ask: str
    answer: str
    why: str
    options: tuple[str, ...] = ()
    draw: dict[str, list[float]] = field(default_factory=dict)
    let: dict[str, str] = field(default_factory=dict)
    unit: str = ""
    tolerance: float = 0.0
    symbols: dict[str, Symbol] = field(default_factory=dict)

    def drawn(self, seed: int) -> Posed:
        """The question with numbers in it; the same seed gives the same ones.

        Raises:
            FormulaError: a formula in it has no value with these.
        """
        dice = random.Random(f"{seed} {self.id}")
        if self.symbols:
            return Posed(
                question=self, names={}, value=None, samples=self._samples(dice)
            )
        names = {name: float(dice.choice(some)) for name, some in self.draw.items()}
        for name, formula in self.let.items():
            names[name] = evaluate(formula, names)
        value = None
        if not self.options:
            value = names["answer"] = evaluate(self.answer, names)
        return Posed(question=self, names=names, value=value)

    def _samples(self, dice: random.Random) -> tuple[Sample, ...]:
        samples = []
        for _ in range(_SAMPLES):
            names = {name: symbol.drawn(dice) for name, symbol in self.symbols.items()}
            samples.append(Sample(names, evaluate(self.answer, names)))
        return tuple(samples)


@dataclass(frozen=True)
class Sample:
    """Values of the symbols, and the value of the right formula there."""

    names: dict[str, float]
    value: float


@dataclass(frozen=True, kw_only=True)
class Posed:
    """A question with its numbers; `value` is the right one, where one is asked for."""

    question: Question
    names: dict[str, float]
    value: float | None
    samples: tuple[Sample, ...] = ()

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
        if self.samples:
            return self.question.answer
        if self.value is None:
            return ", ".join(self.question.answer)
        return f"{written(self.value)} {self.question.unit}".rstrip()

    def is_right(self, text: str) -> bool:
        """Whether `text` is the answer.

        Raises:
            AnswerError: `text` isn't a number or an option, has another unit, or isn't
                a formula in the symbols of the question.
        """
        if self.samples:
            return not self.difference(text)
        if self.value is None:
            return _letters(text, len(self.question.options)) == {*self.question.answer}
        given = _number(text, self.question.unit)
        room = max(self.question.tolerance * abs(self.value), 1e-9)
        return math.isclose(given, self.value, rel_tol=0, abs_tol=room)

    def difference(self, text: str) -> str:
        """Say at which values the formula `text` differs most from the right one.

        Returns "" if it's right, and for all other kinds of questions.

        Raises:
            AnswerError: `text` isn't a formula in the symbols of the question.
        """
        worst, said = 0.0, ""
        for sample, given in zip(self.samples, self._values(text), strict=True):
            off = math.inf if given is None else abs(given - sample.value)
            if off <= _SAME * abs(sample.value) + 1e-9:
                continue
            share = off / max(abs(sample.value), 1e-9)
            if share > worst:
                worst, said = share, self._differs_at(sample, given)
        return said

    def _values(self, text: str) -> list[float | None]:
        """Return the formula's value at each sample, or None where it has none."""
        if not self.samples:
            return []
        try:
            formula = spelled_out(text, self.question.symbols)
        except FormulaError as error:
            raise AnswerError(str(error)) from None
        values: list[float | None] = []
        for sample in self.samples:
            try:
                values.append(evaluate(formula, sample.names))
            except FormulaError as error:
                values.append(None)
                problem = str(error).removeprefix(f"{formula!r}: ")
        if all(value is None for value in values):
            names = ", ".join(self.question.symbols)
            raise AnswerError(f"{problem}; please answer with a formula in {names}")
        return values

    def _differs_at(self, sample: Sample, given: float | None) -> str:
        pairs = [f"{name} = {written(value)}" for name, value in sample.names.items()]
        at = " and ".join(filter(None, [", ".join(pairs[:-1]), pairs[-1]]))
        right = f"{written(sample.value)} {self.question.unit}".rstrip()
        has = "has no value" if given is None else f"gives {written(given)}"
        return f"at {at}, your formula {has}, but the right one gives {right}"


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
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


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
    symbols = {name: Symbol(*some) for name, some in row.get("symbols", {}).items()}
    options = tuple(row.get("options", ()))
    question = Question(**{**row, "options": options, "symbols": symbols})
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
    symbols = row.get("symbols", {})
    if not isinstance(symbols, dict) or not all(map(_is_symbol, symbols.values())):
        raise QuizError(
            f"{where}: symbols must give each name two numbers and a meaning"
        )
    if symbols and any(key in row for key in ("options", "draw", "let", "tolerance")):
        raise QuizError(f"{where}: with symbols, only answer and unit are allowed")
    if row.get("unit", "") not in _UNITS:
        raise QuizError(f"{where}: unit is {', '.join(filter(None, _UNITS))} or absent")


def _are_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) in (int, float) for value in values)
    )


def _is_symbol(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and _are_numbers(values[:2])
        and values[0] < values[1]
        and isinstance(values[2], str)
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
