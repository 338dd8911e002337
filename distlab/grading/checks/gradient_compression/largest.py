"""Checks of task 4.10, `gradient_compression.top_k`: C1, which elements are sent."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY

TASK = "gradient_compression.top_k"
CASES = ((40, 0.1), (3, 0.1), (30, 0.01), (7, 0.5), (5, 1.0), (1, 0.3))
"""Number of elements, and ratio."""
TIED = (
    ([2.0, -2.0, 1.0, 2.0, -2.0, 0.5, 2.0, 1.0], 0.4),  # five of the magnitude 2, k = 3
    ([1.0, -1.0, 1.0, -1.0, 3.0], 0.4),  # four of the k-th magnitude, k = 2
    ([0.0] * 7, 0.3),  # k = 2
    ([1e-8, -3e-8, 2e-8, 1e-8], 0.5),
    ([1e8, -3e8, 2e8, 1e8], 0.5),
    ([1.0, -3.0, torch.nan, 2.0], 0.5),
    ([torch.inf, 1.0, -torch.inf, 2.0, torch.inf], 0.4),  # three infinities, k = 2
)
"""Values with ties, far from 1, or with a nan; and ratio."""
HALF = (
    ([-1.5e-4, 1.1e-4, -1.6e-4, 1e-4, 1.2e-4], 0.4),
    ([-350.0, 310.0, -400.0, 300.0, -380.0], 0.4),
)
"""Values and ratio in float16, in which their squares are 0 and inf."""


def case(seed: int, number: int) -> tuple[Tensor, float, int]:
    """Values, most of the large ones negative; the ratio, and k."""
    if number >= len(CASES):
        place = number - len(CASES)
        numbers, ratio = (*TIED, *HALF)[place]
        dtype = torch.float16 if place >= len(TIED) else torch.float32
        values = torch.tensor(numbers, dtype=dtype)
        return values, ratio, max(1, int(ratio * len(numbers)))
    size, ratio = CASES[number]
    generator = torch.Generator().manual_seed(seed * 31 + number)
    order = torch.randperm(size, generator=generator)
    values = (1.0 + order) * torch.where(order % 3 == 0, 1.0, -1.0)
    return values, ratio, max(1, int(ratio * size))


def select(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What `largest` returns for each case."""
    told: list[Any] = []
    for number in range(len(CASES) + len(TIED) + len(HALF)):
        values, ratio, _ = case(seed, number)
        with in_call(f"largest with {len(values)} elements and ratio {ratio}"):
            found = unit.largest(values.to(context.comm.device), ratio)
        if isinstance(found, Tensor):
            found = [str(found.dtype)[6:], list(found.shape), found.flatten().tolist()]
        told.append(found)
    return told


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(select)])
def largest_magnitudes(runs: Runs) -> str | None:
    """The set of indices; their number, dtype and shape."""
    told = runs.finished(select).values[0]
    for number, found in enumerate(told):
        values, ratio, k = case(runs.seed, number)
        _expect_indices(found, values, ratio, k)
    return f"{len(told)} tensors, some with ties"


def _expect_indices(found: Any, values: Tensor, ratio: float, k: int) -> None:
    num = len(values)
    half = "float16 " * (values.dtype == torch.float16)
    what = f"for {num} {half}element{'s' * (num != 1)} and ratio {ratio}, `largest`"
    if not isinstance(found, list):
        raise NotYetError(f"{what} returned {found!r:.50}, expected a tensor")
    dtype, shape, indices = found
    if shape != [k]:
        is_none = shape == [0] and int(ratio * num) == 0
        got = f"returned a tensor of shape {shape}, expected [{k}]"
        if len(shape) == 1:
            least = "at least 1" if k > int(ratio * num) else f"int({ratio} · {num})"
            s = "s" * (shape[0] != 1)
            got = f"chose {shape[0]} element{s}, expected {least}"
            got += f" = {k}" * (k == int(ratio * num))
        slug = "nothing-sent" if is_none else ""
        raise NotYetError(
            f"{what} {got}",
            slug=slug,
            rule="k = max(1, int(ratio * elements))" if slug else "",
        )
    wanted = sorted(values.abs().topk(k).indices.tolist())
    if not _is_largest(indices, values, k):
        guesses = {
            "signed-order": values.topk(k).indices.tolist(),
            "smallest-sent": values.abs().topk(k, largest=False).indices.tolist(),
        }
        fits = [slug for slug, g in guesses.items() if sorted(g) == sorted(indices)]
        shown = (("returned", sorted(indices)), ("expected", wanted))
        has_nan = bool(values.isnan().any())
        slug = fits[0] if len(fits) == 1 else ""
        chose = {
            "signed-order": "chose the largest values",
            "smallest-sent": "chose the smallest magnitudes",
        }.get(slug, "chose other elements")
        if len({*indices}) < len(indices):
            chose = "chose an element twice"
        nan = "; a nan counts as the largest" * has_nan
        raise NotYetError(
            f"{what} {chose}, expected the {k} largest magnitudes{nan}",
            slug=slug,
            rule="compare abs(): float16 has no room for their squares" * bool(half),
            evidence=[(NOBODY, name, _values(values, at)) for name, at in shown],
        )
    if dtype != "int32":
        is_wide = dtype == "int64"
        raise NotYetError(
            f"{what} returned {dtype} indices, expected int32",
            slug="wide-indices" if is_wide else "",
            rule="indices.to(torch.int32)" if is_wide else "",
        )


def _is_largest(indices: list[int], values: Tensor, k: int) -> bool:
    """Whether these are k elements, and no other one is larger."""
    is_there = all(0 <= i < len(values) for i in indices)
    if not is_there or len({*indices}) != k:
        return False
    sizes = values.abs().nan_to_num(torch.inf, torch.inf)
    found = sizes[torch.tensor(indices, dtype=torch.int64)]
    return torch.equal(found.sort().values, sizes.topk(k).values.sort().values)


def _values(values: Tensor, indices: list[int]) -> str:
    pairs = [
        f"{values[i]:g} at {i}" if 0 <= i < len(values) else f"nothing at {i}"
        for i in indices[:5]
    ]
    return ", ".join(pairs) + (" …" if len(indices) > 5 else "")
