"""All-reduce and topology: estimate the time, use the nodes, choose an algorithm.

Guide: phase3_multi_node/guide/topology.md.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), sections 4 and 5; X. Jia et al. (arXiv 1807.11205), section
3.3, for the two levels.
Symbols: n ranks on q nodes of k ranks each, n = q k; S bytes in the tensor; α seconds
of latency; β seconds per byte; B = 1 / β. A message of s bytes takes α + β s.
Cost: messages that follow one another, and the bytes of each.

    naive                2 (n - 1) messages of S, all through rank 0
    ring                 2 (n - 1) of S / n
    recursive doubling   log2 n of S
    halving doubling     2 log2 n of S / 2, S / 4 … S / n and back to S / 2
    hierarchical         2 (k - 1) of S / k intra-node, 2 (q - 1) of S / n inter-node

`comm` has no collectives here, only send, recv, sendrecv, isend and irecv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.comm import Comm

AllReduce = Callable[[Comm, Tensor], None]
"""An all-reduce that ignores the nodes: the sum over a group, in place."""


class Link(NamedTuple):
    """The α–β model of a connection between two ranks."""

    alpha_s: float  # α: the latency
    bytes_per_s: float  # the bandwidth B = 1 / β

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of one message, α + β s, even for s = 0."""
        return self.alpha_s + num_bytes / self.bytes_per_s


class Cluster(NamedTuple):
    """n ranks on nodes: ranks 0 … k - 1 are on the first node, and so on.

    All ranks of a node share its uplink to the other nodes. A single rank is never
    faster than `inter_node`.
    """

    n: int
    node_size: int  # k; it divides n. 1: every rank has its own node
    intra_node: Link  # between two ranks of a node; unused where node_size is 1
    inter_node: Link  # between two ranks of different nodes
    uplink_bytes_per_s: float  # of a node; at least that of inter_node


class Levels(NamedTuple):
    """One rank's groups for an all-reduce in two levels, made once for all steps.

    Rail r is the group of the ranks with local rank r, one rank per node. The tensor
    has one chunk for each rail.
    """

    intra_node: Comm  # the ranks of this node; intra_node.rank is the local rank
    inter_node: Comm | None  # this rank's rail; None if its local rank has no rail
    num_rails: int  # the number of ranks on the smallest node


def make_levels(comm: Comm, nodes: Sequence[Sequence[int]]) -> Levels:
    """Make this rank's groups; collective, with the same `nodes` on every rank."""
    num_rails = min(map(len, nodes))
    own = next(i for i, node in enumerate(nodes) if comm.rank in node)
    intra_node = [comm.new_group(node) for node in nodes][own]
    rails = [[node[local_rank] for node in nodes] for local_rank in range(num_rails)]
    inter_node = [comm.new_group(rail) for rail in rails]
    assert intra_node
    rail = inter_node[intra_node.rank] if intra_node.rank < num_rails else None
    return Levels(intra_node, rail, num_rails)


# ── 3.6 estimate ────────────────────────────────────────────────────────────────────
def estimate_time(n: int, num_bytes: int, link: Link) -> dict[str, float]:
    """Estimate an all-reduce's seconds for "naive", "ring" and "recursive doubling".

    Every pair of ranks has its own `link`. Additions take no time. A message of 0 bytes
    takes α.

    naive: rank 0 receives the other tensors one after another, then sends the sum to
    each rank in turn. ring: your 3.3. recursive doubling: in every round each rank
    exchanges its partial sum with a partner and adds; a partial sum covers 2 ranks,
    then 4, 8 … If n is not a power of two, each rank beyond the largest power of two
    sends its tensor to a partner in one round before, and receives the sum in one
    round after.
    C1 The time of the naive all-reduce is estimated correctly.
    C2 The time of the ring is estimated correctly.
    C3 The time of recursive doubling is estimated correctly for any n.
    In torch.distributed: nothing; NCCL computes such a table when it starts
    Example: n = 8, 1 GB, α = 10 µs, B = 12.5 GB/s → 1.120, 0.140 and 0.240
    Cost: no message. Check: distlab check 3.6
    """
    ### BEGIN SOLUTION topology.predict
    #| for each algorithm: how many messages follow one another? how large is each?
    doublings = n.bit_length() - 1
    is_power = n == 2**doublings
    return {
        "naive": 2 * (n - 1) * link.message_s(num_bytes),
        "ring": 2 * (n - 1) * link.message_s(num_bytes / n),
        "recursive doubling": (
            (doublings if is_power else doublings + 2) * link.message_s(num_bytes)
        ),
    }
    ### END SOLUTION


