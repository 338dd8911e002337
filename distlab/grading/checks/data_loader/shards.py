"""Checks of task 1.8, `data_loader.shard_indices`: all ranks' shares side by side."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distlab.grading.clause import clause
from distlab.grading.kit.plans import (
    Plan,
    disturb,
    expect_even,
    expect_shared,
    in_call,
    is_readable,
    listed,
    numbers,
    on,
    table,
    worked_out,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

# Ten on four is small enough for a table and tells nearly everything.
SETTINGS = (
    *((10, 4), (5, 2), (12, 4), (10, 3), (7, 7), (6, 1), (23, 7), (37, 8), (64, 8)),
    *((5, 8), (3, 8), (1, 3), (2, 7)),  # fewer samples than ranks
)


def work_out_shards(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """The shares of all ranks, with padding and with dropping."""
    if context.rank:
        return []
    cases = []
    for num_samples, n in (*SETTINGS, (20 + seed % 19, 4), (30 + seed % 23, 7)):
        for drop_last in (False, True):
            shares = []
            for rank in range(n):
                disturb(unit, rank)
                shares.append(_share(unit, num_samples, rank, n, drop_last))
            disturb(unit, 5000)
            case = {
                "num_samples": num_samples,
                "drop_last": drop_last,
                "shares": shares,
                "again": _share(unit, num_samples, n - 1, n, drop_last),
            }
            cases.append(case)
    return cases


def _share(
    unit: ModuleType, num_samples: int, rank: int, n: int, drop_last: bool
) -> list[int] | str:
    drop = ", drop_last=True" if drop_last else ""
    with in_call(f"shard_indices({num_samples}, rank={rank}, world_size={n}{drop})"):
        given = (num_samples, rank, n, *([True] if drop_last else []))
        return numbers(unit.shard_indices(*given), 4 * num_samples + 64)


def _cases(runs: Runs) -> Iterator[tuple[Plan, int, bool]]:
    """All shares, their number of samples, and whether dropping was asked for."""
    for case in worked_out(runs, work_out_shards).values[0]:
        num_samples, shares = case["num_samples"], case["shares"]
        if not is_readable(shares):
            rank = next(r for r, share in enumerate(shares) if isinstance(share, str))
            raise NotYetError(
                f"{on(num_samples, len(shares))}, shard_indices on rank {rank} "
                + str(shares[rank]).replace("contains", "gives a list with"),
                rule="return the indices of the samples as a list",
                fatal=True,
            )
        yield shares, num_samples, case["drop_last"]


@clause(
    "data_loader.shard_indices", "C1", worlds=(1,), runs=[on_ranks(work_out_shards)]
)
def shares_are_even(runs: Runs) -> str | None:
    """Equally many on every rank."""
    failures = []
    for shares, num_samples, drop_last in _cases(runs):
        failure = expect_even(shares, num_samples, drop_last)
        if failure:
            failures.append((failure, shares, num_samples, drop_last))
    if not failures:
        return None
    first, shares, _, _ = failures[0]
    if all(_takes_two_rounds(s, count, drop) for _, s, count, drop in failures):
        raise NotYetError(
            f"{first.message}: repeating every sample once isn't enough",
            slug="padding-wraps-once",
            evidence=table(shares),
            rule="repeat the samples as often as needed",
        )
    raise first


def _takes_two_rounds(shares: Plan, num_samples: int, drop_last: bool) -> bool:
    return not drop_last and len(shares) > 2 * num_samples


def _expect_same_again(runs: Runs, place: int) -> None:
    case = worked_out(runs, work_out_shards).values[0][place]
    shares, again = case["shares"], case["again"]
    if again == shares[-1]:
        return
    rank = len(shares) - 1
    raise NotYetError(
        f"{on(case['num_samples'], len(shares))}, shard_indices gives rank {rank} "
        "other samples when it is called again, expected the same",
        slug="not-reproducible",
        evidence=[(rank, "first", listed(shares[-1])), (rank, "second", listed(again))],
        rule="all ranks use the same rule; do not use random numbers here",
    )


@clause(
    "data_loader.shard_indices", "C2", worlds=(1,), runs=[on_ranks(work_out_shards)]
)
def shares_are_complete(runs: Runs) -> str | None:
    """Every sample, as few repeats as it takes; or none twice, as few left out."""
    sizes, settings = set(), 0
    for shares, num_samples, drop_last in _cases(runs):
        _expect_same_again(runs, settings)
        failure = expect_shared(shares, num_samples, drop_last)
        if failure:
            raise failure
        sizes.add(len(shares))
        settings += 1
    tried = ", ".join(map(str, sorted(sizes)))
    return f"{settings} plans, for {tried} ranks: padded and dropped"
