"""The batches of all ranks, and of one process: for task 1.10."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.kit.plans import disturb, in_call, numbers
from distlab.runner import RankContext

# Samples and global batch size; then ranks. The first tell most and fit a table.
SAMPLES = ((10, 4), (24, 8), (37, 8), (10, 3), (5, 8), (41, 16), (20, 7))
RANKS = (2, 3, 4, 7, 8)
EPOCHS = 2

CHANGES = "gives other batches in a second call, expected the same"

Batches = list[list[int]]
"""One rank's: for each step the numbers of its samples."""


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample k is (k, k / 2), so that a batch tells what it was made of."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(place), torch.tensor(place / 2)


def work_out_batches(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """The batches of one process, and those of all ranks."""
    if context.rank:
        return []
    cases = []
    settings = [
        (num_samples, size, epoch, True)
        for num_samples, size in (*SAMPLES, (20 + seed % 17, 6))
        for epoch in range(EPOCHS)
    ]
    for num_samples, size, epoch, shuffle in (*settings, (10, 4, 1, False)):
        plans = {
            n: [
                _batches(unit, shuffle, num_samples, size, r, n, seed, epoch)
                for r in range(n)
            ]
            for n in (1, *RANKS)
        }
        case = {"samples": num_samples, "size": size, "plans": plans}
        cases.append({**case, "shuffle": shuffle})
    return cases


def _batches(
    unit: ModuleType, shuffle: bool, num_samples: int, size: int, *where: int
) -> Batches | str:
    rank, n, seed, epoch = where
    disturb(unit, rank + 50 * epoch)
    data = Numbered(num_samples)
    loader = unit.DistributedDataLoader(data, size, rank, n, shuffle=shuffle, seed=seed)
    loader.set_epoch(epoch)
    which = f"{num_samples} samples, global_batch_size={size}, rank={rank}"
    with in_call(f"batches(): {which}, world_size={n}, epoch={epoch}"):
        batches = loader.batches()
    if batches is None:
        return "gives None, expected a list of batches"
    if not isinstance(batches, list | tuple):
        return f"gives a {type(batches).__name__}, expected a list of lists"
    found = []
    for batch in batches:
        plain = numbers(batch, 4 * num_samples + 64)
        if isinstance(plain, str):
            return f"has a batch that {plain.replace('gives', 'is', 1)}"
        found.append(plain)
    disturb(unit, rank + 5000)
    if loader.batches() != batches:
        return CHANGES
    return found
