"""Tests of `collectives` that catch all mistakes visible on simulated ranks.

Guide: phase1_data_parallel/guide/collectives.md.
Each test gets `run`: run(program, n) runs program(comm, unit) on n ranks and returns
their results in a list. It fails if a rank raises or all ranks wait. The list has
`messages` and `num_bytes`, sent by each rank, and `rounds` where `message_bytes` is
given. Values differ per rank, and so do the tensors that a result is written into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Comm

Run = Callable[..., Any]
SIZES = (1, 2, 3, 5, 6, 8)
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bfloat16)
TURNS = (0, 3)  # each function is called twice: nothing may be kept between


def values_of(rank: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return small integers, exact in any dtype, which differ by rank and element."""
    return ((7 * rank + 3 * torch.arange(count)) % 11 + 1).to(dtype)


def garbage(count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor to be overwritten, filled with nan, or 77 for integers."""
    return torch.full(
        (count,), math.nan if dtype.is_floating_point else 77, dtype=dtype
    )


def test_send_recv(run: Run) -> None:
    """Rank 1 has rank 0's values; no other rank sends, receives or changes any."""
    for n in SIZES[1:]:
        for dtype in DTYPES:

            def program(comm: Comm, unit: ModuleType, dtype: Any = dtype) -> Any:
                tensors = [values_of(comm.rank + turn, 6, dtype) for turn in TURNS]
                for tensor in tensors:
                    unit.send_recv(comm, tensor.view(2, 3))
                number = values_of(comm.rank, 1, dtype)
                unit.send_recv(comm, number.view(()))
                return [*tensors, number]

            results = run(program, n)
            for rank, held in enumerate(results):
                src = 0 if rank == 1 else rank
                for turn, tensor in zip(TURNS, held, strict=False):
                    assert torch.equal(tensor, values_of(src + turn, 6, dtype))
                assert torch.equal(held[2], values_of(src, 1, dtype))
            assert results.messages == [3] + [0] * (n - 1)
            assert results.num_bytes[0] == 13 * dtype.itemsize


def test_ring_shift(run: Run) -> None:
    """Every rank has its left neighbor's values, and `outgoing` is unchanged."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                outgoing = values_of(comm.rank + turn, 6, dtype)
                incoming = garbage(6, dtype)
                unit.ring_shift(comm, outgoing.view(2, 3), incoming.view(2, 3))
                results.append((dtype, turn, outgoing, incoming))
        return results

    for n in SIZES[1:]:
        results = run(program, n)
        for rank, held in enumerate(results):
            for dtype, turn, outgoing, incoming in held:
                left = (rank - 1) % n
                assert torch.equal(outgoing, values_of(rank + turn, 6, dtype))
                assert torch.equal(incoming, values_of(left + turn, 6, dtype))
        assert results.messages == [8] * n


def test_broadcast(run: Run) -> None:
    """Every rank has the values of rank src, after n - 1 messages, for any src."""
    expect_broadcast(run, "broadcast")


def test_tree_broadcast(run: Run) -> None:
    """Every rank has the values of rank src, after ⌈log2 n⌉ rounds."""
    expect_broadcast(run, "tree_broadcast")
    for n in (*SIZES, 17):
        for src in {0, n // 2, n - 1}:

            def program(comm: Comm, unit: ModuleType, src: int = src) -> None:
                unit.tree_broadcast(comm, values_of(comm.rank, 4), src)

            rounds = run(program, n, message_bytes=32).rounds
            assert rounds <= math.ceil(math.log2(n))


def expect_broadcast(run: Run, name: str) -> None:
    """Check the promises that both broadcasts make."""
    for n in SIZES:
        for src in {0, 1 % n, n // 2, n - 1}:

            def program(comm: Comm, unit: ModuleType, src: int = src) -> Any:
                results = []
                for dtype in DTYPES:
                    for turn in TURNS:
                        tensor = values_of(comm.rank + turn, 6, dtype)
                        getattr(unit, name)(comm, tensor.view(2, 3), src)
                        results.append((dtype, turn, tensor))
                return results

            results = run(program, n)
            for held in results:
                for dtype, turn, tensor in held:
                    assert torch.equal(tensor, values_of(src + turn, 6, dtype))
            assert sum(results.messages) == 8 * (n - 1)
            assert sum(results.num_bytes) == 2 * (n - 1) * 6 * (8 + 4 + 8 + 2)


def test_all_reduce(run: Run) -> None:
    """Every rank has the sum, in the caller's tensor, with the same bits."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                tensor = values_of(comm.rank + turn, 6, dtype)
                unit.all_reduce(comm, tensor.view(2, 3))
                results.append((dtype, turn, tensor))
        return results

    for n in SIZES:
        results = run(program, n)
        for held in results:
            for dtype, turn, tensor in held:
                parts = [values_of(rank + turn, 6, dtype) for rank in range(n)]
                assert torch.equal(tensor, torch.stack(parts).sum(0))


def test_all_reduce_rounds_alike(run: Run) -> None:
    """With fractions and large integers, the sum is close and its bits are equal."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        fractions = torch.rand(64, generator=torch.Generator().manual_seed(comm.rank))
        large = torch.tensor([2**40 + comm.rank, 3])
        total = fractions.clone()
        unit.all_reduce(comm, total)
        unit.all_reduce(comm, large)
        return fractions, total, large

    for n in SIZES:
        results = run(program, n)
        exact = sum(fractions.double() for fractions, _, _ in results)
        for _, total, large in results:
            assert torch.equal(total, results[0][1])
            assert torch.allclose(total.double(), exact, rtol=1e-5)
            assert large.tolist() == [n * 2**40 + n * (n - 1) // 2, 3 * n]


def test_all_gather(run: Run) -> None:
    """Every rank has all ranks' inputs, in order, and input is unchanged."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                own = values_of(comm.rank + turn, 3, dtype)
                output = garbage(3 * comm.world_size, dtype)
                unit.all_gather(comm, output, own)
                results.append((dtype, turn, own, output))
        large = garbage(comm.world_size, torch.int64)
        unit.all_gather(comm, large, torch.tensor([2**60 + comm.rank]))
        return results, large

    for n in SIZES:
        results = run(program, n)
        for rank, (held, large) in enumerate(results):
            assert large.tolist() == [2**60 + r for r in range(n)]
            for dtype, turn, own, output in held:
                parts = [values_of(r + turn, 3, dtype) for r in range(n)]
                assert torch.equal(output, torch.cat(parts))
                assert torch.equal(own, values_of(rank + turn, 3, dtype))


def test_reduce_scatter(run: Run) -> None:
    """Each rank has its chunk of the sum, and input is unchanged."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                own = values_of(comm.rank + turn, 3 * comm.world_size, dtype)
                output = garbage(3, dtype)
                unit.reduce_scatter(comm, output, own)
                results.append((dtype, turn, own, output))
        return results

    for n in SIZES:
        results = run(program, n)
        for rank, held in enumerate(results):
            for dtype, turn, own, output in held:
                inputs = [values_of(r + turn, 3 * n, dtype) for r in range(n)]
                total = torch.stack(inputs).sum(0)
                assert torch.equal(output, total[3 * rank : 3 * rank + 3])
                assert torch.equal(own, inputs[rank])


def test_all_to_all(run: Run) -> None:
    """Chunk p of rank r's output is chunk r of rank p's input; n - 1 rounds."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                own = values_of(comm.rank + turn, 2 * comm.world_size, dtype)
                output = garbage(2 * comm.world_size, dtype)
                unit.all_to_all(comm, output, own)
                results.append((dtype, turn, own, output))
        return results

    def timed(comm: Comm, unit: ModuleType) -> None:
        own = values_of(comm.rank, 2 * comm.world_size)
        unit.all_to_all(comm, torch.empty_like(own), own)

    for n in (*SIZES, 17):
        results = run(program, n)
        for rank, held in enumerate(results):
            for dtype, turn, own, output in held:
                inputs = [values_of(r + turn, 2 * n, dtype) for r in range(n)]
                expected = [part[2 * rank : 2 * rank + 2] for part in inputs]
                assert torch.equal(output, torch.cat(expected))
                assert torch.equal(own, inputs[rank])
        assert results.messages == [8 * (n - 1)] * n
        assert results.num_bytes == [4 * (n - 1) * (8 + 4 + 8 + 2)] * n
        assert run(timed, n, message_bytes=16).rounds <= n - 1


def test_one_rank_has_nothing_to_send(run: Run) -> None:
    """With one rank, only comm may refuse; a ring of one gives its own values back."""

    def exchange(comm: Comm, unit: ModuleType) -> None:
        unit.send_recv(comm, values_of(0, 2))

    def shift(comm: Comm, unit: ModuleType) -> None:
        incoming = values_of(1, 2)
        unit.ring_shift(comm, values_of(0, 2), incoming)
        assert torch.equal(incoming, values_of(0, 2))

    for program in (exchange, shift):
        try:
            run(program, 1)
        except AssertionError as error:
            if "Refused" not in str(error):
                raise
