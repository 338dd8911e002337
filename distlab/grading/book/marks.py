"""A difference in a few numbers, so that a file can hold those of a whole catalogue."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.grading.verdict import Difference

Mark = list[list[float]]
"""By rank: what is kept of its values."""

_PROJECTIONS = 4
_ROUNDING = 1e-9  # of the largest number; a sum in another order leaves less


def mark_of(difference: Difference) -> Mark:
    """The mark of what each rank left."""
    return [_kept(value) for value in difference.actual]


def are_alike(one: Mark, other: Mark, tolerance: float) -> bool:
    """Whether two marks can be of the same values, up to rounding."""
    return len(one) == len(other) and all(
        _is_close(a, b, max(tolerance, _ROUNDING))
        for a, b in zip(one, other, strict=True)
    )


def _kept(value: object) -> list[float]:
    """Number of elements, nan, inf and -inf; the largest number; sums with weights."""
    if not isinstance(value, Tensor):
        return []
    flat = value.detach().reshape(-1).double()
    counts = [flat.isnan().sum(), flat.isposinf().sum(), flat.isneginf().sum()]
    finite = flat.nan_to_num(0.0, 0.0, 0.0)
    places = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    sums = [(finite * torch.cos(places * k)).sum() for k in range(_PROJECTIONS)]
    largest = finite.abs().max() if len(flat) else torch.zeros(())
    return [float(len(flat)), *map(float, counts), float(largest), *map(float, sums)]


def _is_close(one: list[float], other: list[float], tolerance: float) -> bool:
    if one[:4] != other[:4]:
        return False
    if not one:
        return False  # no tensor: nothing that could be told apart
    room = tolerance * max(1.0, one[4]) * max(1.0, one[0]) ** 0.5
    return all(abs(a - b) <= room for a, b in zip(one[4:], other[4:], strict=True))
