"""Schedules of collectives: each step lists one rank's simultaneous messages.

A generator yields a list of `Step`s and resumes once all of them are done. It moves
no data itself, but says who sends what to whom, in the group's own ranks.

Source: dissemination barrier, Hensgen, Finkel and Manber (1988). Binomial trees and
pairwise exchange, Thakur, Rabenseifner and Gropp (2005), sections 4.1 to 4.4. Ring
all-reduce, Patarasuk and Yuan (2009). Recursive doubling, Thakur and others, 4.5.
Symbols: n ranks, S bytes.
Cost: in steps and bytes sent by one rank: barrier log n, 0; broadcast log n, S log n;
all_reduce 2(n-1), 2(n-1)/n S; reduce n, S (both, if short: log n, S log n);
reduce_scatter and all_to_all n-1, (n-1)/n S;
all_gather n-1, (n-1) S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from distlab.comm._protocol import ReduceOp
from distlab.comm.tcp.flights import Step

Steps = Iterator[list[Step]]
SHORT_BYTES = 4096  # up to here the number of steps counts, not the bytes

_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: lambda total, part: total.add_(part),
    ReduceOp.AVG: lambda total, part: total.add_(part),  # divided at the end
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.PRODUCT: lambda total, part: total.mul_(part),
}


def send(peer: int, tensor: Tensor) -> Step:
    """Make a step that sends `tensor` to `peer`."""
    return Step(True, peer, tensor)


def recv(peer: int, tensor: Tensor) -> Step:
    """Make a step that receives into `tensor` from `peer`."""
    return Step(False, peer, tensor)


def barrier(rank: int, n: int) -> Steps:
    """Hear, directly or indirectly, from twice as many ranks in each round."""
    nothing, reach = torch.empty(0), 1
    while reach < n:
        yield [recv((rank - reach) % n, nothing), send((rank + reach) % n, nothing)]
        reach *= 2


def broadcast(rank: int, n: int, flat: Tensor, src: int) -> Steps:
    """Send down a binomial tree with its root at `src`, the tree that gloo uses.

    Send to all children at once, so that a missing rank only holds up those that need
    it, and a program that hangs stops on the same lines as with gloo.
    """
    place = (rank - src) % n
    reach = 1 << place.bit_length()
    if place:
        yield [recv((rank - reach // 2) % n, flat)]
    children = []
    while place + reach < n:
        children.append(send((rank + reach) % n, flat))
        reach *= 2
    if children:
        yield children


def reduce(rank: int, n: int, flat: Tensor, dst: int, op: ReduceOp) -> Steps:
    """Reduce short tensors by doubling, long ones around the ring and then to `dst`.

    Other ranks' tensors don't change, and nobody finishes before all have arrived.
    """
    total = flat if rank == dst else flat.clone()
    if flat.nbytes <= SHORT_BYTES:
        yield from _doubling_all_reduce(rank, n, total, op)
        return
    chunks = total.tensor_split(n)
    yield from _ring_reduce_scatter(rank, chunks, op)
    average(op, chunks[rank], n)
    if rank != dst:
        yield [send(dst, chunks[rank])]
    elif n > 1:
        yield [recv(src, chunks[src]) for src in range(n) if src != dst]


def all_reduce(rank: int, n: int, flat: Tensor, op: ReduceOp) -> Steps:
    """Reduce short tensors by doubling (few steps), long ones on a ring (few bytes)."""
    if flat.nbytes <= SHORT_BYTES:
        yield from _doubling_all_reduce(rank, n, flat, op)
    else:
        yield from _ring_all_reduce(rank, n, flat, op)


def _doubling_all_reduce(rank: int, n: int, flat: Tensor, op: ReduceOp) -> Steps:
    """In each step, exchange everything with a partner that is twice as far away.

    If n isn't a power of two, each rank above the largest one in it sends its tensor to
    a rank below before the first step, and gets the result after the last.
    """
    power = 1 << (n.bit_length() - 1)
    part = torch.empty_like(flat)
    if rank >= power:
        yield [send(rank - power, flat)]
        yield [recv(rank - power, flat)]
        return
    if rank + power < n:
        yield [recv(rank + power, part)]
        combine(op, flat, part)
    reach = 1
    while reach < power:
        partner = rank ^ reach
        yield [recv(partner, part), send(partner, flat)]
        combine(op, flat, part)
        reach *= 2
    average(op, flat, n)
    if rank + power < n:
        yield [send(rank + power, flat)]


def _ring_all_reduce(rank: int, n: int, flat: Tensor, op: ReduceOp) -> Steps:
    """Go twice around the ring: first the chunks are summed, then they spread."""
    chunks = flat.tensor_split(n)
    yield from _ring_reduce_scatter(rank, chunks, op)
    average(op, chunks[rank], n)
    yield from _ring_all_gather(rank, chunks)


def reduce_scatter(
    rank: int, n: int, output: Tensor, input: Tensor, op: ReduceOp
) -> Steps:
    """Go once around the ring in a copy, because `input` belongs to the caller."""
    chunks = input.clone().tensor_split(n)
    yield from _ring_reduce_scatter(rank, chunks, op)
    average(op, chunks[rank], n)
    assign(output, chunks[rank])


def all_gather(rank: int, n: int, output: Tensor, input: Tensor) -> Steps:
    """Go once around the ring, where each rank passes on what it received last."""
    chunks = output.tensor_split(n)
    assign(chunks[rank], input)
    yield from _ring_all_gather(rank, chunks)


def all_to_all(rank: int, n: int, output: Tensor, input: Tensor) -> Steps:
    """In step k, send to the rank k ahead, and receive from the rank k behind."""
    theirs, mine = output.tensor_split(n), input.tensor_split(n)
    assign(theirs[rank], mine[rank])
    for ahead in range(1, n):
        dst, src = (rank + ahead) % n, (rank - ahead) % n
        yield [recv(src, theirs[src]), send(dst, mine[dst])]


def _ring_reduce_scatter(rank: int, chunks: Sequence[Tensor], op: ReduceOp) -> Steps:
    """Turn chunk `rank` into the reduction in place; the others hold partial sums."""
    n = len(chunks)
    left, right = (rank - 1) % n, (rank + 1) % n
    part = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(1, n):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = part[: coming.numel()]
        yield [recv(left, arrived), send(right, going)]
        combine(op, coming, arrived)


def _ring_all_gather(rank: int, chunks: Sequence[Tensor]) -> Steps:
    n = len(chunks)
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        yield [recv(left, coming), send(right, going)]


def combine(op: ReduceOp, total: Tensor, part: Tensor) -> None:
    """Combine `part` into `total`, in place."""
    with torch.inference_mode(total.is_inference()):
        _COMBINE[op](total, part)


def average(op: ReduceOp, total: Tensor, n: int) -> None:
    """Turn a sum of `n` into the average, in place, if the caller wants that."""
    if op is ReduceOp.AVG:
        with torch.inference_mode(total.is_inference()):
            total.div_(n)


def assign(into: Tensor, value: Tensor) -> None:
    """Copy `value` in place, even if it is the same memory."""
    with torch.inference_mode(into.is_inference()):
        into.copy_(value)
