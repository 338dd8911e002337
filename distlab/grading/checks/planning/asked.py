"""A function's answers to its questions, compared with those of `forms`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from distlab.given.planning import Model
from distlab.grading.checks.planning import forms
from distlab.grading.checks.planning.questions import CALLS, Call
from distlab.grading.checks.planning.situation import situation
from distlab.grading.kit.apart import apart, said
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs
from distlab.grading.verdict import Difference, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY

CLOSE = 1e-9  # relative
_TABLE = 4  # lines of evidence
Answer = dict[str, float] | str
"""Numbers by name, "" for a function that returns one; or what was returned instead."""


def answers(
    context: RankContext, unit: ModuleType, seed: int, function: str
) -> list[Answer]:
    """What a function returns to each of its questions."""
    found = []
    for call in CALLS[function](seed):
        with in_call(f"{function}: {call.words}"):
            found.append(_read(getattr(unit, function)(*call.arguments)))
    return found


def _read(value: Any) -> Answer:
    if value is None:
        return "returned None: is a return missing?"
    if is_dataclass(value) and not isinstance(value, type):
        numbers: Mapping[str, Any] = asdict(value)
    else:
        numbers = {"": value}
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            field = f" as {name}" * bool(name)
            return f"returned {number!r:.40}{field}, expected a number"
    return {name: float(number) for name, number in numbers.items()}


@lru_cache(maxsize=64)
def expected(function: str, seed: int) -> tuple[tuple[Call, Answer], ...]:
    """Each question, and its answer."""
    form = getattr(forms, function)
    return tuple((call, _read(form(*call.arguments))) for call in CALLS[function](seed))


Chosen = Callable[[Call], bool]
Row = tuple[Call, str, float, float]
"""A question, the name of a number, its right value, and the one that we got."""


def expect_answers(
    runs: Runs, function: str, *names: str, chosen: Chosen = lambda call: True
) -> str:
    """Compare the answers of one function, in the fields `names` if it has any.

    Raises:
        NotYetError: one of them is wrong.
    """
    told = worked_out(runs, answers, function=function).values[0]
    rows: list[Row] = []
    num_calls = 0
    for (call, right), got in zip(expected(function, runs.seed), told, strict=True):
        if not chosen(call):
            continue
        num_calls += 1
        assert isinstance(right, dict)
        if isinstance(got, str):
            raise NotYetError(f"for {call.words}, {function} {got}", fatal=True)
        if got.keys() != right.keys():
            kind = "a number" if "" in right else f"an object with {', '.join(right)}"
            raise NotYetError(f"{function} must return {kind}", fatal=True)
        rows += [(call, name, right[name], got[name]) for name in names or right]
    wrong = [row for row in rows if not _close(row[3], row[2])]
    if wrong:
        raise _wrong(function, names, wrong, rows)
    return f"{function}: {num_calls} questions"


def _close(got: float, right: float) -> bool:
    return math.isclose(got, right, rel_tol=CLOSE, abs_tol=1e-12)


def _share(got: float, right: float) -> float:
    """Return an answer as a share of the right one, so small ones count as much."""
    return got / right if right else 1 + got


def _wrong(
    function: str, names: tuple[str, ...], wrong: list[Row], rows: list[Row]
) -> NotYetError:
    call, name, right, got = min(wrong, key=lambda row: row[0].words.count(","))
    pair = apart(got, right)
    if max(abs(got), abs(right)) >= 1e4 and got.is_integer() and right.is_integer():
        pair = _number(got), _number(right)
    unit = " s" * (name or function).endswith("_s") * ("per_s" not in name)
    returned = f"`{name}` = " * bool(name) + pair[0] + unit
    told = (len(wrong) == len(rows) and _ratio(wrong)) or _gap(call, name, got - right)
    alike = [row[0] for row in wrong if row[1] == name]
    asked = [row[0] for row in rows if row[1] == name]
    return NotYetError(
        f"{situation(call, name, alike, asked)}, {function} returned {returned}, "
        f"expected {pair[1]}{unit}{told}",
        evidence=_lines(wrong),
        difference=Difference(
            what=" ".join((function, *names)),
            actual=(
                torch.tensor(
                    [_share(got, right) for _, _, right, got in rows],
                    dtype=torch.float64,
                ),
            ),
            tolerance=CLOSE,
        ),
    )


def _ratio(rows: list[Row]) -> str:
    """In words, if all answers are wrong by one factor."""
    factors = [got / right for _, _, right, got in rows if right]
    if len(factors) < max(2, len(rows)):
        return ""
    first = factors[0]
    if not all(math.isclose(factor, first, rel_tol=1e-6) for factor in factors):
        return ""
    if not first:
        return ""
    return f" (always {first:.3g} times the right value)"


def _gap(call: Call, name: str, more: float) -> str:
    """In words, if a number is off by the size of one tensor, or by one cost."""
    much = "it adds" if more > 0 else "it leaves out"
    for part, size in _parts(call, name):
        if math.isclose(size, abs(more), rel_tol=1e-9):
            shown = _number(float(size)) if size >= 1e4 else said(size)
            return f": {much} the term `{part}` = {shown}"
    return ""


def _parts(call: Call, name: str) -> Iterator[tuple[str, float]]:
    """What may be missing in an answer, and its size."""
    if call.function == "goodput" and name == "lost_s":
        recovery = call.arguments[2]
        yield "interval_s / 2", forms.goodput(*call.arguments).interval_s / 2
        yield "detection_s", recovery.detection_s
        yield "restart_s", recovery.restart_s
    model = call.arguments[0] if call.arguments else None
    if isinstance(model, Model) and not call.function.endswith("_s"):
        h, v = model.hidden, model.vocab
        yield "hidden", h
        yield "vocab · hidden", v * h
        yield "6 · vocab · hidden", 6 * v * h


def _lines(rows: list[Row]) -> Iterator[tuple[int, str, str]]:
    for call, name, right, got in rows[:_TABLE]:
        text = f"expected {_number(right)}   got {_number(got)}   {call.words}"
        yield NOBODY, name or call.function, text


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"
