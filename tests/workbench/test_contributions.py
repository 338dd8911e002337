"""What a wrong sum is made of, told from the ranks' parts."""

import pytest
import torch
from torch import Tensor

from distlab.grading.kit.contributions import what_is_missing
from distlab.grading.kit.values import expect_values, same_everywhere
from distlab.grading.verdict import NotYetError
from tests.workbench.naming import named

PARTS = list(torch.randn(4, 12, generator=torch.Generator().manual_seed(3)).double())
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def _sum(*counts: float, weights: Tensor = WEIGHTS) -> Tensor:
    return torch.stack(PARTS).T @ (weights * torch.tensor(counts).double())


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 1, 0, 1), {"lacks", "2"}),
        ((0, 0, 1, 1), {"lacks", "0–1"}),
        ((1, 2, 1, 1), {"counts", "1", "twice"}),
        ((3, 1, 0, 1), {"lacks", "2", "counts", "0", "3"}),
    ],
)
def test_a_part_is_missing_or_counted_again(
    counts: tuple[float, ...], said: set[str]
) -> None:
    found = what_is_missing(_sum(*counts), _sum(1, 1, 1, 1), PARTS)
    assert found
    assert said <= {*found.split()}


@pytest.mark.parametrize(
    "actual",
    [
        _sum(1, 1, 1, 1),  # right
        _sum(1, 1, 0.5, 1),
        _sum(1, -1, 1, 1),
        torch.ones(12).double(),  # of other numbers
        torch.ones(3).double(),
        None,
    ],
)
def test_anything_else_is_not_named(actual: Tensor | None) -> None:
    assert what_is_missing(actual, _sum(1, 1, 1, 1), PARTS) is None


def test_few_elements_or_equal_parts_tell_nothing() -> None:
    short = [part[:4] for part in PARTS]
    assert what_is_missing(short[0], torch.stack(short).sum(0), short) is None
    same = [PARTS[0]] * 2
    assert what_is_missing(PARTS[0], 2 * PARTS[0], same) is None


def test_the_verdict_says_whose_part_is_missing() -> None:
    total = _sum(1, 1, 1, 1)
    with pytest.raises(NotYetError) as raised:
        expect_values(
            [total, total, _sum(0, 1, 1, 1), PARTS[3]],
            same_everywhere(total, 4),
            what="the sum",
            parts=PARTS,
        )
    assert named(raised.value.message, "lacks", "rank 0")
