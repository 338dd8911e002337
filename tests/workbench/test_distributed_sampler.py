"""`distlab.distributed.DistributedSampler`: where its loops begin, and its seeds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distlab.distributed as dist


def test_the_sampler_continues_in_mid_epoch() -> None:
    numbers = TensorDataset(torch.arange(23))

    def make() -> dist.DistributedSampler:
        return dist.DistributedSampler(numbers, num_replicas=2, rank=1, seed=5)

    def batches(sampler: dist.DistributedSampler) -> Iterator[list[int]]:
        for (batch,) in DataLoader(numbers, batch_size=3, sampler=sampler):
            yield batch.tolist()

    sampler = make()
    sampler.set_epoch(4)
    every = list(batches(sampler))
    assert sum(map(len, every)) == len(sampler) == 12
    assert list(batches(sampler)) == every  # another pass over the same epoch
    half = batches(sampler)
    first = [next(half), next(half)]
    other = make()
    other.load_state_dict(sampler.state_dict())
    assert first + list(batches(other)) == every
    other.set_epoch(5)
    assert list(batches(other)) != every
    wrong = dist.DistributedSampler(dataset_size=24, num_replicas=2, rank=1, seed=5)
    with pytest.raises(ValueError, match=r"num_samples\b.* 24\b.* 23\b"):
        wrong.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="dataset"):
        dist.DistributedSampler(num_replicas=1, rank=0)
    with pytest.raises(ValueError, match=r"\bepoch\b.*\bseed\b|\bseed\b.*\bepoch\b"):
        wrong.load_state_dict({"num_samples": 24})


Sampled = tuple[dist.DistributedSampler, DataLoader[Any]]


def sampled(num_workers: int, **more: Any) -> Sampled:
    """A sampler of 10 samples in order, and a loader of 5 batches of 2 from it."""
    sampler = dist.DistributedSampler(
        dataset_size=20, num_replicas=2, rank=0, shuffle=False
    )
    data = torch.arange(20)
    return sampler, DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=2,
        sampler=sampler,
        num_workers=num_workers,
        **more,
    )


def resumed(state: dict[str, Any], num_workers: int) -> Sampled:
    sampler, loader = sampled(num_workers)
    sampler.load_state_dict(json.loads(json.dumps(state)))
    return sampler, loader


def firsts(batches: Iterable[Any]) -> list[int]:
    return [int(batch[0]) for batch in batches]


EVERY = [0, 4, 8, 12, 16]  # the first sample of each batch


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])  # two draw four batches ahead
def test_only_a_loop_that_ends_moves_where_the_next_begins(num_workers: int) -> None:
    sampler, loader = sampled(num_workers)
    looked = iter(loader)
    next(looked)  # and it stays open, as in many a tutorial
    sampler.set_epoch(0)
    assert firsts(loader) == firsts(loader) == EVERY
    assert firsts(islice(loader, 3)) == EVERY[:3]
    state = sampler.state_dict()  # after a loop that ended early
    assert (state["epoch"], state["num_yielded"]) == (0, 6)
    assert firsts(loader) == EVERY

    other, rest = resumed(state, num_workers)
    next(iter(rest))
    other.set_epoch(0)
    next(iter(rest))
    assert firsts(rest) == EVERY[3:]
    assert firsts(rest) == EVERY  # without set_epoch: the same epoch once more
    other.load_state_dict(state)
    other.set_epoch(1)
    assert firsts(rest) == EVERY


def test_a_copy_has_the_position_and_follows_no_loop() -> None:
    sampler, loader = sampled(0)
    batches = iter(loader)
    next(batches)
    for copy in (deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert copy.state_dict() == sampler.state_dict()
        assert [*copy] == [*range(0, 20, 2)]
    assert firsts(batches) == EVERY[1:]
    state = sampler.state_dict()
    assert state["is_over"]
    assert deepcopy(sampler).state_dict() == state

    other, rest = resumed({**state, "is_over": False, "num_yielded": 6}, 0)
    copied = deepcopy(rest)  # the sampler too
    assert firsts(copied) == firsts(rest) == EVERY[3:]
    assert firsts(copied) == EVERY
    assert other.state_dict() == {**state, "is_over": True}


@pytest.mark.parametrize(
    "wrong", [{"num_yielded": -1}, {"num_yielded": 999}, {"epoch": "1"}, {"epoch": -1}]
)
def test_a_position_outside_the_epoch_is_refused(wrong: dict[str, Any]) -> None:
    sampler, loader = sampled(0)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sampler.load_state_dict({**before, "epoch": 2, **wrong})
    assert sampler.state_dict() == before
    assert firsts(loader) == EVERY


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_look_within_a_loop_does_not_move_the_position(num_workers: int) -> None:
    sampler, loader = sampled(num_workers)
    states = []
    for _ in loader:
        next(iter(loader))
        states.append(sampler.state_dict()["num_yielded"])
    assert states == [2, 4, 6, 8, 10]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("num_workers", "more"), [(0, {}), (2, {}), (2, {"persistent_workers": True})]
)
def test_a_state_at_an_epochs_end_repeats_neither_samples_nor_the_end(
    num_workers: int, more: dict[str, Any]
) -> None:
    sampler, loader = sampled(num_workers, **more)
    sampler.set_epoch(3)
    for _ in loader:
        within = sampler.state_dict()  # at last in the loop's body, with the last batch
    after = sampler.state_dict()
    ended = []
    for state in (within, after):
        other, rest = resumed(state, num_workers)
        for epoch in range(other.epoch, 5):
            other.set_epoch(epoch)
            ended.append((epoch, firsts(rest)))
    assert ended == [(3, []), (4, EVERY), (4, EVERY)]
    other, rest = resumed(after, num_workers)
    other.set_epoch(3)  # a script that counts epochs itself, and is still in this one
    assert firsts(rest) == []
    other, rest = resumed(after, num_workers)
    assert firsts(rest) == EVERY  # without set_epoch, what comes without the stop
    assert other.epoch == 4


def test_with_drop_last_a_loop_ends_without_the_rest() -> None:
    sampler = dist.DistributedSampler(
        dataset_size=11, num_replicas=1, rank=0, shuffle=False
    )
    loader: DataLoader[Any] = DataLoader(
        torch.arange(11),  # type: ignore[arg-type]
        batch_size=3,
        sampler=sampler,
        drop_last=True,
    )
    next(iter(loader))
    sampler.load_state_dict(sampler.state_dict())
    assert [firsts(loader) for _ in range(2)] == [[3, 6], [0, 3, 6]]
    assert sampler.state_dict()["is_over"]


@pytest.mark.parametrize(
    "seed", [2**32, 2**63, 2**200, -1, -(2**63), np.int64(7), np.uint64(2**63 + 5)]
)
def test_any_integer_is_a_seed(seed: Any) -> None:
    def make(seed: Any) -> dist.DistributedSampler:
        return dist.DistributedSampler(
            dataset_size=40, num_replicas=1, rank=0, seed=seed
        )

    order = list(make(seed))
    assert sorted(order) == [*range(40)]
    assert order == list(make(int(seed)))
    assert order != list(make(int(seed) + 2**32)) != list(make(int(seed) + 1))
    state = json.loads(json.dumps(make(seed).state_dict()))
    make(int(seed)).load_state_dict(state)


@pytest.mark.parametrize("seed", [1.0, None, "1"])
def test_nothing_else_is_a_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed.*{seed!r}"):
        dist.DistributedSampler(dataset_size=4, num_replicas=1, rank=0, seed=seed)


def test_a_data_set_needs_a_length() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(ValueError, match="Endless"):
        dist.DistributedSampler(Endless(), num_replicas=1, rank=0)
