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
        return "returns None: is a return missing?"
    if is_dataclass(value) and not isinstance(value, type):
        numbers: Mapping[str, Any] = asdict(value)
    else:
        numbers = {"": value}
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            return f"returns {number!r:.40}{f' as {name}' * bool(name)}, not a number"
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
            raise NotYetError(f"{function} {got} ({call.words})", fatal=True)
        if got.keys() != right.keys():
            kind = "a number" if "" in right else f"an object with {', '.join(right)}"
            raise NotYetError(
                f"{function} must return {kind} ({call.words})", fatal=True
            )
        rows += [(call, name, right[name], got[name]) for name in names or right]
    wrong = [row for row in rows if not _close(row[3], row[2])]
    if wrong:
        shares = [_share(got, right) for _, _, right, got in rows]
        raise _wrong(function, names, wrong, shares)
    return f"{function}: {num_calls} questions"


def _close(got: float, right: float) -> bool:
    return math.isclose(got, right, rel_tol=CLOSE, abs_tol=1e-12)


def _share(got: float, right: float) -> float:
    """Return an answer as a share of the right one, so small ones count as much."""
    return got / right if right else 1 + got


def _wrong(
    function: str, names: tuple[str, ...], rows: list[Row], shares: list[float]
) -> NotYetError:
    call, name, right, got = min(rows, key=lambda row: row[0].words.count(","))
    what = f"{function}(…).{name}" if name else f"{function}(…)"
    pair = apart(got, right)
    if max(abs(got), abs(right)) >= 1e4 and got.is_integer() and right.is_integer():
        pair = _number(got), _number(right)
    told = (len(rows) == len(shares) and _ratio(rows)) or _gap(call, got - right)
    return NotYetError(
        f"{what} is {pair[0]}, expected {pair[1]}{told}, {_with(call, name)}",
        evidence=_lines(rows),
        difference=Difference(
            what=" ".join((function, *names)),
            actual=(torch.tensor(shares, dtype=torch.float64),),
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
    return f" (wrong by the factor {first:.3g} everywhere)"


def _gap(call: Call, more: float) -> str:
    """In words, if a number of weights is off by the size of one tensor."""
    model = call.arguments[0] if call.arguments else None
    if not isinstance(model, Model) or not more.is_integer():
        return ""
    h, v = model.hidden, model.vocab
    sizes = {"hidden": h, "vocab · hidden": v * h, "6 · vocab · hidden": 6 * v * h}
    found = [name for name, size in sizes.items() if size == abs(more)]
    if not found:
        return ""
    much = "more" if more > 0 else "less"
    return f" ({found[0]} = {int(abs(more)):,} {much})"


def _with(call: Call, name: str) -> str:
    """The question; of a job the parts that decide about this number."""
    if call.function != "goodput":
        return f"for {call.words}"
    cluster, num_gpus, recovery, _ = call.arguments
    right = forms.goodput(*call.arguments)
    gpus = f"{num_gpus:,} GPUs"
    if name == "share":
        saving, failing = (
            recovery.save_s / right.interval_s,
            right.lost_s / right.mtbf_s,
        )
        return (
            f"for save_s / interval_s = {saving:.3g} and lost_s / mtbf_s = "
            f"{failing:.3g}"
        )
    if name in ("price", "wall_s"):
        nodes = f"{recovery.spare_nodes} spare node{'s' * (recovery.spare_nodes != 1)}"
        size = cluster.gpus_per_node
        return (
            f"for {gpus}, {nodes} of {size} GPUs each and a share of {right.share:.3g}"
        )
    if name == "lost_s":
        return (
            f"for interval_s={said(right.interval_s)}, "
            f"detection_s={said(recovery.detection_s)}, "
            f"restart_s={said(recovery.restart_s)}, repair_s={said(recovery.repair_s)} "
            f"and spare_nodes={recovery.spare_nodes}"
        )
    return f"for {gpus} with gpu_mtbf_s={said(cluster.gpu_mtbf_s)}"


def _lines(rows: list[Row]) -> Iterator[tuple[int, str, str]]:
    for call, name, right, got in rows[:_TABLE]:
        text = f"expected {_number(right)}   got {_number(got)}   {call.words}"
        yield NOBODY, name or call.function, text


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"
