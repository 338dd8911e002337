"""What the samplers of all ranks give, epoch by epoch: for task 1.9."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch

from distlab.grading.kit.plans import disturb, in_call, taken
from distlab.runner import RankContext

# Number of samples and ranks; with shuffling, with dropping as well, and with neither.
SHUFFLED = ((40, 1), (24, 4), (10, 4), (37, 3), (41, 8), (16, 2), (30, 7), (3, 8))
DROPPED = ((10, 4), (37, 3), (41, 8), (3, 8))
ORDERED = ((10, 4), (24, 4), (37, 3), (40, 1))
EPOCHS = 3
FAR = ((0, 0), (0, 128), (0, 256), (0, 2**16), (512, 0), (2**17, 0))
"""What is added to the seed, and the epoch: no two sums are equal, as both may be added
up."""

Case = dict[str, Any]


def work_out_orders(context: RankContext, unit: ModuleType, seed: int) -> list[Case]:
    """What the samplers of all ranks give, and what they do to random numbers."""
    if context.rank:
        return []
    plans = (
        (False, False, seed, ORDERED),
        (False, True, seed, DROPPED[:2]),
        (True, False, seed, (*SHUFFLED, (20 + seed % 17, 4))),
        (True, False, 0, ((24, 4),)),  # the default, and the seed that factors lose
        (True, True, seed, DROPPED),
    )
    return [
        _work_out(unit, num_samples, n, own, shuffle, drop_last)
        for shuffle, drop_last, own, settings in plans
        for num_samples, n in settings
    ]


def _work_out(
    unit: ModuleType, num_samples: int, n: int, seed: int, shuffle: bool, drop: bool
) -> Case:
    def made(rank: int, seed: int, place: int = 0) -> Any:
        disturb(unit, rank + place)
        return unit.DistributedSampler(
            num_samples, rank, n, shuffle=shuffle, seed=seed, drop_last=drop
        )

    samplers = [made(rank, seed) for rank in range(n)]
    lengths, changed, moved_to, orders = [], "", None, []
    for epoch in range(EPOCHS):
        order = []
        for rank, sampler in enumerate(samplers):
            disturb(unit, rank + 100 * epoch)
            if epoch:
                sampler.set_epoch(epoch)
            which = f"rank={rank}, world_size={n}, shuffle={shuffle}, drop_last={drop}"
            with in_call(f"DistributedSampler({num_samples}, {which}), epoch {epoch}"):
                length = sampler.__len__()
                plan, touched = _iterated(sampler, 4 * num_samples + 64)
            lengths.append(length if isinstance(length, int) else repr(length)[:40])
            order.append(plan)
            changed = changed or touched
            if sampler.epoch != epoch and moved_to is None:
                moved_to = f"{sampler.epoch!r:.20}"
        orders.append(order)
    twice = [_twice(made(rank, seed, 5000)) for rank in range(n)]
    others = [
        [_only(made(rank, seed + 1237), epoch) for rank in range(n)]
        for epoch in range(EPOCHS)
    ]
    return {
        "num_samples": num_samples,
        "seed": seed,
        "shuffle": shuffle,
        "drop_last": drop,
        "orders": orders,
        "lengths": lengths,
        "changed": changed,
        "moved_to": moved_to,  # self.epoch after epoch 0, if iterating changed it
        "fresh": [first for first, _ in twice],
        "again": [second for _, second in twice],
        "far": [
            (shift, epoch, _only(made(0, seed + shift), epoch))
            for shift, epoch in (FAR if shuffle and num_samples == n * 40 else ())
        ],
        "others": others,  # with another seed, epoch by epoch
        "straight": [_only(made(rank, seed, 7000), EPOCHS - 1) for rank in range(n)],
    }


def _twice(sampler: Any) -> tuple[list[int] | str, list[int] | str]:
    """What a new sampler gives, and what it gives when it is iterated once more."""
    return _iterated(sampler, 999)[0], _iterated(sampler, 999)[0]


def _only(sampler: Any, epoch: int) -> list[int] | str:
    """What a new sampler gives in `epoch`, without the epochs before."""
    if epoch:
        sampler.set_epoch(epoch)
    return _iterated(sampler, 999)[0]


def _iterated(sampler: Any, limit: int) -> tuple[list[int] | str, str]:
    """The numbers that a sampler gives, and whose random numbers it changed."""
    before = _random_states()
    iterator = sampler.__iter__()
    if iterator is None:
        return "gives None, expected an iterator", ""
    if not hasattr(iterator, "__next__"):
        kind = type(iterator).__name__
        return f"gives a {kind}, expected an iterator: iter(…) makes one", ""
    first = next(iterator, None)
    changed = _changed(before)  # a loop's body runs now: it must find its own
    rest = taken(iterator, limit)
    head = taken([] if first is None else [first], limit)
    changed = changed or _changed(before)
    if isinstance(rest, str) or isinstance(head, str):
        return (head if isinstance(head, str) else rest), changed
    return head + rest, changed


def _random_states() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python": random.getstate(),
        "numpy": (kind, np.asarray(words).tobytes(), rest),
    }


def _changed(before: dict[str, Any]) -> str:
    now = _random_states()
    return next((name for name in now if now[name] != before[name]), "")
