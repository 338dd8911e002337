"""The loader with real data workers, at the ends of an epoch, and whose mistake it is.

In the grader data workers cannot be started: they hand tensors over through sockets,
which code under judgement may not open. So their random numbers are tried here.
"""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from distlab.curriculum.units import load
from distlab.grading.catalogue import Entry
from distlab.runner import Cluster
from tests.workbench.judging import catalogue, solution_of, verdict_on

Row = tuple[Tensor, Tensor]


class Drawn(Dataset[Row]):
    """Sample k is (k, three random numbers: torch's, Python's and numpy's)."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, place: int) -> Row:
        drawn = [torch.rand(()).item(), random.random(), np.random.random()]
        return torch.tensor(place), torch.tensor(drawn, dtype=torch.float64)


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("data_loader", "reference")


@pytest.fixture(scope="module")
def wrong_ones() -> dict[str, Entry]:
    return catalogue()


def delivered(loader: Any) -> list[list[int]]:
    return [numbers.tolist() for numbers, _ in loader]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_no_two_data_workers_draw_the_same_and_a_second_run_does(
    unit: ModuleType,
) -> None:
    def draws() -> list[Tensor]:
        found = []
        for rank in range(2):
            torch.manual_seed(0)  # alike on all ranks, as for equal models
            loader = unit.DistributedDataLoader(Drawn(8), 4, rank, 2, num_workers=2)
            for epoch in range(2):
                loader.set_epoch(epoch)
                found += [drawn for _, drawn in loader]
        return found

    first, second = torch.cat(draws()), torch.cat(draws())
    assert first.shape == (16, 3)
    assert torch.equal(first, second)
    for of_one_library in first.T.tolist():
        assert len(set(of_one_library)) == 16


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_position_is_what_was_handed_out_not_what_workers_read_ahead(
    unit: ModuleType,
) -> None:
    loader = unit.DistributedDataLoader(Drawn(24), 4, 0, 1, num_workers=2)
    whole = loader.batches()
    numbers, _ = next(iter(loader))
    state = loader.state_dict()
    assert numbers.tolist() == whole[0]
    assert state["num_delivered"] == 1
    later = unit.DistributedDataLoader(Drawn(24), 4, 0, 1)
    later.load_state_dict(state)
    assert delivered(later) == whole[1:]


def test_a_batch_without_samples_has_the_shapes_of_the_others(
    unit: ModuleType,
) -> None:
    batches = [
        list(unit.DistributedDataLoader(Drawn(5), 4, rank, 3)) for rank in range(3)
    ]
    assert [len(of_rank) for of_rank in batches] == [2, 2, 2]
    numbers, drawn = batches[2][1]
    assert numbers.shape == (0,)
    assert drawn.shape == (0, 3)
    assert (numbers.dtype, drawn.dtype) == (torch.int64, torch.float64)


class Alone(Dataset[Tensor]):
    """An item is a tensor, not a tuple."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Tensor:
        return torch.full((2,), place)


def test_an_item_may_be_a_tensor_alone(unit: ModuleType) -> None:
    batches = [list(unit.DistributedDataLoader(Alone(), 4, rank, 3)) for rank in (0, 2)]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[1, 1]] * 2
    assert [[*batch[0].shape] for batch in batches[0]] == [[2, 2], [1, 2]]
    assert [[*batch[0].shape] for batch in batches[1]] == [[1, 2], [0, 2]]


@pytest.mark.parametrize("seed", [0, 7, 2**31])
def test_torch_keeps_the_lowest_32_bits_of_a_seed(seed: int) -> None:
    def drawn(seed: int) -> Tensor:
        return torch.rand(4, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(seed), drawn(seed + 2**32))
    assert not torch.equal(drawn(seed), drawn(seed + 2**31))


def test_a_refused_state_changes_nothing(unit: ModuleType) -> None:
    other = unit.DistributedDataLoader(Drawn(10), 4, 0, 2, seed=1)
    other.set_epoch(2)
    next(iter(other))
    loader = unit.DistributedDataLoader(Drawn(10), 4, 0, 2)
    before = dict(vars(loader))
    with pytest.raises(ValueError, match=r"\bseed\b.* 0\b.* 1\b"):
        loader.load_state_dict(other.state_dict())
    assert vars(loader) == before


def test_an_epoch_that_is_over_begins_anew_here_and_is_over_elsewhere(
    unit: ModuleType,
) -> None:
    loader = unit.DistributedDataLoader(Drawn(10), 4, 0, 2)
    loader.set_epoch(3)
    whole = delivered(loader)
    state = loader.state_dict()
    assert delivered(loader) == whole
    fresh = unit.DistributedDataLoader(Drawn(10), 4, 0, 2)
    fresh.load_state_dict(state)
    assert delivered(fresh) == []
    assert delivered(fresh) == whole
    fresh.set_epoch(4)
    assert len(delivered(fresh)) == len(fresh)
    fresh.load_state_dict(state)
    assert delivered(fresh) == []


