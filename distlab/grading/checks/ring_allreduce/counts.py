"""Values in digits: how often each rank's tensor is in a sum, and that in few words.

Rank r's tensor is 16^r everywhere, so that a sum has one hexadecimal digit per rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.terminal import ranks_in_words

_FEWEST = -5  # a digit tells one of 16 counts: this, and the 15 after it


def digits(rank: int, length: int) -> Tensor:
    """A rank's tensor, int64."""
    return torch.full((length,), 16**rank, dtype=torch.int64)


def counted(tensor: Tensor, n: int) -> list[list[int]]:
    """Of each element, how often each of n ranks is in it; less than 0 if taken away.

    Equal neighbors are told once.
    """
    told: list[list[int]] = []
    for value in tensor.tolist():
        rest, counts = int(value), []
        for _ in range(n):
            count = (rest - _FEWEST) % 16 + _FEWEST
            counts.append(count)
            rest = (rest - count) // 16
        if not told or told[-1] != counts:
            told.append(counts)
    return told


def in_words(counts: list[int]) -> str:
    """`0+1`, `0−2`, `1 (4×)+2`: the ranks that are in it, and how often if not once."""
    words = ""
    for rank, times in enumerate(counts):
        if times:
            sign = "−" if times < 0 else "+" * bool(words)
            words += f"{sign}{rank}" + f" ({abs(times)}×)" * (abs(times) > 1)
    return words or "no rank"


def what_is_off(counts: list[int]) -> str:
    """What a sum lacks or has too often, to go on after "chunk 0"; or nothing."""
    taken_away = [rank for rank, times in enumerate(counts) if times < 0]
    missing = [rank for rank, times in enumerate(counts) if not times]
    often = [rank for rank, times in enumerate(counts) if times > 1]
    if taken_away:
        whose = ranks_in_words(taken_away)
        return f"has the values of {whose} subtracted, expected them added"
    if missing:
        return f"lacks the values of {ranks_in_words(missing)}, expected the full sum"
    if often:
        times = counts[often[0]]
        return f"contains rank {often[0]}'s values {times} times, expected once"
    return ""
