"""Checks of task 3.28, `torch_ports.groups`: a rendezvous on a TCPStore, subgroups.

Rank 0's process hosts the store, as a launcher would. The processes meet twice: first
all of them, then for one rank less than there are processes.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distlab.comm import leave_default_group
from distlab.grading.clause import clause
from distlab.grading.kit.torch_group import PATIENCE_S, finished, join
from distlab.grading.kit.torchrun_env import HOST, host_store, unrecorded
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import enumerated

WORLDS = (4, 3)
TIMEOUT_S = 7.0  # not what torch takes by itself
LATE_S = 1.0  # of a process that waits for ranks that have gone, if it isn't refused
KEYS = "a PrefixStore for each generation, for your keys and for init_process_group"
EACH = "every rank calls new_group for each group, in the same order"
LIMITS = "timeout=timedelta(seconds=timeout_s), for TCPStore and init_process_group"


def two_generations(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """Who became what; in the second generation there is a process too many.

    It comes when the others have met and gone, so it is always the same one.
    """
    port, n = host_store(context, PATIENCE_S), context.world_size
    lives = []
    for generation, size in ((1, n), (2, fewer_of(n))):
        life: dict[str, Any] = {}
        _note_store(unit, generation, life)
        is_late = context.rank >= size
        if is_late:
            unrecorded(context.comm).barrier()
        try:
            limit_s = LATE_S if is_late else TIMEOUT_S
            unit.meet(HOST, port, size, generation, limit_s)
        except Exception as error:
            if generation == 1:
                raise
            life["raised"] = f"{type(error).__name__}: {error}"
            life["refused"] = isinstance(error, ValueError)
        if dist.is_initialized():
            life |= _facts()
            leave_default_group()
        lives.append(life)
        if size < n and not is_late:
            unrecorded(context.comm).barrier()
        unrecorded(context.comm).barrier()
    return lives


def fewer_of(n: int) -> int:
    """The ranks of the second generation."""
    return max(1, n - 1)


def _note_store(unit: ModuleType, generation: int, life: dict[str, Any]) -> None:
    """Leave a key in the store of the next process group, and look for the last one."""
    real = _INIT

    @wraps(real)
    def noted(*args: Any, **named: Any) -> Any:
        store = signature(real).bind(*args, **named).arguments.get("store")
        if store is not None:
            life["mixed"] = store.check([f"of generation {generation - 1}"])
            store.set(f"of generation {generation}", "")
            if life["mixed"]:  # gloo might meet by luck, or wait for addresses in vain
                raise RuntimeError("this store has keys of the last generation")
        return real(*args, **named)

    dist.init_process_group = noted
    if hasattr(unit, "init_process_group"):
        unit.init_process_group = noted  # type: ignore[attr-defined]


_INIT = dist.init_process_group


def _sum_of(number: int, group: Any = None) -> int | str:
    """Over the ranks of a group; or why there is none."""
    total = torch.tensor([number])
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:  # gloo's: nobody is there, or somebody has gone
        return str(error).rpartition("] ")[2].split(".")[0][:60]
    return int(total)


def _facts() -> dict[str, Any]:
    total = _sum_of(dist.get_rank() + 1)
    store: Any = c10d._get_default_store()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "total": total,
        "store_s": store.timeout.total_seconds(),
        "group_s": backend.options._timeout.total_seconds(),
    }


def subgroups(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """For the node and for the rail: the members, and a sum over them."""
    join(context)
    calls: list[Any] = [None] * context.world_size
    dist.all_gather_object(calls, _rehearsed(context, unit))
    found: list[dict[str, Any]] = []
    if all(own == calls[0] for own in calls):  # otherwise they would wait in vain
        pair = unit.node_and_rail(ranks_per_node(context.world_size))
        for group in pair if isinstance(pair, tuple | list) else [pair]:
            if not isinstance(group, dist.ProcessGroup):
                found.append({"kind": type(group).__name__})
                continue
            total = _sum_of(2**context.rank, group)
            ranks = dist.get_process_group_ranks(group)
            found.append({"ranks": ranks, "total": total})
            if isinstance(total, str):
                break  # the other group would keep the rank waiting once more
    leave_default_group()
    return {"calls": calls[context.rank], "groups": found}


def _rehearsed(context: RankContext, unit: ModuleType) -> list[Any]:
    """What this rank asks of new_group that all ranks must ask for; none is made."""
    real, calls = dist.new_group, []

    @wraps(real)
    def noted(*args: Any, **named: Any) -> Any:
        asked = signature(real).bind(*args, **named).arguments
        if not asked.get("use_local_synchronization"):
            calls.append(list(asked.get("ranks") or range(context.world_size)))
        return dist.group.WORLD

    places = [dist, *[unit] * hasattr(unit, "new_group")]
    for place in places:
        place.new_group = noted  # type: ignore[attr-defined]
    try:
        unit.node_and_rail(ranks_per_node(context.world_size))
    except Exception:  # it comes again, without this in its way
        calls = []
    for place in places:
        place.new_group = real  # type: ignore[attr-defined]
    return calls


def ranks_per_node(n: int) -> int:
    """Two nodes of 2 ranks, or one node of 3."""
    return 2 if n == 4 else n


# ── C1, C2, C3: the rendezvous ──────────────────────────────────────────────────────


def _met(runs: Runs) -> Run:
    try:
        return finished(runs, two_generations)
    except NotYetError as error:
        if error.slug != "typed-in-rank":
            raise
        # That rule is about torchrun, which has set the rank; here nothing has.
        message = f"{error.message.partition(':')[0]}: not all of the ranks connected"
        raise error.but(message=message, slug="", rule="") from error


@clause("torch_ports.groups", "C1", worlds=WORLDS, runs=[on_ranks(two_generations)])
def each_rank_once(runs: Runs) -> str | None:
    """Ranks and sizes in the first generation, and a sum over all."""
    n = runs.world_size
    lives = [value[0] for value in _met(runs).values]
    found = sorted((life.get("rank", -1), life.get("size", -1)) for life in lives)
    if found != [(rank, n) for rank in range(n)]:
        ranks = [rank for rank, _ in found if rank >= 0]
        sizes = sorted({size for rank, size in found if rank >= 0})
        raise NotYetError(
            f"after {n} processes called meet, their world size is "
            f"{enumerated(sizes)}, "
            f"expected {n}"
            if ranks == [*range(n)]
            else f"after {n} processes called meet, they have the ranks "
            f"{enumerated(ranks)}, expected 0 to {n - 1}"
            if ranks
            else f"after {n} processes called meet, none is in a process group",
            evidence=_told(lives),
        )
    _expect_sum(lives, n)
    return f"n = {n}: ranks 0 to {n - 1}, given by the store"


@clause("torch_ports.groups", "C2", worlds=WORLDS, runs=[on_ranks(two_generations)])
def from_zero_again(runs: Runs) -> str | None:
    """The second generation has one rank less, and refuses one process."""
    n, size = runs.world_size, fewer_of(runs.world_size)
    lives = [value[1] for value in _met(runs).values]
    refused = sum(life.get("refused", False) for life in lives)
    ranks = sorted(life["rank"] for life in lives if "rank" in life)
    mixed = any(life.get("mixed", False) for life in lives)
    if refused == n or mixed:
        raise NotYetError(
            "in generation 2, init_process_group gets a store with the keys of "
            "generation 1, expected other keys for each generation"
            if mixed
            else f"in generation 2, with world_size {size}, all {n} processes are "
            f"refused, expected {size} of them to get ranks",
            slug="generation-not-in-key",
            evidence=_told(lives),
            rule=KEYS,
        )
    if ranks != [*range(size)] or refused != n - size:
        raise NotYetError(
            f"when {n} processes meet with world_size {size}, {refused or 'none'} of "
            "them "
            f"got a ValueError, expected {n - size}"
            if ranks == [*range(size)]
            else f"when {n} processes meet with world_size {size}, "
            f"{_ranks(ranks)}, expected ranks 0 to {size - 1}",
            evidence=_told(lives),
        )
    _expect_sum([life for life in lives if "rank" in life], size)
    return f"n = {n}: then {size} ranks; refused: {n - size}"


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "none got a rank"
    return f"{len(ranks)} got the rank{'s' * (len(ranks) > 1)} {enumerated(ranks)}"


def _expect_sum(lives: list[dict[str, Any]], size: int) -> None:
    totals = [life["total"] for life in lives]
    if set(totals) != {size * (size + 1) // 2}:
        wrong = next(total for total in totals if total != size * (size + 1) // 2)
        fails = f"fails: {wrong}" if isinstance(wrong, str) else f"gives {wrong}"
        right = "" if isinstance(wrong, str) else f", expected {size * (size + 1) // 2}"
        raise NotYetError(
            f"after meet, an all_reduce over the {size} ranks {fails}{right}",
            evidence=_told(lives),
        )


@clause("torch_ports.groups", "C3", worlds=WORLDS, runs=[on_ranks(two_generations)])
def nothing_waits_longer(runs: Runs) -> str | None:
    """The time limits that the store and the process group have."""
    lives = [value[0] for value in _met(runs).values]
    for rank, life in enumerate(lives):
        if "group_s" not in life:
            raise NotJudgedError("no process group was joined: see C1")
        for what, key in (("store", "store_s"), ("process group", "group_s")):
            if life[key] != TIMEOUT_S:
                kept = f"a time limit of {life[key]:g} s"
                if life[key] == PATIENCE_S:  # which stands for torch's here
                    kept = "torch's default time limit"
                raise NotYetError(
                    f"after meet, the {what} has {kept} on rank {rank}, expected "
                    f"timeout_s, {TIMEOUT_S:g} s",
                    slug="default-timeout",
                    evidence=_told(lives),
                    rule=LIMITS,
                )
    return f"store and process group wait at most {TIMEOUT_S:g} s"


def _told(lives: list[dict[str, Any]]) -> tuple[Evidence, ...]:
    texts = [
        life["raised"][:70]
        if "raised" in life
        else "rank {rank} of {size}, limits {store_s:g} s and {group_s:g} s".format(
            **life
        )
        if "rank" in life
        else "meet returned, and there is no process group"
        for life in lives
    ]
    return tuple(Evidence(number, "process", text) for number, text in enumerate(texts))


# ── C4: the subgroups ───────────────────────────────────────────────────────────────


@clause("torch_ports.groups", "C4", worlds=WORLDS, runs=[on_ranks(subgroups)])
def members(runs: Runs) -> str | None:
    """The ranks of both groups, and which of them a sum reaches."""
    n, k = runs.world_size, ranks_per_node(runs.world_size)
    run = finished(runs, subgroups)
    _expect_same_calls([value["calls"] for value in run.values])
    for rank, value in enumerate(run.values):
        found = value["groups"]
        node, rail = rank - rank % k, rank % k
        expected = [[*range(node, node + k)], [*range(rail, n, k)]]
        ranks = [one.get("ranks", one.get("kind")) for one in found]
        evidence = (Evidence(rank, "has", f"{ranks}   expected {expected}"),)
        if any(own != right for own, right in zip(ranks, expected, strict=False)):
            swapped = ranks == expected[::-1]
            raise NotYetError(
                f"with {n} ranks, {k} per node, node_and_rail on rank {rank} returned "
                f"{enumerated(ranks)}, expected the node {expected[0]} and the rail "
                f"{expected[1]}",
                slug="node-and-rail-swapped" if swapped else "",
                evidence=evidence,
                rule="return the node's group first" if swapped else "",
            )
        for one, right in zip(found, expected, strict=False):
            if one["total"] != sum(2**member for member in right):
                raise NotYetError(
                    f"on rank {rank}, an all_reduce in the group {right} gives "
                    f"{one['total']}, expected {sum(2**member for member in right)}",
                    evidence=evidence,
                )
        if len(ranks) != len(expected):
            raise NotYetError(
                f"node_and_rail returned {len(ranks)} process group"
                f"{'s' * (len(ranks) != 1)} on rank {rank}, expected the node's and "
                "the rail's",
                evidence=evidence,
            )
    return f"n = {n}: node and rail, {k} ranks per node"


def _expect_same_calls(calls: list[list[Any]]) -> None:
    odd = next((rank for rank, own in enumerate(calls) if own != calls[0]), None)
    if odd is not None:
        raise NotYetError(
            f"rank {odd} and rank 0 call new_group for different groups, expected "
            "every "
            "rank to call it for each group in the same order",
            slug="group-calls-differ",
            evidence=[
                (rank, "calls", " ".join(map(str, own))[:70])
                for rank, own in enumerate(calls)
            ],
            rule=EACH,
        )
