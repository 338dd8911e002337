"""Check of task 1.10 C2, `worker_seed`: what the data workers of all ranks draw."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.plans import disturb, in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

# Ranks, data workers of each, epochs. The small ones are made again, and with other
# seeds; each of the large ones goes far in one direction, as long runs do.
SMALL = ((2, 2, 3), (1, 2, 3), (3, 3, 3), (4, 1, 3))
LARGE = ((8, 4, 12), (2, 40, 3), (2, 2, 200), (11, 12, 12), (128, 12, 2))
SHIFTS = (1, 2, 4, 8, 16, 64, 256, 1024, 1237)  # to other seeds
KEPT = 1 << 32  # torch and numpy keep a seed modulo this

Place = tuple[int, int, int]
"""Epoch, rank, worker."""
Seeds = dict[Place, int]


def work_out_seeds(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """The seed of each data worker of each rank, in small settings and large ones."""
    place = context.rank
    cases: list[dict[str, Any]] = []
    for *size, own in (*((*size, seed) for size in SMALL), (3, 2, 3, 0)):
        others = {shift: _seeds(unit, size, own + shift, 0) for shift in SHIFTS}
        again = _seeds(unit, size, own, 5000)
        seeds = _seeds(unit, size, own, place)
        cases.append({"size": size, "seeds": seeds, "again": again, "others": others})
    is_usable = all(_usable(case["seeds"]) is None for case in cases)
    if place == 0 and is_usable:
        for fixed in LARGE:
            seeds = _seeds(unit, list(fixed), 5, 0)
            # The places go without saying: thousands of them take time to travel.
            cases.append({"size": fixed, "in_order": list(seeds.values())})
    return cases


def _places(size: Sequence[int]) -> Iterator[Place]:
    """All places, in the order in which their seeds are asked for."""
    n, workers, epochs = size
    for rank, epoch, worker in itertools.product(
        range(n), range(epochs), range(workers)
    ):
        yield epoch, rank, worker


def _seeds(
    unit: ModuleType, size: list[int], seed: int, place: int
) -> dict[Place, int | str]:
    n, workers, _ = size
    disturb(unit, place)
    found: dict[Place, int | str] = {}
    loaders = [
        unit.DistributedDataLoader(
            range(10), 4, rank, n, seed=seed, num_workers=workers
        )
        for rank in range(n)
    ]
    for epoch, rank, worker in _places(size):
        loader = loaders[rank]
        if worker == 0:
            loader.set_epoch(epoch)
        where = f"rank={rank}, world_size={n}, epoch={epoch}"
        with in_call(f"worker_seed({worker}), {where}"):
            given = loader.worker_seed(worker)
        found[epoch, rank, worker] = number = _as_seed(given)
        if isinstance(number, str):
            return found  # one is enough
    return found


def _as_seed(given: Any) -> int | str:
    """The seed, or what is wrong with it."""
    try:
        number = operator.index(given)
    except TypeError:
        return f"returned {given!r:.40}, expected an int"
    if isinstance(given, Tensor):
        return f"returned {given!r:.40}, expected an int"
    if not -(1 << 63) <= number < 1 << 64:
        return (
            f"returned a number of {number.bit_length()} bits, expected at most 64 "
            "bits, as torch.manual_seed takes"
        )
    return number


@clause("data_loader.loader", "C2", worlds=(2, 1), runs=[on_ranks(work_out_seeds)])
def workers_draw_their_own(runs: Runs) -> str | None:
    """No two workers' streams start alike; the same run again has the same ones."""
    run = worked_out(runs, work_out_seeds)
    cases, elsewhere = run.values[0], run.values[-1]
    for case in cases:
        if "in_order" in case:
            case["seeds"] = dict(
                zip(_places(case["size"]), case["in_order"], strict=False)
            )
        failure = _usable(case["seeds"]) or _shared(case)
        if failure:
            raise failure
    for case, again in zip(cases, elsewhere, strict=False):  # the small ones
        failure = _fixed(case, again) if "again" in case else None
        if failure:
            raise failure
    most = [max(column) for column in zip(*LARGE, strict=True)]
    return (
        f"up to {most[0]} ranks, {most[1]} data workers each, {most[2]} epochs: all "
        "draw different numbers"
    )