# ── 3.7 two levels ──────────────────────────────────────────────────────────────────
def hierarchical(levels: Levels, tensor: Tensor, all_reduce: AllReduce) -> None:
    """Sum `tensor` over all ranks of all nodes, in place.

    Given: `tensor` is contiguous, of any shape and dtype. all_reduce(group, chunk) sums
    a chunk over a group, in place, with the same bits on every rank of the group. Call
    it for the inter-node stage. tensor.view(-1).tensor_split(num_rails) gives the
    chunks, as views.
    C1 Every rank ends up with the sum, and the result is bit-for-bit the same on all
       ranks.
    C2 The function works with nodes of different sizes, with nodes that have only one
       rank, and with a single node.
    C3 In the inter-node stage, which connects q nodes, a rank sends at most 2 (q - 1) /
       q times the size of one chunk.
    C4 If all nodes have k ranks, a rank sends at most 2 (k - 1) / k times S in the
       intra-node stages.
    In torch.distributed: nothing; NCCL detects the nodes itself
    Example: nodes 0 1 and 2 3 have two rails; chunk 0 goes between ranks 0 and 2,
    chunk 1 between ranks 1 and 3
    Cost: see the head of this file. Check: distlab check 3.7
    """
    ### BEGIN SOLUTION topology.hierarchical
    #| which rank of the node needs the node's sum of which chunk?
    #| what does that rank do with it? how do the other ranks get the result?
    intra_node, inter_node, num_rails = levels
    k, local_rank = intra_node.world_size, intra_node.rank
    chunks = list(tensor.view(-1).tensor_split(num_rails))
    chunks += [chunks[0][:0]] * (k - num_rails)  # local ranks without a rail: empty
    own = chunks[local_rank]
    recv_buffer = torch.empty_like(own)
    peers = [((local_rank + step) % k, (local_rank - step) % k) for step in range(1, k)]
    for dst, src in peers:
        intra_node.sendrecv(chunks[dst], dst, recv_buffer, src)
        own += recv_buffer
    if inter_node:
        all_reduce(inter_node, own)
    for dst, src in peers:
        intra_node.sendrecv(own, dst, chunks[src], src)
    ### END SOLUTION


