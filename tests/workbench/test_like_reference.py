"""`expect_like_reference`: the reference's record, and what a contract leaves open."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distlab.curriculum import UnitSource
from distlab.grading.kit.like_reference import (
    ANY_ORDER,
    NONE_OR_ZEROS,
    NOTHING,
    PADDED_OR_NOT,
    Freedom,
    expect_like_reference,
    up_to,
)
from distlab.grading.runs import (
    MissingRunError,
    RecordedRuns,
    Runs,
    RunSpec,
    Scenario,
    on_ranks,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, RankRecord, Run


def play(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    raise AssertionError("only its records are read")


SPEC = on_ranks(play)
SOURCE = UnitSource("topology", "file", Path("mine.py"), "")


def recorded(*values: Any) -> Run:
    ranks = tuple(
        RankRecord(rank=rank, status="finished", value={"it": value})
        for rank, value in enumerate(values)
    )
    return Run(
        world_size=len(ranks), outcome="finished", ranks=ranks, seconds=0.0, limit_s=1.0
    )


class Beside(RecordedRuns):
    """Records with those of a reference."""

    def __init__(self, mine: Run, right: Run) -> None:
        super().__init__(SOURCE, len(mine.ranks), 0, {SPEC: mine})
        self.right = right

    def reference(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        return self.right


def says(mine: Any, right: Any, freedom: Freedom = NOTHING) -> str:
    """What is said of rank 1, where rank 0 is right; nothing if that is, too."""
    runs: Runs = Beside(recorded(right, mine), recorded(right, right))
    try:
        expect_like_reference(runs, SPEC, "it", freedom=freedom)
    except NotYetError as failure:
        return failure.message
    return ""


ONES, ZEROS = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("mine", "right", "freedom"),
    [
        ([2, 1], [1, 2], ANY_ORDER),
        (None, ZEROS, NONE_OR_ZEROS),
        (ZEROS, None, NONE_OR_ZEROS),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0]), PADDED_OR_NOT),
        (ONES * (1 + 1e-4), ONES, up_to(1e-3)),
        ([1.0001, 2.0], [1.0, 2.0], up_to(1e-3)),
    ],
)
def test_a_freedom_lets_pass_what_it_names_and_nothing_else(
    mine: Any, right: Any, freedom: Freedom
) -> None:
    assert says(mine, right, freedom) == ""
    assert "rank 1" in says(mine, right)


@pytest.mark.parametrize(
    ("mine", "right", "freedom"),
    [
        ([2, 2], [1, 2], ANY_ORDER),
        (None, ONES, NONE_OR_ZEROS),
        (torch.tensor([1.0, 5.0]), torch.tensor([1.0]), PADDED_OR_NOT),
        (ONES * 1.1, ONES, up_to(1e-3)),
    ],
)
def test_beyond_the_freedom_it_fails(mine: Any, right: Any, freedom: Freedom) -> None:
    assert "rank 1" in says(mine, right, freedom)


def test_the_first_difference_of_lists_is_named() -> None:
    assert "index 1" in says(["a", "c"], ["a", "b"])
    assert "3 entries" in says(["a", "b", "c"], ["a", "b"])


def test_records_alone_have_no_reference() -> None:
    runs = RecordedRuns(SOURCE, 1, 0, {SPEC: recorded(1)})
    with pytest.raises(MissingRunError):
        expect_like_reference(runs, SPEC, "it")