def _usable(seeds: dict[Place, int | str]) -> NotYetError | None:
    for found in seeds.values():
        if isinstance(found, str):
            return NotYetError(
                f"worker_seed {found}",
                rule="return a smaller number: only its lowest 32 bits are used"
                if " bits," in found
                else "return the seed as an int",
                fatal=True,
            )
    return None


def _low(seed: int) -> int:
    return seed % KEPT  # what is left of it in torch and numpy


_KINDS: tuple[Callable[[int], int], ...] = (_low, abs)  # abs: in Python's random


def _shared(case: dict[str, Any]) -> NotYetError | None:
    seeds: Seeds = case["seeds"]
    alike = [kind for kind in _KINDS if len({*map(kind, seeds.values())}) < len(seeds)]
    if not alike:
        return None
    one, other = _nearest(seeds, alike[0])
    though = "" if seeds[one] == seeds[other] else " though their seeds differ"
    rule = "the seed must depend on what differs between these two workers"
    if seeds[one] == -seeds[other] != 0:
        rule = "Python's random treats a seed and its negative alike"
    elif seeds[one] != seeds[other]:
        rule = (
            "torch's CPU generator uses only the lowest 32 bits of a seed: "
            "they must differ there"
        )
    return NotYetError(
        f"with {case['size'][0]} ranks, {_both(one, other)}{though}, expected "
        "different ones",
        slug="worker-seeds-shared",
        evidence=[
            (key[1], f"worker {key[2]}, epoch {key[0]}", text)
            for key, text in ((k, f"seed {seeds[k]}") for k in (one, other))
        ],
        rule=rule,
    )


def _nearest(seeds: Seeds, kind: Callable[[int], int]) -> tuple[Place, Place]:
    """The two that draw the same and differ in least: of one epoch, if there are."""
    alike: dict[int, list[Place]] = {}
    for key, seed in seeds.items():
        alike.setdefault(kind(seed), []).append(key)
    # Of many that are alike, the first ones tell as much as all.
    pairs = (
        pair for keys in alike.values() for pair in itertools.combinations(keys[:40], 2)
    )

    def apart(pair: tuple[Place, Place]) -> tuple[int, bool]:
        return sum(map(operator.ne, *pair)), pair[0][0] != pair[1][0]

    return min(pairs, key=apart)


def _place(epoch: int, rank: int, worker: int) -> str:
    return f"worker {worker} of rank {rank} in epoch {epoch}"


def _both(one: Place, other: Place) -> str:
    """Say that two workers, or one worker in two epochs, draw the same."""
    (epoch, rank, worker), (later, other_rank, another) = one, other
    same = "the same random numbers"
    if (rank, worker) == (other_rank, another):
        epochs = f"epochs {epoch} and {later}"
        return f"worker {worker} of rank {rank} draws {same} in {epochs}"
    if epoch != later:
        return f"{_place(*one)} and {_place(*other)} draw {same}"
    who = f"worker {worker} of rank {rank} and worker {another} of rank {other_rank}"
    if rank == other_rank:
        who = f"workers {worker} and {another} of rank {rank}"
    return f"{who} draw {same} in epoch {epoch}"


def _fixed(case: dict[str, Any], elsewhere: dict[str, Any]) -> NotYetError | None:
    seeds: Seeds = case["seeds"]
    for key, seed in seeds.items():
        if not seed == case["again"].get(key) == elsewhere["seeds"].get(key):
            return NotYetError(
                f"{_place(*key)} gets another seed when the run is repeated, "
                "expected the same",
                slug="not-reproducible",
                rule="the seed may depend only on values that a second run repeats",
            )
    for shift, others in case["others"].items():
        failure = _usable(others)
        if failure:
            return failure
        for key, seed in seeds.items():
            if _low(seed) == _low(others[key]):
                return _same_in_another_run(key, shift, seed == others[key])
    return None


def _same_in_another_run(key: Place, shift: int, is_equal: bool) -> NotYetError:
    rule = (
        "torch's CPU generator uses only the lowest 32 bits of a seed: "
        "self.seed must change them"
    )
    return NotYetError(
        f"{_place(*key)} draws the same random numbers in a run whose seed is {shift} "
        "larger, expected different ones",
        rule="the worker's seed must depend on self.seed" if is_equal else rule,
    )
