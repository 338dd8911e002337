"""Explicit collectives, built from send and recv: who sends what to whom, and when.

Each runs on every transport with real tensors, and in the simulator also with sizes
only. There they serve as oracles, because their time is known from a formula in
`closed_forms`.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), sections 4 and 5; P. Patarasuk, X. Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009), for the ring.
Symbols: n ranks on q nodes; S bytes in the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm import Comm

# ── the ring ────────────────────────────────────────────────────────────────────────


def ring_reduce_scatter(
    comm: Comm, chunks: Sequence[Tensor], ring: Sequence[int] = ()
) -> None:
    """Turn chunk p of the rank at place p into the sum over the ring, in place.

    Afterwards, the other chunks hold no useful values. `ring` has the ranks in order,
    and defaults to all of them.

        place    0           1           2          n = 3, chunks a b c
        step 1   c ────────▶ a ────────▶ b ────────▶ place 0
        step 2   b ────────▶ c ────────▶ a ────────▶ place 0
        at end   a           b           c           summed up
    """
    ring = ring or range(comm.world_size)
    n, place = len(ring), ring.index(comm.rank)
    right, left = ring[(place + 1) % n], ring[place - 1]
    for step in range(n - 1):
        out, into = (place - step - 1) % n, (place - step - 2) % n
        total = chunks[into]
        box = room_for(total)
        comm.sendrecv(chunks[out], right, box, left)
        total += box


def ring_all_gather(
    comm: Comm, chunks: Sequence[Tensor], ring: Sequence[int] = ()
) -> None:
    """Fill every rank's chunk p with that of the rank at place p, in place.

    place    0           1           2          n = 3, chunks a b c
    step 1   a ────────▶ b ────────▶ c ────────▶ place 0
    step 2   c ────────▶ a ────────▶ b ────────▶ place 0
    """
    ring = ring or range(comm.world_size)
    n, place = len(ring), ring.index(comm.rank)
    right, left = ring[(place + 1) % n], ring[place - 1]
    for step in range(n - 1):
        out, into = (place - step) % n, (place - step - 1) % n
        comm.sendrecv(chunks[out], right, chunks[into], left)


def ring_all_reduce(comm: Comm, tensor: Tensor, ring: Sequence[int] = ()) -> None:
    """Sum `tensor` over all ranks, in place, with 2 (n - 1) steps of S / n bytes.

    Every rank sends 2 (n - 1) / n · S bytes. In any all-reduce, the busiest rank sends
    at least as much.
    """
    chunks = split(tensor, len(ring) or comm.world_size)
    ring_reduce_scatter(comm, chunks, ring)
    ring_all_gather(comm, chunks, ring)


# ── halving and doubling ────────────────────────────────────────────────────────────


def recursive_doubling_all_reduce(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place, in log2 n steps with the full tensor.

        distance 1   0 ◀─▶ 1    2 ◀─▶ 3        each pair then has the same sum
        distance 2   0 ◀─────▶ 2   1 ◀─────▶ 3

    No all-reduce has fewer steps, so this one suits small tensors.

    Raises:
        ValueError: the number of ranks isn't a power of two.
    """
    require_power_of_two(comm.world_size, "recursive doubling")
    box = room_for(tensor)
    distance = 1
    while distance < comm.world_size:
        partner = comm.rank ^ distance
        comm.sendrecv(tensor, partner, box, partner)
        tensor += box
        distance *= 2


