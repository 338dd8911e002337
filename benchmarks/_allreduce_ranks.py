"""What each rank does for `benchmarks/allreduce.py`: the same sums, ours and gloo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._ratios import in_turn
from distlab.comm import Comm, TorchComm
from distlab.curriculum import load
from distlab.runner import RankContext
from tests.corpora.both_ways import leave, meet

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KiB": 4 * KIB, "1MiB": MIB, "16MiB": 16 * MIB, "64MiB": 64 * MIB}
CALLS = {"4KiB": 100, "1MiB": 10, "16MiB": 1, "64MiB": 1}  # timed as one
PAIRS = {"4KiB": 20, "1MiB": 20, "16MiB": 40, "64MiB": 16}  # in one launch of two
Way = Callable[[Comm, torch.Tensor], Any]


def timed(
    context: RankContext, folder: str, side: str, is_bound: bool
) -> dict[str, list[tuple[float, ...]]]:
    """By size: seconds of a call of ours and of gloo's, and of copying a tensor."""
    if is_bound:  # before gloo starts its threads, which are bound with it
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[context.rank]})
    comm, n = meet(context, folder), context.world_size
    ours: Way = load("ring_allreduce", side).pipelined_all_reduce
    peer: Way = TorchComm.all_reduce  # type: ignore[assignment]
    found: dict[str, list[tuple[float, ...]]] = {}
    for size, num_bytes in SIZES.items():
        expect_equal(comm, ours, peer, num_bytes // 4)
        tensor = torch.zeros(num_bytes // 4)  # sums of zeros do not grow
        source, calls = torch.ones_like(tensor), CALLS[size]

        def copy(_: Comm, tensor: torch.Tensor, source: torch.Tensor = source) -> None:
            tensor.copy_(source)

        def repeat(way: Way, tensor: torch.Tensor = tensor, calls: int = calls) -> None:
            for _ in range(calls):
                way(comm, tensor)

        ways = [partial(repeat, ours), partial(repeat, peer)]
        count = PAIRS[size] * 2 // n
        pairs = in_turn(ways, count, warm_up=1, before=comm.barrier)
        copies = in_turn([partial(repeat, copy)], 5, before=comm.barrier)
        least_s = min(copies)[0]
        found[size] = [
            (own / calls, other / calls, least_s / calls) for own, other in pairs
        ]
    leave()
    return found


def expect_equal(comm: Comm, ours: Way, peer: Way, length: int) -> None:
    """Whole numbers, so that both sums are exact."""
    own = torch.arange(length, dtype=torch.float32).remainder(1009) * (comm.rank + 1)
    theirs = own.clone()
    ours(comm, own)
    peer(comm, theirs)
    if not torch.equal(own, theirs):
        raise ValueError(f"rank {comm.rank}: the sums of {length} numbers differ")
