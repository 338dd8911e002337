"""All-reduce on a ring, where all ranks send equally much and no link is a bottleneck.

Guide: phase3_multi_node/guide/ring_allreduce.md.
Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters
of workstations (JPDC 69, 2009), section 4.
Symbols: n = comm.world_size ranks; S = the bytes of the tensor; α = the latency of a
message in seconds; β = seconds per byte.
Cost: 2(n - 1) steps of S/n bytes: 2(n - 1)(α + β S/n). For any number of ranks, a rank
sends less than 2 S; in a star, rank 0 receives (n - 1) S.

    chunk     0      1      2          n = 3: the first half, reduce_scatter
    rank 0    .      .      2 →        each rank sends a chunk to the right, and adds
    rank 1    0 →    .      .          what comes from the left to its own chunk
    rank 2    .      1 →    .

`comm` has send, recv, sendrecv, isend and irecv, no collectives. It takes contiguous
tensors. The right neighbor of rank r is r + 1; that of the last rank is 0. `python`
with the name of this file draws your plan of 3.4.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.comm import Comm, Work


def chunk_bounds(length: int, num_chunks: int) -> list[tuple[int, int]]:
    """Split `length` elements into `num_chunks` chunks; return a (start, end) for each.

    C1 The chunks follow one another from 0 to length, so no element is lost or
       repeated.
    C2 No two chunks differ in size by more than one element.
    In torch.distributed: torch.tensor_split(tensor, n); not chunk(n), which may return
    fewer than n chunks
    Example: 10 in 4 → (0, 2) (2, 5) (5, 7) (7, 10); any chunks may be the longer ones.
    2 in 3 → (0, 0) (0, 1) (1, 2)
    Cost: none, nothing is sent. Check: distlab check 3.1
    """
    # TODO(ring_allreduce.chunk_bounds)
    # also for fewer elements than chunks: then some chunks are empty
    raise NotImplementedError("ring_allreduce.chunk_bounds")


def reduce_scatter(comm: Comm, tensor: Tensor) -> int:
    """Sum one chunk per rank over all ranks, in place; return this rank's chunk number.

    Given: `tensor` has one dimension, is contiguous, and has any number of elements,
    the same on all ranks. Its n chunks are those of chunk_bounds. Afterwards the other
    chunks may hold anything.

    C1 The chunk whose number is returned holds the sum, and each rank returns a
       different number.
    C2 `reduce_scatter` takes n - 1 steps. In each step, a rank sends one chunk to one
       neighbor while it receives a chunk from the other one. It always sends to the
       same neighbor.
    In torch.distributed: dist.reduce_scatter_tensor(output, input)
    Example: n = 2, tensors 1 2 and 10 20 → rank 0 has 11 . and returns 0, rank 1 has
    . 22 and returns 1; rank 0 may own chunk 1 instead
    Cost: n - 1 messages of S/n bytes per rank. Check: distlab check 3.2
    """
    # TODO(ring_allreduce.reduce_scatter)
    # in step 0 each rank sends a different chunk. which chunk does it send in step 1?
    # which chunk does it receive meanwhile?
    raise NotImplementedError("ring_allreduce.reduce_scatter")


def all_reduce(comm: Comm, tensor: Tensor, average: bool = False) -> None:
    """Replace every rank's `tensor` by the sum over all ranks, or the mean, in place.

    Given: any shape, strides and dtype, any number of elements, including none.

    C1 Every rank ends up with the sum in the tensor that was passed in, and the result
       is bit-for-bit the same on all ranks.
    C2 With average=True, the result is the mean. `all_reduce` then raises ValueError
       for integer dtypes before it sends any message.
    C3 `all_reduce` takes 2(n - 1) steps. In each step, a rank sends one chunk to one
       neighbor while it receives a chunk from the other one. It always sends to the
       same neighbor.
    In torch.distributed: dist.all_reduce(tensor)
    Example: n = 3, tensors 1 2, 10 20 and 100 200 → 111 222 on every rank
    Cost: 2(n - 1) messages of S/n bytes per rank. Check: distlab check 3.3
    """
    if average and tensor.dtype is torch.float16:  # the sum may be inf, the mean not
        wide = tensor.detach().float()
        all_reduce(comm, wide, average=True)
        tensor.detach().copy_(wide)
        return
    # TODO(ring_allreduce.all_reduce)
    # after reduce_scatter every rank has one finished chunk. how does that chunk reach
    # all other ranks, one step at a time? (.contiguous() returns the tensor itself, or
    # a copy if the tensor is non-contiguous)
    raise NotImplementedError("ring_allreduce.all_reduce")


def split_segments(tensor: Tensor, num_chunks: int, segment_bytes: int) -> list[Tensor]:
    """Return all segments of `tensor` as views: those of chunk 0, then of chunk 1, ….

    All chunks have equally many segments, of at most `segment_bytes` or one element.
    """
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), num_chunks)]
    longest = max(1, segment_bytes // tensor.element_size())
    num_segments = max(1, -(-max(map(len, chunks)) // longest))  # rounded up
    return [
        chunk[start:end]
        for chunk in chunks
        for start, end in chunk_bounds(len(chunk), num_segments)
    ]


class Op(NamedTuple):
    """One operation of a plan.

    `buffer` is the number of a receive buffer, 0 or 1. With None, the operation works
    on the segment itself.

    Op("irecv", 5, 0)   start to receive, from the left, what is for segment 5
    Op("isend", 5)      start to send segment 5 to the right
    Op("wait", 5, 0)    wait for the irecv or isend of the same segment and buffer
    Op("add", 5, 0)     segment 5 += receive buffer 0
    """

    kind: str
    segment: int
    buffer: int | None = None


@functools.cache
def segment_plan(rank: int, world_size: int, num_segments: int) -> list[Op]:
    """Return the operations of `rank` in a ring all-reduce, in order.

    Given: world_size is at least 2. Each chunk has `num_segments` segments; those of
    chunk c are numbered from c · num_segments. There are two receive buffers. The k-th
    isend of a rank meets the k-th irecv of its right neighbor.

    C1 After all ranks have run their plans, each segment holds the sum on every rank,
       and each rank's values have been added to it exactly once.
    C2 Between an isend or irecv and its wait, no other operation uses the same buffer
       or segment.
    C3 A rank sends at most 2(n - 1) · num_segments segments.
    C4 While a rank adds a segment, two messages are in flight. It is sending another
       segment, and it is receiving the next segment that it will add, if there is one.
    In torch.distributed: nothing; it is inside dist.all_reduce
    Example: rank 0 of 2, one segment in each chunk → irecv 0 in buffer 0, isend 1,
    wait 0 in buffer 0, add 0, isend 0, wait 1, irecv 1, wait 1, wait 0
    Cost: none, nothing is sent. Check: distlab check 3.4
    """
    # TODO(ring_allreduce.segment_plan)
    # list the segments that arrive, in order, in all 2(n - 1) steps. which of them are
    # added, and which are already sums? what must be waited for before each irecv?
    raise NotImplementedError("ring_allreduce.segment_plan")


def pipelined_all_reduce(
    comm: Comm, tensor: Tensor, segment_bytes: int = 1 << 21
) -> None:
    """Replace every rank's `tensor` by the sum, adding while messages are in flight.

    Given: `tensor` has one dimension, is contiguous, and has any number of elements,
    the same on all ranks. No message is longer than `segment_bytes`, or one element.

    C1 Every rank ends up with the sum in the tensor that was passed in, and the result
       is bit-for-bit the same on all ranks.
    C2 Until its wait() returns, the tensor of an isend is not written, and the tensor
       of an irecv is neither written nor read.
    C3 A rank sends no more bytes than it would with all_reduce.
    C4 While a rank adds a segment, it is already receiving the next one and sending
       another.
    In torch.distributed: dist.all_reduce
    Cost: a time of about 2(n - 1)/n · β S for large S: the additions overlap with the
    messages. Check: distlab check 3.5
    """
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        return
    if n == 2 and tensor.nbytes <= segment_bytes:
        # As many bytes as the ring's two steps, in one; a + b has the bits of b + a.
        recv_buffer = torch.empty_like(tensor)
        comm.sendrecv(tensor, right, recv_buffer, left)
        tensor += recv_buffer
        return
    segments = split_segments(tensor, n, segment_bytes)
    recv_buffers = tensor.new_empty(2, max(map(len, segments)))
    plan = segment_plan(rank, n, len(segments) // n)
    # TODO(ring_allreduce.segments)
    # run the operations one by one. which tensor does an Op work on, and how long is
    # it? where does its wait find the Work?
    raise NotImplementedError("ring_allreduce.segments")


def draw(plan: Sequence[Op]) -> str:
    """Draw a plan: a row per operation, a column per segment and receive buffer.

    <  irecv starts    >  isend starts    |  in flight    w  waited for    +  added
    """
    count = max(op.segment for op in plan) + 1
    names = [f"{number}" for number in range(count)] + ["b0", "b1"]
    lines = [" " * 18 + " ".join(f"{name:>2}" for name in names)]
    in_flight: set[int] = set()
    for number, (kind, segment, buffer) in enumerate(plan):
        column = segment if buffer is None else count + buffer
        row = ["|" if mark in in_flight else "." for mark in range(count + 2)]
        if kind == "add":
            row[segment] = row[column] = "+"
        else:
            row[column] = {"irecv": "<", "isend": ">", "wait": "w"}[kind]
            in_flight ^= {column}
        where = "" if buffer is None else f" b{buffer}"
        name = f"{number:3} {kind:5} {segment}{where}"
        lines.append(f"{name:18}" + " ".join(f"{mark:>2}" for mark in row))
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(
            "rank 0 of 3, two segments per chunk", draw(segment_plan(0, 3, 2)), sep="\n"
        )
    except NotImplementedError as missing:
        print(f"{missing} is not written yet")