def rabenseifner_all_reduce(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place: halve and add, then double and collect.

        reduce-scatter   distance n/2: swap halves, keep one and add the partner's
                         distance n/4: the same with half of that …   → S/n, summed
        all-gather       the same way back, without adding

    It takes log2 n steps each way, and sends no more bytes than the ring.

    Raises:
        ValueError: the number of ranks isn't a power of two.
    """
    require_power_of_two(comm.world_size, "Rabenseifner's algorithm")
    mine, way_back = tensor, []
    distance = comm.world_size // 2
    while distance:
        partner = comm.rank ^ distance
        low, high = split(mine, 2)
        mine, theirs = (high, low) if comm.rank & distance else (low, high)
        box = room_for(mine)
        comm.sendrecv(theirs, partner, box, partner)
        mine += box
        way_back.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(way_back):
        comm.sendrecv(mine, partner, theirs, partner)


# ── trees ───────────────────────────────────────────────────────────────────────────


def tree_broadcast(comm: Comm, tensor: Tensor, src: int = 0) -> None:
    """Copy rank `src`'s `tensor` to every rank in place, down a binomial tree.

        0 ──▶ 4 ──▶ 6 ──▶ 7      step 1: 0 → 4            counted from src
        │     └───▶ 5            step 2: 0 → 2, 4 → 6
        ├───▶ 2 ──▶ 3            step 3: 0 → 1, 2 → 3, 4 → 5, 6 → 7
        └───▶ 1

    Every rank that has the tensor passes it on, so each step doubles their number.
    """
    n = comm.world_size
    me = (comm.rank - src) % n
    reach = _subtree(me, n)
    if me:
        comm.recv(tensor, (me - reach + src) % n)
    while reach > 1:
        reach //= 2
        if me + reach < n:
            comm.send(tensor, (me + reach + src) % n)


def tree_reduce(comm: Comm, tensor: Tensor, dst: int = 0) -> None:
    """Sum over all ranks in place on `dst`; others end up with their subtree's sum.

    It uses the tree of `tree_broadcast` upwards, beginning with the nearest child.
    """
    n = comm.world_size
    me = (comm.rank - dst) % n
    box = room_for(tensor)
    step = 1
    while step < _subtree(me, n):
        if me + step < n:
            comm.recv(box, (me + step + dst) % n)
            tensor += box
        step *= 2
    if me:
        comm.send(tensor, (me - step + dst) % n)


def tree_all_reduce(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place, up a tree to rank 0 and down again."""
    tree_reduce(comm, tensor)
    tree_broadcast(comm, tensor)


def _subtree(me: int, n: int) -> int:
    """Return the size of `me`'s subtree at most: its lowest bit, or all for 0."""
    return me & -me if me else 1 << (n - 1).bit_length()


# ── two levels, and one rank that serves all ────────────────────────────────────────


def hierarchical_all_reduce(comm: Comm, tensor: Tensor, node_size: int) -> None:
    """Sum over all ranks in place, with few inter-node bytes.

        node 0   0 ─ 1      1. intra-node reduce-scatter: a chunk of the sum each
                 │   │      2. inter-node all-reduce of each chunk, on its rail
        node 1   2 ─ 3      3. intra-node all-gather

    Inter-node, each rank sends 2 (q-1) / q of its chunk of S / node_size bytes.

    Raises:
        ValueError: node_size doesn't divide the number of ranks.
    """
    n = comm.world_size
    if node_size < 1 or n % node_size:
        raise ValueError(f"{n} ranks do not fill nodes of {node_size}")
    start = comm.rank // node_size * node_size
    node = range(start, start + node_size)
    rail = range(comm.rank % node_size, n, node_size)
    chunks = split(tensor, node_size)
    ring_reduce_scatter(comm, chunks, node)
    ring_all_reduce(comm, chunks[comm.rank - start], rail)
    ring_all_gather(comm, chunks, node)


def parameter_server(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place: all send to rank 0, which sends the sum back.

    1 ──╲            ╱──▶ 1
    2 ───▶ 0 adds up ───▶ 2
    3 ──╱            ╲──▶ 3
    """
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    others = range(1, comm.world_size)
    boxes = [room_for(tensor) for _ in others]
    pushes = [comm.irecv(box, src) for src, box in zip(others, boxes, strict=True)]
    for push, box in zip(pushes, boxes, strict=True):
        push.wait()
        tensor += box
    for reply in [comm.isend(tensor, dst) for dst in others]:
        reply.wait()


def split(tensor: Tensor, parts: int) -> Sequence[Tensor]:
    """Return views of this many parts, in order, whose sizes differ by at most one."""
    if isinstance(tensor, Tensor):
        return tensor.view(-1).tensor_split(parts)
    return tensor.chunk(parts)  # of a size without content


def room_for(tensor: Tensor) -> Tensor:
    """Return a buffer into which you can receive a message of that size."""
    # A size without content has nothing that would be overwritten.
    return torch.empty_like(tensor) if isinstance(tensor, Tensor) else tensor


def require_power_of_two(n: int, what: str) -> None:
    """Require a power of two, because some schedules pair ranks again and again.

    Raises:
        ValueError: n isn't 1, 2, 4, 8, …
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"{what} needs 2, 4, 8, … ranks, not {n}")
