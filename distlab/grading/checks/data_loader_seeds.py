"""Check of task 1.10 C2, `worker_seed`: what the data workers of all ranks draw."""

from __future__ import annotations

import itertools
import operator
import random
from types import ModuleType
from typing import Any

import torch

from distlab.grading.bench import Bench, Implementation
from distlab.grading.checks.data_loader_plans import disturb
from distlab.grading.clause import clause
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

SETTINGS = ((2, 2), (1, 2), (3, 3), (4, 1), (8, 4), (64, 2))  # ranks, workers of each
EPOCHS = 3

Draws = dict[tuple[int, int, int], tuple[Any, ...]]
"""(epoch, rank, worker) → its seed and the first numbers that it draws."""


def work_out_seeds(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """What each data worker of each rank would draw: by torch, and by Python."""
    return [
        {
            "ranks": n,
            "workers": workers,
            "draws": _draws(unit, n, workers, own, context.rank),
            "again": _draws(unit, n, workers, own, 5000),
            "other": _draws(unit, n, workers, own + 1237, 0),
        }
        for n, workers, own in (*((*s, seed) for s in SETTINGS), (3, 2, 0))
    ]


def _draws(unit: ModuleType, n: int, workers: int, seed: int, place: int) -> Draws:
    disturb(unit, place)
    found: Draws = {}
    for rank in range(n):
        loader = unit.DistributedDataLoader(
            range(10), 4, rank, n, seed=seed, num_workers=workers
        )
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for worker in range(workers):
                found[epoch, rank, worker] = _drawn(loader.worker_seed(worker))
    return found


def _drawn(seed: Any) -> tuple[Any, ...]:
    try:
        number = operator.index(seed)
        generator = torch.Generator().manual_seed(number)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        return (f"{seed!r:.40}",)
    drawn = torch.randint(1 << 62, (), generator=generator).item()
    return number, drawn, random.Random(number).getrandbits(62)


@clause("data_loader.loader", "C2", worlds=(2, 1))
def workers_draw_their_own(impl: Implementation, cluster: Bench) -> str | None:
    """P: no two workers' streams start alike; the same run again has the same ones."""
    run = cluster.run(impl, work_out_seeds)
    for case, others in zip(run.values[0], run.values[-1], strict=True):
        failure = _usable(case) or _shared(case) or _fixed(case, others)
        if failure:
            raise failure
    workers = sum(case["ranks"] * case["workers"] for case in run.values[0])
    return f"{workers} data workers in {EPOCHS} epochs, no two alike"


def _usable(case: dict[str, Any]) -> NotYetError | None:
    for drawn in case["draws"].values():
        if len(drawn) == 1:
            return NotYetError(
                f"worker_seed gives {drawn[0]}: torch.manual_seed takes a whole number "
                "of at most 64 bits",
                rule="return the seed as an int",
                fatal=True,
            )
    return None


def _shared(case: dict[str, Any]) -> NotYetError | None:
    draws: Draws = case["draws"]
    alike = [
        kind for kind in (1, 2) if len({d[kind] for d in draws.values()}) < len(draws)
    ]
    if not alike:
        return None
    one, other = _nearest(draws, alike[0])
    where = [_place(*key) for key in (one, other)]
    rule = "what tells these two apart has to tell their seeds apart"
    if draws[one][0] == -draws[other][0] != 0:
        rule = "to Python's random a seed and its negative are the same"
    elif draws[one][0] != draws[other][0]:
        rule = "torch keeps only the lowest 32 bits of a seed: they must differ there"
    return NotYetError(
        f"{case['ranks']} ranks, {case['workers']} data workers each: {where[0]} and "
        f"{where[1]} draw the same random numbers",
        slug="worker-seeds-shared",
        evidence=tuple(
            Evidence(rank=key[1], state=f"worker {key[2]}, epoch {key[0]}", text=text)
            for key, text in ((k, f"seed {draws[k][0]}") for k in (one, other))
        ),
        rule=rule,
    )


def _nearest(
    draws: Draws, kind: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The two that draw the same and differ in least: of one epoch, if there are."""
    alike: dict[Any, list[tuple[int, int, int]]] = {}
    for key, drawn in draws.items():
        alike.setdefault(drawn[kind], []).append(key)
    pairs = (
        pair for keys in alike.values() for pair in itertools.combinations(keys, 2)
    )

    def apart(pair: tuple[tuple[int, int, int], ...]) -> tuple[int, bool]:
        return sum(map(operator.ne, *pair)), pair[0][0] != pair[1][0]

    return min(pairs, key=apart)


def _place(epoch: int, rank: int, worker: int) -> str:
    return f"worker {worker} of rank {rank} in epoch {epoch}"


def _fixed(case: dict[str, Any], elsewhere: dict[str, Any]) -> NotYetError | None:
    draws: Draws = case["draws"]
    for key, drawn in draws.items():
        if not drawn == case["again"][key] == elsewhere["draws"][key]:
            return NotYetError(
                f"{_place(*key)} gets another seed when the same run is made again",
                slug="not-reproducible",
                rule="a seed may depend on what is the same next time, on nothing else",
            )
        if drawn == case["other"][key]:
            return NotYetError(
                f"{_place(*key)} draws the same random numbers in a run with another "
                "seed",
                rule="self.seed belongs into it, too",
            )
    return None