# ── 3.8 choose ──────────────────────────────────────────────────────────────────────
def choose(cluster: Cluster, num_bytes: int) -> str:
    """Return the fastest of "naive", "ring", "recursive doubling" and "hierarchical".

    Given: the ring is in rank order. In recursive doubling the partners are 1, then 2,
    4, 8 … ranks away. The first three algorithms ignore the nodes. With node_size > 1,
    the size and the number of the nodes are powers of two. Additions take no time.
    C1 With one rank per node, the chosen algorithm takes at most 10 % longer than the
       fastest one.
    C2 The same holds if there are several ranks per node.
    In torch.distributed: nothing; NCCL_ALGO=Ring,Tree limits what NCCL may choose
    Example: 64 ranks, 10 µs, 12.5 GB/s, node_size = 1: recursive doubling for 64 kB,
    the ring for 64 MB
    Cost: no message; called once per bucket. Check: distlab check 3.8
    """
    ### BEGIN SOLUTION topology.choose
    #| estimate_time() assumes equal links. which messages use which link here?
    #| how many messages share the uplink at the same time?
    n, k, intra_node, inter_node, uplink = cluster
    num_nodes = n // k
    shared = Link(inter_node.alpha_s, min(inter_node.bytes_per_s, uplink / k))
    links = [intra_node] * (k > 1) + [inter_node] * (num_nodes > 1)
    in_node = estimate_time(k, num_bytes, intra_node)
    through_0 = (k - 1) * intra_node.message_s(num_bytes)
    through_0 += (n - k) * inter_node.message_s(num_bytes)
    seconds = {
        "naive": 2 * through_0,
        "ring": max(
            (estimate_time(n, num_bytes, link)["ring"] for link in links), default=0.0
        ),
        "recursive doubling": in_node["recursive doubling"]
        + estimate_time(num_nodes, num_bytes, shared)["recursive doubling"],
        "hierarchical": in_node["ring"]
        + estimate_time(num_nodes, num_bytes // k, shared)["ring"],
    }
    return min(seconds, key=lambda name: seconds[name])
    ### END SOLUTION


# ── 3.24 few messages ───────────────────────────────────────────────────────────────
### BEGIN SOLUTION-ONLY


class Fold(NamedTuple):
    """The fold to a power of two: `size` ranks stay active, the others are folded."""

    size: int
    new_rank: int  # among the active ranks; of a folded rank: its partner's
    partner: int | None  # the rank folded into this rank, or the other way round
    is_folded: bool

    def old_rank(self, new_rank: int, n: int) -> int:
        """Return the old rank with this new rank."""
        extra = n - self.size
        return 2 * new_rank if new_rank < extra else new_rank + extra


def fold_of(comm: Comm) -> Fold:
    """Fold every odd rank of the first 2 (n - size) ranks into the rank below."""
    n, rank = comm.world_size, comm.rank
    size: int = 2 ** (n.bit_length() - 1)
    extra = n - size
    if rank >= 2 * extra:
        return Fold(size, rank - extra, None, False)
    return Fold(size, rank // 2, rank ^ 1, rank % 2 == 1)


def fold_in(comm: Comm, fold: Fold, tensor: Tensor) -> None:
    """Have the partner of a folded rank add its tensor."""
    if fold.partner is not None:
        if fold.is_folded:
            comm.send(tensor, fold.partner)
        else:
            recv_buffer = torch.empty_like(tensor)
            comm.recv(recv_buffer, fold.partner)
            tensor += recv_buffer


def unfold(comm: Comm, fold: Fold, tensor: Tensor) -> None:
    """Have the partner of a folded rank send it the sum."""
    if fold.partner is not None:
        if fold.is_folded:
            comm.recv(tensor, fold.partner)
        else:
            comm.send(tensor, fold.partner)


### END SOLUTION-ONLY


def recursive_doubling(comm: Comm, tensor: Tensor) -> None:
    """Sum `tensor` over all ranks, in place, in few rounds. Let d = ⌊log2 n⌋.

    Given: `tensor` is contiguous, of any shape and dtype.
    C1 For any n and any number of elements, both functions leave every rank with the
       sum, and the result is bit-for-bit the same on all ranks.
    C2 recursive_doubling takes at most d = ⌊log2 n⌋ rounds with messages of S bytes,
       plus two more rounds if n is not 2^d.
    C3 With halving_doubling, each rank sends at most 2 d messages, plus one more if n
       is not 2^d.
    C4 With halving_doubling, each rank sends at most 2 (1 - 1 / 2^d) S bytes, plus
       another S bytes if n is not 2^d.
    In torch.distributed: nothing; MPICH's MPI_Allreduce does this for small tensors
    Example: n = 4: 0 and 1, 2 and 3 exchange and add; then 0 and 2, 1 and 3
    Cost: log2 n messages of S. Check: distlab check 3.24
    """
    ### BEGIN SOLUTION topology.halving_doubling
    #| a + b and b + a have the same bits. what does a rank without a partner do?
    fold = fold_of(comm)
    fold_in(comm, fold, tensor)
    recv_buffer = torch.empty_like(tensor)
    distance = 1
    while distance < fold.size and not fold.is_folded:
        partner = fold.old_rank(fold.new_rank ^ distance, comm.world_size)
        comm.sendrecv(tensor, partner, recv_buffer, partner)
        tensor += recv_buffer
        distance *= 2
    unfold(comm, fold, tensor)
    ### END SOLUTION


def halving_doubling(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place with the ring's bytes, but in 2 log2 n rounds.

    Given and clauses are those of recursive_doubling.

    In torch.distributed: nothing; MPICH's MPI_Allreduce does this for large tensors
    Example: n = 4: rank 0 sends its last half to 2, then its second quarter to 1, and
    keeps the first quarter. The second phase reverses these steps without additions.
    Cost: see the head of this file. Check: distlab check 3.24
    """
    ### BEGIN SOLUTION topology.halving_doubling
    #| keep one half, send the other half, until each rank has one chunk of the sum.
    #| which slice did it send last, and to which rank? it receives that slice first
    fold = fold_of(comm)
    fold_in(comm, fold, tensor)
    mine, sent = tensor.view(-1), []
    distance = fold.size // 2
    while distance and not fold.is_folded:
        partner = fold.old_rank(fold.new_rank ^ distance, comm.world_size)
        first, last = mine.tensor_split(2)
        mine, theirs = (last, first) if fold.new_rank & distance else (first, last)
        recv_buffer = torch.empty_like(mine)
        comm.sendrecv(theirs, partner, recv_buffer, partner)
        mine += recv_buffer
        sent.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(sent):
        comm.sendrecv(mine, partner, theirs, partner)
    unfold(comm, fold, tensor)
    ### END SOLUTION
