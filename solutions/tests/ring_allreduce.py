"""Tests of `ring_allreduce` that catch all mistakes visible on simulated ranks.

Guide: phase3_multi_node/guide/ring_allreduce.md.
Each test gets `run`: run(program, n) runs program(comm, unit) on n ranks and returns
their results in a list. It fails if a rank raises or all ranks wait. The list has
`messages`, `num_bytes` and `sent_to` of each rank, and `rounds` where `message_bytes`
is given. `unit` is the solution, for what needs no ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Comm

Run = Callable[..., Any]
SIZES = (1, 2, 3, 4, 7)
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
TURNS = (0, 3)  # each function is called twice: nothing may be kept between


def values_of(rank: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return small integers, exact in every dtype, that differ between ranks."""
    return ((7 * rank + 3 * torch.arange(count)) % 11 + 1).to(dtype)


def sum_of(n: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the sum of what n ranks have."""
    return torch.stack([values_of(rank, count, dtype) for rank in range(n)]).sum(0)


def test_chunk_bounds(unit: ModuleType) -> None:
    """The chunks follow each other, and no two sizes differ by more than one."""
    cases = [(length, n) for n in (1, 2, 3, 4, 7, 49) for length in range(60)]
    for length, n in [*cases, (1001, 49), (10**6, 7)]:
        bounds = [tuple(pair) for pair in unit.chunk_bounds(length, n)]
        assert len(bounds) == n
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == length
        sizes = [end - start for start, end in bounds]
        assert max(sizes) - min(sizes) <= 1


def test_reduce_scatter(run: Run) -> None:
    """Each rank owns one chunk of the sum, after n - 1 steps to one neighbor."""
    for n in SIZES:
        for count in (0, 1, 2 * n, 10):
            for dtype in DTYPES:

                def program(
                    comm: Comm, unit: ModuleType, count: int = count, dtype: Any = dtype
                ) -> Any:
                    tensor = values_of(comm.rank, count, dtype)
                    same = tensor[:]  # its memory
                    number = unit.reduce_scatter(comm, tensor)
                    return number, same, unit.chunk_bounds(count, comm.world_size)

                results = run(program, n)
                assert sorted(number for number, _, _ in results) == [*range(n)]
                for number, tensor, chunks in results:
                    start, end = chunks[number]
                    assert torch.equal(
                        tensor[start:end], sum_of(n, count, dtype)[start:end]
                    )
        expect_a_ring(run, n, "reduce_scatter", n - 1)


def test_all_reduce(run: Run) -> None:
    """Every rank has the sum in its own tensor, of any shape and strides."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        results = []
        for dtype in DTYPES:
            for turn in TURNS:
                flat = values_of(comm.rank + turn, 12, dtype)
                square = values_of(comm.rank + turn, 12, dtype).view(3, 4)
                odd = values_of(comm.rank + turn, 12, dtype)
                unit.all_reduce(comm, flat.view(2, 2, 3))
                unit.all_reduce(comm, square.t())
                unit.all_reduce(comm, odd[1::2])
                unit.all_reduce(comm, flat[:0])
                results.append((dtype, turn, flat, square, odd))
        return results

    for n in SIZES:
        results = run(program, n)
        for rank, held in enumerate(results):
            for dtype, turn, flat, square, odd in held:
                parts = [values_of(r + turn, 12, dtype) for r in range(n)]
                total = torch.stack(parts).sum(0)
                assert torch.equal(flat, total)
                assert torch.equal(square.view(-1), total)
                assert torch.equal(odd[1::2], total[1::2])
                assert torch.equal(odd[::2], parts[rank][::2])
        expect_a_ring(run, n, "all_reduce", 2 * (n - 1))


def test_all_reduce_rounds_alike(run: Run) -> None:
    """With fractions, the sum is close, and every rank has the same bits."""
    for name in ("all_reduce", "pipelined_all_reduce"):

        def program(comm: Comm, unit: ModuleType, name: str = name) -> Any:
            own = torch.rand(50, generator=torch.Generator().manual_seed(comm.rank))
            total = own.clone()
            getattr(unit, name)(comm, total)
            return own, total

        for n in SIZES:
            results = run(program, n)
            exact = sum(own.double() for own, _ in results)
            for _, total in results:
                assert torch.equal(total, results[0][1])
                assert torch.allclose(total.double(), exact, rtol=1e-5)


def test_all_reduce_averages(run: Run) -> None:
    """With average=True it is the mean; integers are refused before any message."""

    def program(comm: Comm, unit: ModuleType) -> Any:
        tensors = [values_of(comm.rank, 12, dtype) for dtype in DTYPES[:2]]
        for tensor in tensors:
            unit.all_reduce(comm, tensor.view(3, 4).t(), average=True)
        return tensors

    def refused(comm: Comm, unit: ModuleType) -> Any:
        kinds = []
        for dtype, count in product(INTEGERS, (12, 0)):
            tensor = values_of(comm.rank, count, dtype)
            try:
                unit.all_reduce(comm, tensor, average=True)
            except Exception as error:
                is_unchanged = torch.equal(tensor, values_of(comm.rank, count, dtype))
                kinds.append((type(error), is_unchanged))
        return kinds

    for n in SIZES:
        for held in run(program, n):
            for dtype, tensor in zip(DTYPES, held, strict=False):
                assert torch.allclose(tensor, sum_of(n, 12, dtype) / n)
        results = run(refused, n)
        for kinds in results:
            assert kinds == [(ValueError, True)] * 2 * len(INTEGERS)
        assert results.messages == [0] * n


def expect_a_ring(run: Run, n: int, name: str, num_steps: int) -> None:
    """Each step sends one chunk to one neighbor, always the same, both ways at once."""
    for dtype in (torch.float64, torch.bfloat16):
        count = 4 * n
        chunk_bytes = 4 * dtype.itemsize

        def program(
            comm: Comm, unit: ModuleType, count: int = count, dtype: Any = dtype
        ) -> None:
            getattr(unit, name)(comm, values_of(comm.rank, count, dtype))

        results = run(program, n, message_bytes=chunk_bytes)
        assert results.messages == [num_steps] * n
        assert results.num_bytes == [num_steps * chunk_bytes] * n
        assert results.rounds <= num_steps
        for rank, peers in enumerate(results.sent_to):
            assert len({*peers}) <= 1
            assert {*peers} <= {(rank + 1) % n, (rank - 1) % n}


def test_segment_plan(unit: ModuleType) -> None:
    """Run all ranks' plans together, and check sums, buffers, messages and overlap."""
    for n in (2, 3, 4, 5):
        for num_segments in (1, 2, 3):
            plans = [
                [tuple(op) for op in unit.segment_plan(rank, n, num_segments)]
                for rank in range(n)
            ]
            for plan in plans:
                expect_care(plan)
                expect_sending(plan)
                sent = sum(kind == "isend" for kind, _, _ in plan)
                assert sent <= 2 * (n - 1) * num_segments
            expect_sums(plans, n, num_segments)
    expect_overlap([tuple(op) for op in unit.segment_plan(0, 3, 8)])


Step = tuple[str, int, int | None]


def expect_care(plan: list[Step]) -> None:
    """Check that no buffer in flight is touched, and each start has one wait."""
    in_flight: set[tuple[int, int | None]] = set()
    for kind, segment, buffer in plan:
        if kind == "wait":
            in_flight.remove((segment, buffer))
            continue
        own = ("segment", segment) if buffer is None else ("buffer", buffer)
        used = {own, ("segment", segment)} if kind == "add" else {own}
        busy = {("segment", s) if b is None else ("buffer", b) for s, b in in_flight}
        assert not used & busy, (kind, segment, buffer)
        if kind != "add":
            in_flight.add((segment, buffer))
    assert not in_flight


def expect_sending(plan: list[Step]) -> None:
    """Check that a segment is being sent during each addition."""
    sending: set[int] = set()
    for kind, segment, buffer in plan:
        if kind == "isend":
            sending.add(segment)
        elif kind == "add":
            assert sending
        elif kind == "wait" and buffer is None:
            sending.discard(segment)


def expect_overlap(plan: list[Step]) -> None:
    """Check that most additions overlap with a receive and a send."""
    adds = hidden = 0
    in_flight: dict[tuple[int, int | None], str] = {}
    for kind, segment, buffer in plan:
        if kind == "wait":
            del in_flight[segment, buffer]
        elif kind == "add":
            adds += 1
            hidden += {"irecv", "isend"} <= {*in_flight.values()}
        else:
            in_flight[segment, buffer] = kind
    assert hidden >= 0.7 * adds


class Rank:
    """One rank that runs its plan, on channels to and from its neighbors."""

    def __init__(self, rank: int, plan: list[Step], count: int) -> None:
        self.plan, self.done = deque(plan), set[tuple[int, int | None]]()
        self.held = [{rank: 1} for _ in range(count)]
        self.buffers: dict[int, dict[int, int]] = {}
        self.sending: deque[tuple[int, int | None]] = deque()
        self.receiving: deque[tuple[int, int | None]] = deque()

    def play(self) -> bool:
        """Continue to the next unfinished wait; return True if anything was done."""
        before = len(self.plan)
        while self.plan:
            kind, segment, buffer = self.plan[0]
            key = (segment, buffer)
            if kind == "wait" and key not in self.done:
                break
            self.plan.popleft()
            if kind == "add":
                own = self.held[segment]
                for source, times in self.buffers[buffer or 0].items():
                    own[source] = own.get(source, 0) + times
            elif kind == "wait":
                self.done.discard(key)
            else:
                (self.sending if kind == "isend" else self.receiving).append(key)
        return len(self.plan) < before

    def deliver(self, right: Rank) -> None:
        """Move what both sides have started; the k-th isend meets the k-th irecv."""
        while self.sending and right.receiving:
            sent, (segment, buffer) = self.sending.popleft(), right.receiving.popleft()
            place: Any = right.held if buffer is None else right.buffers
            place[segment if buffer is None else buffer] = dict(self.held[sent[0]])
            self.done.add(sent)
            right.done.add((segment, buffer))


def expect_sums(plans: list[list[Step]], n: int, num_segments: int) -> None:
    """Run the plans; each rank ends with every segment's sum, each rank in it once."""
    count = n * num_segments
    ranks = [Rank(rank, plan, count) for rank, plan in enumerate(plans)]
    while sum(rank.play() for rank in ranks):
        for number, rank in enumerate(ranks):
            rank.deliver(ranks[(number + 1) % n])
    for rank in ranks:
        assert not [*rank.plan, *rank.sending, *rank.receiving]
        assert rank.held == [dict.fromkeys(range(n), 1)] * count


def test_pipelined_all_reduce(run: Run) -> None:
    """The caller's tensor has the sum, sent in segments, to one neighbor."""
    for n in SIZES:
        for count, segment_bytes in ((0, 8), (1, 8), (10, 16), (37, 32), (40, 1 << 21)):
            for dtype in DTYPES[:3]:

                def program(
                    comm: Comm,
                    unit: ModuleType,
                    count: int = count,
                    size: int = segment_bytes,
                    dtype: Any = dtype,
                ) -> Any:
                    tensor = values_of(comm.rank, count, dtype)
                    unit.pipelined_all_reduce(comm, tensor, size)
                    return tensor

                results = run(program, n)
                for tensor in results:
                    assert torch.equal(tensor, sum_of(n, count, dtype))
                longest = -(-count // n) * dtype.itemsize
                most = max(segment_bytes, dtype.itemsize)
                for rank in range(n):
                    assert results.num_bytes[rank] <= 2 * (n - 1) * longest
                    if results.messages[rank]:
                        least = results.num_bytes[rank] / results.messages[rank]
                        assert least <= most
                    assert len({*results.sent_to[rank]}) <= 1
