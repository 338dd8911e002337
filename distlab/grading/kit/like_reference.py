"""Comparing what the ranks recorded with what the reference's ranks recorded.

The reference runs in the same scenario, with the same seed on as many ranks. A freedom
states what the contract leaves open, so that a solution that uses it isn't rejected:

    expect_like_reference(runs, on_ranks(steps), "names", freedom=ANY_ORDER)

Playing the reference costs as much as the learner's run. Where one process can work out
what is expected, prefer that: it is faster, and doesn't depend on the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.grading.kit.values import brief, close, expect_values
from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.grading.verdict import NotYetError


@dataclass(frozen=True)
class Freedom:
    """What may differ: both values are compared after `same`, up to `tolerance`.

    `same` takes a rank's value and the reference's, and returns both in a form in
    which only what the contract settles is left.
    """

    same: Callable[[Any, Any], tuple[Any, Any]] = lambda mine, right: (mine, right)
    tolerance: float = 1e-10


def _with_zeros(mine: Any, right: Any) -> tuple[Any, Any]:
    if mine is None and isinstance(right, Tensor):
        mine = torch.zeros_like(right)
    if right is None and isinstance(mine, Tensor):
        right = torch.zeros_like(mine)
    return mine, right


def _without_padding(mine: Any, right: Any) -> tuple[Any, Any]:
    if isinstance(mine, Tensor) and isinstance(right, Tensor):
        length = min(len(mine), len(right))
        if not (mine[length:].any() or right[length:].any()):
            return mine[:length], right[:length]
    return mine, right


def up_to(bound: float) -> Freedom:
    """Return the freedom to be off by `bound`, relative to the largest number."""
    return Freedom(tolerance=bound)


NOTHING = Freedom()  # except by rounding
ANY_ORDER = Freedom(lambda mine, right: (sorted(mine), sorted(right)))
NONE_OR_ZEROS = Freedom(_with_zeros)
PADDED_OR_NOT = Freedom(_without_padding)  # with zeros, at the end


def expect_like_reference(
    runs: Runs,
    scenario: Scenario | RunSpec,
    key: str,
    *,
    what: str = "",
    freedom: Freedom = NOTHING,
) -> None:
    """Expect that each rank recorded under `key` what the reference's rank recorded.

    Raises:
        NotYetError: a rank recorded something else, or the ranks didn't finish.
        MissingRunError: these runs have no reference beside them.
    """
    mine = [_plain(value[key]) for value in runs.finished(scenario).values]
    right = [_plain(value[key]) for value in runs.reference(scenario).values]
    pairs = [freedom.same(a, b) for a, b in zip(mine, right, strict=True)]
    what = what or key
    if all(isinstance(wanted, Tensor) for _, wanted in pairs):
        actual, expected = [a for a, _ in pairs], [b for _, b in pairs]
        expect_values(actual, expected, what=what, tolerance=freedom.tolerance)
        return
    wrong = [
        rank for rank, pair in enumerate(pairs) if _differ(*pair, freedom.tolerance)
    ]
    if wrong:
        raise NotYetError(
            f"{what} on rank {wrong[0]} {_first_difference(*pairs[wrong[0]])}",
            evidence=[
                (
                    rank,
                    "wrong" if rank in wrong else "right",
                    f"got {brief(a)}   expected {brief(b)}",
                )
                for rank, (a, b) in enumerate(pairs)
            ],
        )


def _differ(mine: Any, right: Any, tolerance: float) -> bool:
    if isinstance(mine, Tensor) or isinstance(right, Tensor):
        return not (isinstance(right, Tensor) and close(mine, right, tolerance))
    return bool(mine != right)


def _plain(value: Any) -> Any:
    """A list of floats as a tensor: they may differ by rounding."""
    is_floats = isinstance(value, list) and all(isinstance(x, float) for x in value)
    return torch.tensor(value, dtype=torch.float64) if is_floats else value


def _first_difference(mine: Any, right: Any) -> str:
    if isinstance(mine, list | tuple) and isinstance(right, list | tuple):
        if len(mine) != len(right):
            return f"has {len(mine)} entries, expected {len(right)}"
        places = range(len(mine))
        place = next((p for p in places if mine[p] != right[p]), None)
        if place is not None:
            return f"has {mine[place]} at index {place}, expected {right[place]}"
    return f"is {mine}, expected {right}"
