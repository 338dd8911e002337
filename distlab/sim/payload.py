"""Choose what a simulated program sends: real tensors, countable shares, or only sizes.

real      tensors as they are
symbolic  every tensor among the arguments becomes one of integers, in which
          rank r puts 1 << (4 r). After a sum each hexadecimal digit says how often
          that rank's share has arrived:  0x1121 → rank 1 came in twice
size      every tensor among the arguments becomes `Sized`: bytes without content,
          for the kernel itself and for schedules that never look at their data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Payload = Literal["real", "symbolic", "size"]
PAYLOADS = ("real", "symbolic", "size")
MAX_DIGITS = 15  # ranks that a 64-bit number with a sign has a digit for
_DIGIT_BITS = 4


class Sized:
    """A number of bytes without content."""

    __slots__ = ("nbytes",)

    def __init__(self, num_bytes: int) -> None:
        self.nbytes = num_bytes

    def chunk(self, chunks: int) -> tuple[Sized, ...]:
        """Return this many parts, whose sizes differ by at most one byte."""
        size, larger = divmod(self.nbytes, chunks)
        # Two objects do: 1,024 ranks that cut into 1,024 would make a million.
        return (Sized(size + 1),) * larger + (Sized(size),) * (chunks - larger)

    def __iadd__(self, other: Sized) -> Sized:
        return self

    def __repr__(self) -> str:
        return f"Sized({self.nbytes})"


def share(rank: int, world_size: int, shape: Sequence[int]) -> Tensor:
    """Return `rank`'s part of a symbolic sum, with the same number in each element.

    With more than 15 ranks, there aren't enough digits. Each rank then uses a random
    number that depends only on the rank. Sums wrap around, but still only the right one
    matches.
    """
    return torch.full(tuple(shape), _number(rank, world_size), dtype=torch.int64)


def contributions(tensor: Tensor, world_size: int) -> list[int]:
    """Count each rank's share in a symbolic tensor whose elements are all equal.

    Raises:
        ValueError: the elements differ, or there are more than 15 ranks.
    """
    if world_size > MAX_DIGITS:
        raise ValueError(
            f"{world_size} ranks: shares can be counted for up to {MAX_DIGITS}; "
            "compare with complete_sum"
        )
    numbers = tensor.unique().tolist()
    if len(numbers) > 1:
        raise ValueError("the elements differ: look at one chunk at a time")
    number = numbers[0] if numbers else 0
    return [number >> _DIGIT_BITS * rank & 15 for rank in range(world_size)]


def complete_sum(world_size: int) -> int:
    """Return the value of a symbolic tensor that has every rank's share once."""
    total = sum(_number(rank, world_size) for rank in range(world_size))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def for_rank(args: Any, payload: Payload, rank: int, world_size: int) -> Any:
    """Return the arguments with every tensor replaced as `payload` says."""
    if payload == "real":
        return args
    if isinstance(args, Tensor):
        if payload == "size":
            return Sized(args.nbytes)
        return share(rank, world_size, args.shape)
    if isinstance(args, (list, tuple)):
        return type(args)(for_rank(arg, payload, rank, world_size) for arg in args)
    if isinstance(args, dict):
        return {k: for_rank(v, payload, rank, world_size) for k, v in args.items()}
    return args


def _number(rank: int, world_size: int) -> int:
    if world_size <= MAX_DIGITS:
        return 1 << _DIGIT_BITS * rank
    import random

    return random.Random(rank).getrandbits(62) | 1
