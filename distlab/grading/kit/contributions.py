"""Which ranks' parts a wrong sum or mean is made of.

Each rank's part is known, so a wrong value that is a combination of them says what
happened: one part is missing, or counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.grading.kit.flat import flat
from distlab.terminal import ranks_in_words

_ROUNDING = 1e-6  # relative


def what_is_missing(
    actual: object, expected: Tensor, parts: Sequence[Tensor]
) -> str | None:
    """Say which parts a value lacks or counts more than once; None if it's neither.

    Parts are by rank, each of the shape of `expected`. They may be weighed: the
    weights are those with which they add up to `expected`.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return None
    columns = torch.stack([flat([part.double()]) for part in parts], 1)
    got, wanted = flat([actual.double()]), flat([expected.double()])
    finite = columns.isfinite().all(1) & got.isfinite() & wanted.isfinite()
    weights = _weights(columns[finite], torch.stack([got[finite], wanted[finite]], 1))
    if weights is None:
        return None
    times = weights[:, 0] / weights[:, 1]
    counts = [round(number) for number in times.tolist()]
    if min(counts) < 0 or not torch.allclose(times, times.round(), atol=_ROUNDING):
        return None
    lacks = [rank for rank, count in enumerate(counts) if count == 0]
    more = [rank for rank, count in enumerate(counts) if count > 1]
    said = [f"lacks the contribution of {ranks_in_words(lacks)}"] if lacks else []
    if more:
        often = "twice" if counts[more[0]] == 2 else f"{counts[more[0]]} times"
        said.append(f"counts the contribution of {ranks_in_words(more[:1])} {often}")
    return " and ".join(said) or None


def _weights(columns: Tensor, sums: Tensor) -> Tensor | None:
    """With which weights the columns add up to each of `sums`, if any do."""
    if len(columns) <= columns.shape[1]:
        return None  # then nearly everything is some combination
    if int(torch.linalg.matrix_rank(columns)) < columns.shape[1]:
        return None
    weights: Tensor = torch.linalg.lstsq(columns, sums).solution
    largest = float(sums.abs().max())
    if not torch.allclose(columns @ weights, sums, rtol=0.0, atol=_ROUNDING * largest):
        return None
    return weights if bool((weights[:, 1].abs() > _ROUNDING).all()) else None
