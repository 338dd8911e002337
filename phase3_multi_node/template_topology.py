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
    # TODO(topology.predict)
    # for each algorithm: how many messages follow one another? how large is each?
    raise NotImplementedError("topology.predict")


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
    # TODO(topology.hierarchical)
    # which rank of the node needs the node's sum of which chunk?
    # what does that rank do with it? how do the other ranks get the result?
    raise NotImplementedError("topology.hierarchical")


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
    # TODO(topology.choose)
    # estimate_time() assumes equal links. which messages use which link here?
    # how many messages share the uplink at the same time?
    raise NotImplementedError("topology.choose")


# ── 3.24 few messages ───────────────────────────────────────────────────────────────


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
    # TODO(topology.halving_doubling)
    # a + b and b + a have the same bits. what does a rank without a partner do?
    raise NotImplementedError("topology.halving_doubling")


def halving_doubling(comm: Comm, tensor: Tensor) -> None:
    """Sum over all ranks in place with the ring's bytes, but in 2 log2 n rounds.

    Given and clauses are those of recursive_doubling.

    In torch.distributed: nothing; MPICH's MPI_Allreduce does this for large tensors
    Example: n = 4: rank 0 sends its last half to 2, then its second quarter to 1, and
    keeps the first quarter. The second phase reverses these steps without additions.
    Cost: see the head of this file. Check: distlab check 3.24
    """
    # TODO(topology.halving_doubling)
    # keep one half, send the other half, until each rank has one chunk of the sum.
    # which slice did it send last, and to which rank? it receives that slice first
    raise NotImplementedError("topology.halving_doubling")
