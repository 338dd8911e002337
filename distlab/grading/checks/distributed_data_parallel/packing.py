"""Checks of task 3.9, `distributed_data_parallel.buckets`: C4, pack and unpack."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.kit.values import brief
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

DTYPES = (  # of the tensors, and of flat
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
)
STALE = -77.0  # what the flat tensor holds before, and a nan


def _listed(places: list[int]) -> str:
    if len(places) == 1:
        return f"tensor {places[0]} is"
    return f"tensors {', '.join(map(str, places))} are"


def _shaped(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of several shapes: a transpose, an empty one, one of zeros, an inf."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    infinite = made(5)
    infinite[3] = torch.inf
    zeros = made(2).zero_()
    return [made(3, 2), zeros, made(), made(2, 4).t(), infinite, made(0), made(1, 1, 3)]


def carry(context: RankContext, unit: ModuleType, seed: int) -> list[dict[str, Any]]:
    """There and back, in each of DTYPES."""
    return [_carried(unit, seed, *pair) for pair in DTYPES]


def _carried(
    unit: ModuleType, seed: int, dtype: torch.dtype, wide: torch.dtype
) -> dict[str, Any]:
    """The flat tensor, and what other tensors then hold."""
    given = _shaped(seed, dtype)
    flat = torch.full((sum(map(Tensor.numel, given)),), STALE, dtype=wide)
    flat[-1] = torch.nan
    address = flat.data_ptr()
    with in_call("pack(tensors, flat)"):
        unit.pack(given, flat)
    packed = flat.clone()
    back = [torch.zeros_like(tensor) for tensor in given]
    with in_call("unpack(flat, tensors)"):
        unit.unpack(flat, back)
    kept = flat.clone()
    flat.fill_(STALE)  # the next step's gradients: those of this step stay
    return {
        "given": [tensor.contiguous() for tensor in given],
        "flat": packed,
        "moved": flat.data_ptr() != address,
        "kept": kept,
        "back": [tensor.contiguous() for tensor in back],
    }


@clause("distributed_data_parallel.buckets", "C4", worlds=(1,), runs=[on_ranks(carry)])
def what_was_packed_comes_back(runs: Runs) -> str | None:
    """In place, all numbers, and copies rather than views."""
    for (dtype, _), told in zip(DTYPES, worked_out(runs, carry).values[0], strict=True):
        _expect_carried(told, _shaped(runs.seed, dtype))
    return None


def _expect_carried(told: dict[str, Any], expected: list[Tensor]) -> None:
    flat, back = told["flat"], told["back"]
    if bool((flat[:-1] == STALE).all()) or told["moved"]:
        raise NotYetError(
            "after pack, the caller's flat tensor is unchanged, expected the tensors' "
            "values in it",
            slug="not-in-place",
            rule="write into flat: flat[…] = …, copy_, or out=flat",
        )
    numbers = torch.cat([tensor.reshape(-1) for tensor in expected]).to(flat.dtype)
    if flat.isnan().any() or not torch.equal(flat.sort()[0], numbers.sort()[0]):
        lost = Counter(numbers.tolist()) - Counter(flat.tolist())
        raise NotYetError(
            f"after pack, {lost.total()} of the tensors' {len(numbers)} elements, such "
            f"as {next(iter(lost)):.3g}, are missing from flat, expected all of them",
            rule="every element of every tensor has one position in flat",
        )
    wrong = [
        place
        for place, (tensor, was) in enumerate(zip(back, expected, strict=True))
        if not torch.equal(tensor, was)
    ]
    if not wrong:
        return
    states = [back[place] for place in wrong]
    if all(bool((state == STALE).all()) for state in states):
        raise NotYetError(
            "after unpack, the tensors are views that change with flat, "
            "expected copies",
            slug="gradient-is-a-view",
            rule="copy the values into the tensors",
        )
    if all(not state.any() for state in states):
        raise NotYetError(
            f"after unpack, {_listed(wrong)} unchanged, expected the values from flat",
            slug="not-in-place",
            rule="write into each tensor: copy_",
        )
    place = wrong[0]
    raise NotYetError(
        f"after unpack, tensor {place} of shape {list(expected[place].shape)} is "
        f"{brief(back[place])}, expected {brief(expected[place])}"
    )
