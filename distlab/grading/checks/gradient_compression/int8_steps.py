"""What ranks do in 4.14, `gradient_compression.int8`: the gradients, and the steps.

Any rounding is right: an element may be off by one scale for each rank. So a mistake
must move an element by more, and the inputs are made for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distlab.grading.checks.gradient_compression.hooked import Gradients, take_steps
from distlab.runner import RankContext

SIZE, STEPS, PEAK = 40, 12, 127.0
PEAKS = (1.40625, 2.65625)
NARROW = {"bfloat16": PEAKS, "float16": (2.0**-14, 2.0**-10)}
FACTORS = (1e-11, 1e6)
NUM_SMALL = 16
"""Elements 1 … of the first bucket: the same in each step, and rounded to zero."""
RESIDUAL = slice(1, 5)
"""Elements of `falling`: what they add to, and what they are in, the residual."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@lru_cache(maxsize=32)
def gradients(seed: int, n: int) -> Gradients:
    """Bucket 0: all ranks have a large element 0. Bucket 1: one rank has; zeros first.

    The ranks' largest elements differ by factors, so that their own scales do too; in
    the first step another one is the largest on all ranks.
    """
    generator = torch.Generator().manual_seed(seed * 101 + n)

    def drawn(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    scale = PEAK / (127 // n)
    small = [(0.3 + 0.15 * drawn(NUM_SMALL)) * scale for _ in range(n)]
    found: Gradients = []
    for step in range(STEPS):
        first, second = [], []
        for rank in range(n):
            one = (2 * drawn(SIZE) - 1) * PEAK / 4
            one[0] = PEAK / (1 + 0.25 * rank)
            one[1 : 1 + NUM_SMALL] = small[rank]
            if not step:  # 127 / n levels that are not rounded down overflow here
                one[1 + NUM_SMALL] = PEAK
            first.append(one)
            is_large = rank == step % n
            other = (2 * drawn(SIZE) - 1) * (PEAK / 10 if is_large else 0.1)
            other[0] = -PEAK if is_large else 0.1  # the largest magnitude is negative
            second.append(other if step else torch.zeros_like(other))
        found.append([first, second])
    return found


@lru_cache(maxsize=32)
def falling(seed: int, n: int) -> Gradients:
    """Two steps. Bucket 0: ranks have equally large elements in different places.

    Bucket 1: elements that the first step rounds to zero, so that they are in the
    residual, are the largest ones of the second step, whose gradients are small.
    """
    scale = PEAK / (127 // n)
    found: Gradients = []
    for step in range(2):
        first, second = [], []
        for rank in range(n):
            one, other = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(2))
            one[20 + rank] = PEAK
            one[RESIDUAL] = 0.45 * n * scale  # lost if the scale is n times as large
            first.append(one)
            other[0] = 0.0 if step else PEAK
            other[RESIDUAL] = (2.0 if step else 0.4) * scale
            second.append(other)
        found.append([first, second])
    return found


LOST = {1: ((torch.inf, -1), (torch.nan, 0)), 3: ((torch.nan, -1), (torch.nan, 1))}
"""Step → by bucket: what is in one gradient of which rank; all others are zero."""


@lru_cache(maxsize=32)
def infinite(seed: int, n: int) -> Gradients:
    """Five steps; those in LOST have an inf or a nan in each bucket."""
    found: Gradients = []
    for step, of_buckets in enumerate(gradients(seed, n)[:5]):
        if step in LOST:
            of_buckets = [[torch.zeros_like(t) for t in ranks] for ranks in of_buckets]
            for of_ranks, (value, rank) in zip(of_buckets, LOST[step], strict=True):
                of_ranks[rank % n][2] = value
        found.append(of_buckets)
    return found


def narrow(seed: int, dtype: str) -> Gradients:
    """One step of 16 bits on one rank.

    In bfloat16, PEAKS / 127 is rounded down; in float16, a scale has few digits.
    """
    found: Gradients = [[]]
    for peak in NARROW[dtype]:
        generator = torch.Generator().manual_seed(seed)
        one = (2 * torch.rand(SIZE, generator=generator) - 1) * peak
        one[3] = peak
        found[0].append([one.to(getattr(torch, dtype))])
    return found


def compress_narrow(
    context: RankContext, unit: ModuleType, seed: int, dtype: str
) -> Any:
    """A step with the gradients of `narrow`."""
    return take_steps(context, unit.Int8(), narrow(seed, dtype))


@lru_cache(maxsize=32)
def scaled(seed: int, n: int) -> Gradients:
    """One step in float32: bucket 0 is far smaller, bucket 1 far larger."""
    of_ranks = gradients(seed, n)[1][1]  # one rank has the largest: no overflow
    return [[[(factor * one).float() for one in of_ranks] for factor in FACTORS]]


def compress_scaled(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A step with the gradients of `scaled`."""
    return take_steps(context, unit.Int8(), scaled(seed, context.world_size))


def compress(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Steps with the class Int8 as the hook, and where it made an integer of a nan."""
    with nan_as_integer() as places:
        told = take_steps(context, unit.Int8(), gradients(seed, context.world_size))
    return {**told, "nan_as": places}


def compress_falling(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, Any]:
    """Two steps with the gradients of `falling`."""
    return take_steps(context, unit.Int8(), falling(seed, context.world_size))


def compress_infinite(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, Any]:
    """Steps with the gradients of `infinite`."""
    return take_steps(context, unit.Int8(), infinite(seed, context.world_size))


class _Watch(TorchFunctionMode):
    """Sees each call of torch; notes a nan that becomes an element of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in _INTEGERS:
            for value in args:
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.shape == result.shape
                    and bool(value.isnan().any())
                ):
                    everywhere = bool(value.isnan().all())
                    self.found.append((str(result.dtype)[6:], everywhere))
        return result


@contextmanager
def nan_as_integer() -> Iterator[list[tuple[str, bool]]]:
    """By call: the dtype that a nan was converted to, and if all elements were nan."""
    with _Watch() as watch:
        yield watch.found


def scale_of(parts: Sequence[Tensor], levels: float) -> float:
    """Of the largest magnitude on any rank."""
    return max(float(part.abs().max()) for part in parts) / levels


def wrapped(numbers: Tensor) -> Tensor:
    """As int8 adds."""
    return (numbers + 128) % 256 - 128
