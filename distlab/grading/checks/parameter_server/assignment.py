"""Checks of 3.19, C1 and C2: each tensor has a server, and the loads are balanced."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from copy import copy
from types import ModuleType
from typing import Any

from distlab.grading.checks.parameter_server.messages import times
from distlab.grading.clause import clause
from distlab.grading.kit.plans import disturb, in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "parameter_server.sync"
_SHOWN = 8  # sizes in a sentence
CASES: tuple[tuple[Sequence[int], int], ...] = (
    *(([2, 2, 2, 3, 3], 2), ([5, 1], 3), ([8, 8, 8, 8], 2), ([1, 1, 1, 1, 9], 3)),
    *(([], 2), ([7], 1), ([4_000_000, 64, 64, 2_000_000, 2_000_000, 512], 2)),
    ((3, 1, 3, 1, 3, 1, 3, 1), 2),
)
"""(sizes, num_servers): a tuple in alternation, one larger than all others, none."""


def cases(seed: int) -> list[tuple[Sequence[int], int]]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    drawn = [
        ([draw.randint(1, 60) for _ in range(draw.randint(3, 20))], draw.randint(2, 5))
        for _ in range(12)
    ]
    return [*CASES, *drawn]


def assign(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The servers of each case, as three ranks compute them."""
    found: list[Any] = []
    for sizes, num_servers in cases(seed):
        with in_call(f"assign_tensors({sizes}, {num_servers})"):
            of_ranks = []
            for rank in range(3):
                disturb(unit, rank)
                of_ranks.append(read(unit.assign_tensors(copy(sizes), num_servers)))
            found.append(of_ranks)
    return found


def read(value: Any) -> list[int] | str:
    """A list of integers, or what it is instead."""
    if value is None:
        return "returned None, expected a list of servers: is a return missing?"
    try:
        return [operator.index(server) for server in value]
    except TypeError:
        return f"returned {value!r:.50}, expected a list of server numbers"


def _assigned(runs: Runs) -> Iterator[tuple[str, Sequence[int], int, list[Any]]]:
    found = worked_out(runs, assign).values[0]
    for (sizes, num_servers), of_ranks in zip(cases(runs.seed), found, strict=True):
        said = f"{str(sizes[:_SHOWN])[:-1]}, …]" if len(sizes) > _SHOWN else sizes
        yield f"assign_tensors({said}, {num_servers})", sizes, num_servers, of_ranks


@clause(TASK, "C1", worlds=(1,), plays=(), runs=[on_ranks(assign)])
def one_server_each(runs: Runs) -> str | None:
    """A number for each tensor; the same on every rank."""
    for call, sizes, num_servers, of_ranks in _assigned(runs):
        servers = of_ranks[0]
        if isinstance(servers, str):
            raise NotYetError(f"{call} {servers}")
        if len(servers) != len(sizes):
            raise NotYetError(
                f"{call} returned {times(len(servers), 'entry')} for "
                f"{times(len(sizes), 'tensor')}, expected a server for each",
                rule="the list has one server for each tensor, in the order of sizes",
            )
        unknown = [s for s in servers if not 0 <= s < num_servers]
        if unknown:
            raise NotYetError(
                f"{call} returned server {unknown[0]}, expected numbers from 0 to "
                f"{num_servers - 1}"
            )
        if any(other != servers for other in of_ranks):
            rows = [Evidence(r, "", str(s)) for r, s in enumerate(of_ranks)]
            raise NotYetError(
                f"{call} returned different lists on different ranks, expected the "
                "same list on every rank",
                slug="assigned-per-rank",
                evidence=tuple(rows),
                rule="every rank must find a tensor on the same server",
            )
    return None


def sizes_of(
    sizes: Sequence[int], servers: list[int], num_servers: int
) -> list[list[int]]:
    """The tensors of each server."""
    pairs = list(zip(sizes, servers, strict=True))
    return [[size for size, s in pairs if s == k] for k in range(num_servers)]


def largest_first(sizes: Sequence[int], num_servers: int) -> int:
    """The largest load when tensors are placed by size, each where there is least."""
    loads = [0] * num_servers
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads)


@clause(TASK, "C2", worlds=(1,), plays=(), runs=[on_ranks(assign)])
def balanced_by_bytes(runs: Runs) -> str | None:
    """No tensor can move and make the largest load smaller, or it is small."""
    for call, sizes, num_servers, of_ranks in _assigned(runs):
        servers = of_ranks[0]
        if isinstance(servers, str) or len(servers) != len(sizes):
            raise NotJudgedError
        placed = sizes_of(sizes, servers, num_servers)
        loads = [sum(own) for own in placed]
        most = loads.index(max(loads))
        least = min(placed[most], default=0)
        limit = max(min(loads) + least, largest_first(sizes, num_servers))
        if loads[most] > limit:
            raise NotYetError(
                f"{call} gives server {most} {loads[most]} bytes and server "
                f"{loads.index(min(loads))} only {min(loads)}, expected the latter to "
                f"have one of the {least}-byte tensors",
                slug=_balance_slug(runs),
                evidence=(
                    Evidence(NOBODY, "returned", str(servers)),
                    *(
                        Evidence(
                            NOBODY,
                            f"server {server}",
                            f"{sum(own)} bytes: {' '.join(map(str, own))}",
                        )
                        for server, own in enumerate(placed)
                    ),
                ),
            )
    return None


def _balance_slug(runs: Runs) -> str:
    in_turn = all(
        of_ranks[0] == [index % num_servers for index in range(len(sizes))]
        for _, sizes, num_servers, of_ranks in _assigned(runs)
    )
    return "balanced-by-count" if in_turn else ""
