"""All-reduce as a ring: every rank sends the same, and no rank is the busy one.

Guide: phase3_multi_node/guide/ring_allreduce.md.
Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters
of workstations (JPDC 69, 2009), section 4; NCCL runs the same ring.
Symbols: n = comm.world_size ranks; S = the bytes of the tensor; α = what a message
costs before its first byte arrives, B = bytes per second.
Cost: 2(n - 1) steps of S/n bytes: 2(n - 1)(α + S/(n B)). However many ranks there are,
each sends less than 2 S; a rank that collects everything receives (n - 1) S.

    chunk     0      1      2          n = 3: the first half, reduce_scatter
    rank 0    .      .      2 →        each rank sends a chunk to the right, and adds
    rank 1    0 →    .      .          what comes from the left to its own
    rank 2    .      1 →    .

`comm` has send, recv, sendrecv, isend and irecv, no collectives. The tensors that it
takes are contiguous. The right neighbor of rank r is r + 1; that of the last is 0.
"""

from __future__ import annotations

from itertools import chain, pairwise

import torch
from torch import Tensor

from distlab.comm import Comm, Work


def chunk_bounds(length: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where to cut `length` elements into `num_chunks` chunks: a (start, end) for each.

    C1 the chunks follow each other from 0 to length: nothing is lost, nothing is twice
    C2 no two sizes differ by more than one
    In torch.distributed: torch.tensor_split(tensor, n); not chunk(n), which may give
    fewer than n
    Example: 10 in 4 → (0, 2) (2, 5) (5, 7) (7, 10); other places for the longer ones
    are as good. 2 in 3 → (0, 0) (0, 1) (1, 2)
    Cost: none, nothing is sent. Check: distlab check 3.1
    """
    # TODO(ring_allreduce.chunk_bounds)
    # also for fewer elements than chunks: then some chunks are empty
    raise NotImplementedError("ring_allreduce.chunk_bounds")


def reduce_scatter(comm: Comm, tensor: Tensor) -> int:
    """Sum one chunk per rank over all ranks, in place; return the number of the chunk.

    Given: `tensor` has one dimension, is contiguous, and has any number of elements,
    the same on all ranks. Its n chunks are those of chunk_bounds. Afterwards the other
    chunks may hold anything.

    C1 the chunk with the returned number holds the sum; every rank returns another one
    C2 n - 1 steps; in each, a rank sends one chunk to its one neighbor in the ring
    In torch.distributed: dist.reduce_scatter_tensor(output, input)
    Example: n = 2, tensors 1 2 and 10 20 → rank 0 has 11 . and returns 0, rank 1 has
    . 22 and returns 1; the other way round is as good
    Cost: n - 1 messages of S/n bytes per rank. Check: distlab check 3.2
    """
    # TODO(ring_allreduce.reduce_scatter)
    # in step 0 each rank sends one chunk, another one on each rank. which one does
    # it send in step 1? and which chunk comes in meanwhile?
    raise NotImplementedError("ring_allreduce.reduce_scatter")


def all_reduce(comm: Comm, tensor: Tensor, average: bool = False) -> None:
    """Replace every rank's `tensor` by the sum over all ranks, or the mean, in place.

    Given: any shape, any strides, any number of elements, none at all among them.

    C1 every rank has the sum, the very same bits, in the caller's own tensor
    C2 with average=True, the mean; of a dtype of whole numbers: ValueError
    C3 2(n - 1) steps; in each, a rank sends one chunk to its one neighbor in the ring
    In torch.distributed: dist.all_reduce(tensor)
    Example: n = 3, tensors 1 2, 10 20 and 100 200 → 111 222 on every rank
    Cost: 2(n - 1) messages of S/n bytes per rank. Check: distlab check 3.3
    """
    # TODO(ring_allreduce.all_reduce)
    # after reduce_scatter every rank has one chunk that is done. how does it get to
    # all the others, one step at a time? (a tensor with strides: .contiguous() is
    # the tensor itself or a copy)
    raise NotImplementedError("ring_allreduce.all_reduce")


def cut(tensor: Tensor, num_chunks: int, segment_bytes: int) -> list[list[Tensor]]:
    """The chunks of `tensor`, each as the list of its segments, which are views.

    All chunks have equally many segments, of at most `segment_bytes` or one element.
    """
    chunks = [tensor[start:end] for start, end in chunk_bounds(len(tensor), num_chunks)]
    longest = max(1, segment_bytes // tensor.element_size())
    num_segments = max(1, -(-max(map(len, chunks)) // longest))  # rounded up
    return [
        [chunk[start:end] for start, end in chunk_bounds(len(chunk), num_segments)]
        for chunk in chunks
    ]


def pipelined_all_reduce(
    comm: Comm, tensor: Tensor, segment_bytes: int = 1 << 21
) -> None:
    """Replace every rank's `tensor` by the sum, and add while messages are under way.

    Given: `tensor` has one dimension, is contiguous, and has any number of elements,
    the same on all ranks. No message is longer than `segment_bytes`, or one element.

    C1 every rank has the sum, the very same bits, in the caller's own tensor
    C2 from isend or irecv until its wait, a tensor is left alone
    C3 a rank sends no more bytes than with all_reduce
    C4 while a rank adds, the next segments are on their way to it and from it
    In torch.distributed: dist.all_reduce; gloo and NCCL cut into segments, too
    Cost: a time of 2(n - 1)/n · S/B: the additions hide. Check: distlab check 3.4
    """
    # TODO(ring_allreduce.segments)
    # what can be sent on as soon as it is there? before a tensor is received into,
    # or added to, what must have been waited for? (two boxes: one is being filled
    # while the other one is added)
    raise NotImplementedError("ring_allreduce.segments")