def test_a_state_of_mid_epoch_fits_a_loader_that_was_at_its_end(
    unit: ModuleType,
) -> None:
    loader = unit.DistributedDataLoader(Drawn(10), 4, 0, 2)
    state = {**loader.state_dict(), "num_delivered": 2}
    whole = delivered(loader)
    loader.load_state_dict(state)
    assert delivered(loader) == whole[2:]


def test_only_a_loop_that_ends_moves_where_the_next_begins(unit: ModuleType) -> None:
    loader = unit.DistributedDataLoader(Drawn(20), 4, 0, 2)
    whole = delivered(loader)
    looked = iter(loader)
    next(looked)  # and it stays open
    loader.set_epoch(0)
    counts = []
    for _ in loader:
        next(iter(loader))  # a look at a batch in the middle of the training
        counts.append(loader.state_dict()["num_delivered"])
    assert counts == [1, 2, 3, 4, 5]
    for _ in islice(loader, 3):
        pass
    state = loader.state_dict()
    assert state["num_delivered"] == 3
    assert delivered(loader) == whole
    fresh = unit.DistributedDataLoader(Drawn(20), 4, 0, 2)
    fresh.load_state_dict(state)
    next(iter(fresh))
    fresh.set_epoch(0)
    next(iter(fresh))
    assert delivered(fresh) == whole[3:]
    assert delivered(fresh) == whole
    fresh.load_state_dict(state)
    fresh.set_epoch(1)
    assert len(delivered(fresh)) == 5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_resumed_epoch_has_the_random_numbers_of_an_unbroken_one(
    unit: ModuleType,
) -> None:
    def make() -> Any:
        loader = unit.DistributedDataLoader(Drawn(20), 4, 1, 2, seed=3, num_workers=2)
        loader.set_epoch(2)
        return loader

    torch.manual_seed(1)
    whole = [drawn for _, drawn in make()]
    torch.manual_seed(2)
    stopped = make()
    for _ in islice(stopped, 3):
        pass
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    rest = [drawn for _, drawn in resumed]
    assert all(map(torch.equal, rest, whole[3:]))
    assert len(rest) == 2
    assert len(set(torch.cat(whole).flatten().tolist())) == 10 * 3


@pytest.mark.parametrize("seed", [2**63, -5, np.int64(7), np.uint64(2**64 - 1)])
def test_any_integer_is_a_seed(unit: ModuleType, seed: Any) -> None:
    loader = unit.DistributedDataLoader(Drawn(40), 40, 0, 1, seed=seed, num_workers=1)
    same = unit.DistributedDataLoader(Drawn(40), 40, 0, 1, seed=int(seed))
    other = unit.DistributedDataLoader(Drawn(40), 40, 0, 1, seed=int(seed) + 2**32)
    assert loader.batches() == same.batches() != other.batches()
    torch.manual_seed(loader.worker_seed(0))
    same.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    with pytest.raises(ValueError, match="seed"):
        unit.DistributedDataLoader(Drawn(4), 4, 0, 1, seed=0.5)


class AtOnce(Drawn):
    """Reads the samples of a batch together, as some data sets do."""

    def __getitem__(self, place: int) -> Row:
        raise AssertionError("one by one")

    def __getitems__(self, places: list[int]) -> list[Row]:
        return [super(AtOnce, self).__getitem__(place) for place in places]


def test_a_data_set_may_read_a_batch_at_once(unit: ModuleType) -> None:
    loader = unit.DistributedDataLoader(AtOnce(8), 4, 0, 1, shuffle=False)
    assert delivered(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "task", "guilty"),
    [
        ("DL02", "sampler", "shard_indices"),
        ("DL40", "loader", "sampler"),
        ("DL55", "loader", "sampler"),
        ("DL53", "loader", "sampler"),
        ("DL40", "resume", "sampler"),
        ("DL76", "resume", "loader"),
    ],
)
def test_the_mistake_of_another_task_is_laid_at_its_door(
    wrong: str,
    task: str,
    guilty: str,
    tmp_path: Path,
    cluster: Cluster,
    wrong_ones: dict[str, Entry],
) -> None:
    text = wrong_ones[wrong].applied_to(solution_of("data_loader"))
    verdict = verdict_on(cluster, tmp_path, f"data_loader.{task}", text, worlds=(1,))
    failure = verdict.first_failure()
    assert failure is not None
    assert f" {guilty};" in failure.rule
