"""What travels: shares that can be counted, and sizes without content."""

from __future__ import annotations

import pytest
import torch

from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Sized, payload, run

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)


def ring_all_reduce(ctx: RankContext, tensor: torch.Tensor) -> torch.Tensor:
    n, rank = ctx.world_size, ctx.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = list(tensor.chunk(n))
    for step in range(n - 1):
        out, into = (rank - step) % n, (rank - step - 1) % n
        box = torch.zeros_like(chunks[into])
        ctx.comm.sendrecv(chunks[out], right, box, left)
        chunks[into] += box
    for step in range(n - 1):
        out, into = (rank - step + 1) % n, (rank - step) % n
        ctx.comm.sendrecv(chunks[out], right, chunks[into], left)
    return tensor


def forgets_the_last(ctx: RankContext, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank adds up what its neighbors have: two shares twice, none of others."""
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    box, own = torch.zeros_like(tensor), tensor.clone()
    ctx.comm.sendrecv(own, right, box, left)
    return tensor + box + box


def test_shares_can_be_counted() -> None:
    good = run(ring_all_reduce, 7, torch.zeros(14), payload="symbolic")
    for value in good.values:
        assert payload.contributions(value, 7) == [1] * 7
    bad = run(forgets_the_last, 4, torch.zeros(8), payload="symbolic")
    assert payload.contributions(bad.values[2], 4) == [0, 2, 1, 0]


def test_beyond_15_ranks_only_the_right_sum_fits() -> None:
    done = run(ring_all_reduce, 40, torch.zeros(40), payload="symbolic")
    assert {int(x) for v in done.values for x in v} == {payload.complete_sum(40)}
    assert payload.complete_sum(3) == 0x111
    with pytest.raises(ValueError, match=r"\b15\b"):
        payload.contributions(done.values[0], 40)


def test_elements_that_differ_are_not_counted() -> None:
    with pytest.raises(ValueError, match=r"\bchunk\b"):
        payload.contributions(torch.tensor([1, 16]), 2)
    assert payload.contributions(torch.tensor([], dtype=torch.int64), 2) == [0, 0]


def schedule(ctx: RankContext, buffer: Sized) -> int:
    n = ctx.world_size
    chunks = list(buffer.chunk(n))
    for step in range(2 * (n - 1)):
        out, into = (ctx.rank - step) % n, (ctx.rank - step - 1) % n
        ctx.comm.sendrecv(
            chunks[out], (ctx.rank + 1) % n, chunks[into], (ctx.rank - 1) % n
        )
    return ctx.traffic.messages


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("eager_bytes", [0, 1 << 20])
def test_sizes_take_the_time_of_the_bytes_they_stand_for(
    journal: bool, eager_bytes: int
) -> None:
    n, size = 8, 4000
    done = run(
        schedule,
        n,
        torch.zeros(size),
        net=NET,
        payload="size",
        journal=journal,
        eager_bytes=eager_bytes,
    )
    chunk_s = 4 * size / n / NET.bytes_per_s
    assert done.time_s == pytest.approx(2 * (n - 1) * (NET.alpha_s + chunk_s), rel=1e-9)
    assert done.values == [2 * (n - 1)] * n
    assert done.ranks[0].sent_bytes == 2 * (n - 1) * 4 * size / n


def test_a_run_without_a_trace_is_the_same_run() -> None:
    with_it, without = (run(schedule, 4, Sized(64), trace=t) for t in (True, False))
    assert (len(with_it.trace), len(without.trace)) == (24, 0)
    assert with_it.time_s == without.time_s


def test_chunks_of_a_size() -> None:
    assert [part.nbytes for part in Sized(10).chunk(4)] == [3, 3, 2, 2]
