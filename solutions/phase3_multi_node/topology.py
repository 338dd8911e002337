"""Which all-reduce on which network: foretold, built for islands, and chosen.

Guide: phase3_multi_node/guide/topology.md.
Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), sections 4 and 5; X. Jia et al. (arXiv 1807.11205), section
3.3, for the two levels.
Symbols: n ranks; S bytes in the tensor; a message of s bytes takes α + s / β seconds;
p islands of k ranks each, so that n = p k.
Cost: counted in messages one after another, and in the bytes of each.

    naive                2 (n - 1) messages of S, all through rank 0
    ring                 2 (n - 1) of S / n
    recursive doubling   log2 n of S
    halving doubling     2 log2 n of S / 2, S / 4 … S / n and back to S / 2
    hierarchical         2 (k - 1) of S / k inside, 2 (p - 1) of S / k p between

`comm` has no collectives here, only send, recv, sendrecv, isend and irecv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.comm import Comm

AllReduce = Callable[[Comm, Tensor], None]
"""Any all-reduce, for ranks that are all alike: the sum, in place."""


class Link(NamedTuple):
    """How long messages take from one rank to another."""

    alpha_s: float  # a message without bytes
    bytes_per_s: float  # β

    def message_s(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.alpha_s + num_bytes / self.bytes_per_s


class Cluster(NamedTuple):
    """n ranks in islands of neighbors: 0 … k - 1 are the first one, and so on.

    All ranks of an island share its uplink: that is as much as they can send to other
    islands in a second, all together. A rank alone is never faster than `between`.
    """

    n: int
    island_size: int  # k; it divides n. 1: no two ranks are close
    inside: Link  # between two ranks of an island; without islands, of no meaning
    between: Link  # between two ranks of different islands
    uplink_bytes_per_s: float


class Levels(NamedTuple):
    """One rank's groups, for an all-reduce in two levels; made once, used every step.

    The tensor is cut into lanes, one for each place that every island has. Lane l
    is what the ranks at place l, one of each island, have to do with each other.
    """

    inside: Comm  # the ranks of this rank's island; inside.rank is its place
    across: Comm | None  # those at its place, one per island; None beyond the lanes
    num_lanes: int  # as many as the smallest island has ranks


def make_levels(comm: Comm, islands: Sequence[Sequence[int]]) -> Levels:
    """This rank's groups; collective: every rank calls it with the same `islands`."""
    num_lanes = min(map(len, islands))
    mine = next(i for i, island in enumerate(islands) if comm.rank in island)
    inside = [comm.new_group(island) for island in islands][mine]
    places = [[island[place] for island in islands] for place in range(num_lanes)]
    across = [comm.new_group(ranks) for ranks in places]
    assert inside
    has_lane = inside.rank < num_lanes
    return Levels(inside, across[inside.rank] if has_lane else None, num_lanes)


# ── 3.6 before any run ──────────────────────────────────────────────────────────────


def predict(n: int, num_bytes: int, link: Link) -> dict[str, float]:
    """Seconds that an all-reduce takes: "naive", "ring" and "recursive doubling".

    Every pair of ranks is joined by a `link` like this one. Adding takes no time.

    naive: rank 0 receives the others' tensors, one after another, and sends the sum to
    them, one after another. ring: your 3.3. recursive doubling: in every step each rank
    swaps all it has summed up with a partner; after one step 2 ranks know of each
    other, then 4, 8 … If n is no power of two, the ranks beyond the largest one give
    theirs to a partner first, in one step, and get the sum from it in a last one.

    C1 naive   C2 ring   C3 recursive doubling, for any n
    In torch.distributed: nothing; NCCL works out such a table when it starts
    Example: n = 8, 1 GB, α = 10 µs, β = 12.5 GB/s → 1.120, 0.140 and 0.240
    Cost: nothing is sent. Check: distlab check 3.6
    """
    ### BEGIN SOLUTION topology.predict
    #| for each of the three: how many messages follow one another, how large are they?
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


# ── 3.7 inside, across, and back ────────────────────────────────────────────────────


def hierarchical(levels: Levels, tensor: Tensor, all_reduce: AllReduce) -> None:
    """In place, the sum over all ranks of all islands.

    Given: `tensor` is contiguous, with any number of elements. all_reduce(group, part)
    sums a part up over a group, in place, with the same bits on every rank of it.
    tensor.view(-1).tensor_split(num_lanes) cuts the tensor into lanes, as views.

    C1 every rank has the sum, the same bits everywhere
    C2 islands of different sizes, of one rank; one island alone
    C3 to other islands a rank sends at most 2 (p - 1) / p of a lane
    C4 if all islands have k ranks: inside, a rank sends at most 2 (k - 1) / k of S
    In torch.distributed: nothing; NCCL does it by itself, from what it finds out
    Example: islands 0 1 and 2 3: two lanes, lane 0 between 0 and 2, lane 1 between 1
    and 3
    Cost: that of the head of this file. Check: distlab check 3.7
    """
    ### BEGIN SOLUTION topology.hierarchical
    #| who of an island is to have which lane, summed up over the island?
    #| what happens to it then, and how do the others of the island get it?
    inside, across, num_lanes = levels
    k, place = inside.world_size, inside.rank
    lanes = list(tensor.view(-1).tensor_split(num_lanes))
    lanes += [lanes[0][:0]] * (k - num_lanes)  # places without a lane: nothing
    mine = lanes[place]
    box = torch.empty_like(mine)
    around = [((place + step) % k, (place - step) % k) for step in range(1, k)]
    for dst, src in around:
        inside.sendrecv(lanes[dst], dst, box, src)
        mine += box
    if across:
        all_reduce(across, mine)
    for dst, src in around:
        inside.sendrecv(mine, dst, lanes[src], src)
    ### END SOLUTION


# ── 3.8 which one ───────────────────────────────────────────────────────────────────


def choose(cluster: Cluster, num_bytes: int) -> str:
    """The fastest: "naive", "ring", "recursive doubling" or "hierarchical".

    Given: of those that take the same time, any is right. The ring goes round in
    the order of the ranks. In recursive doubling the partners are 1, then 2, 4, 8 …
    ranks away. The first three know nothing of islands. With islands, their size and
    their number are powers of two. Adding takes no time.

    C1 without islands: what it names takes at most 10 % longer than the best of them
    C2 on islands: the same
    In torch.distributed: NCCL_ALGO=Ring,Tree overrules what NCCL would choose
    Example: 64 ranks, 10 µs, 12.5 GB/s, island_size = 1: recursive doubling for 64 kB,
    the ring for 64 MB
    Cost: nothing is sent; asked once per bucket. Check: distlab check 3.8
    """
    ### BEGIN SOLUTION topology.choose
    #| predict() knows what each takes on links alike. which messages go over which
    #| link here, and how many at once have to share the uplink?
    n, k, inside, between, uplink = cluster
    p = n // k
    crowded = Link(between.alpha_s, min(between.bytes_per_s, uplink / k))
    links = [inside] * (k > 1) + [between] * (p > 1)
    in_island = predict(k, num_bytes, inside)
    through_0 = (k - 1) * inside.message_s(num_bytes)
    through_0 += (n - k) * between.message_s(num_bytes)
    seconds = {
        "naive": 2 * through_0,
        "ring": max(
            (predict(n, num_bytes, link)["ring"] for link in links), default=0.0
        ),
        "recursive doubling": in_island["recursive doubling"]
        + predict(p, num_bytes, crowded)["recursive doubling"],
        "hierarchical": in_island["ring"] + predict(p, num_bytes // k, crowded)["ring"],
    }
    return min(seconds, key=lambda name: seconds[name])
    ### END SOLUTION


# ── 3.24 few messages ───────────────────────────────────────────────────────────────
### BEGIN SOLUTION-ONLY


class Team(NamedTuple):
    """The largest power of two of ranks, numbered anew; the others stand beside."""

    size: int
    place: int  # of this rank or, if it stands beside, of its partner
    partner: int | None  # who stands beside this rank, or whom it stands beside
    is_beside: bool

    def rank_at(self, place: int, n: int) -> int:
        """Who is at this place."""
        extra = n - self.size
        return 2 * place if place < extra else place + extra


def team_of(comm: Comm) -> Team:
    """Of the first ranks every second one stands beside, until the rest fits."""
    n, rank = comm.world_size, comm.rank
    size: int = 2 ** (n.bit_length() - 1)
    extra = n - size
    if rank >= 2 * extra:
        return Team(size, rank - extra, None, False)
    return Team(size, rank // 2, rank ^ 1, rank % 2 == 1)


def gather_in(comm: Comm, team: Team, tensor: Tensor) -> None:
    """Those beside hand in theirs."""
    if team.partner is not None:
        if team.is_beside:
            comm.send(tensor, team.partner)
        else:
            box = torch.empty_like(tensor)
            comm.recv(box, team.partner)
            tensor += box


def hand_out(comm: Comm, team: Team, tensor: Tensor) -> None:
    """And get the sum."""
    if team.partner is not None:
        if team.is_beside:
            comm.recv(tensor, team.partner)
        else:
            comm.send(tensor, team.partner)


### END SOLUTION-ONLY


def recursive_doubling(comm: Comm, tensor: Tensor) -> None:
    """In place, the sum over all ranks, in as few messages after one another as can be.

    C1 both functions: every rank has the sum, the same bits everywhere, for any n and
    any number of elements
    C2 recursive_doubling: ⌊log2 n⌋ rounds; two more where n is no power of two
    C3 halving_doubling: at most 2 ⌊log2 n⌋ messages per rank, one more for the others
    C4 halving_doubling: a rank sends at most 2 (m - 1) / m of S, m being the largest
    power of two up to n; and S more where that is not n
    In torch.distributed: nothing; MPI_Allreduce does this for small tensors
    Example: n = 4: 0 and 1, 2 and 3 swap and add; then 0 and 2, 1 and 3
    Cost: log2 n messages of S. Check: distlab check 3.24
    """
    ### BEGIN SOLUTION topology.halving_doubling
    #| a + b and b + a have the same bits. what do the ranks do that have no partner?
    team = team_of(comm)
    gather_in(comm, team, tensor)
    box = torch.empty_like(tensor)
    distance = 1
    while distance < team.size and not team.is_beside:
        partner = team.rank_at(team.place ^ distance, comm.world_size)
        comm.sendrecv(tensor, partner, box, partner)
        tensor += box
        distance *= 2
    hand_out(comm, team, tensor)
    ### END SOLUTION


def halving_doubling(comm: Comm, tensor: Tensor) -> None:
    """In place, the sum over all ranks: as few bytes as the ring, in 2 log2 n steps.

    Given: `tensor` is contiguous. The clauses are those of recursive_doubling.

    In torch.distributed: nothing; MPI_Allreduce does this for large tensors
    Example: n = 4: 0 sends its last half to 2, then the second quarter to 1; it has the
    first quarter of the sum, and the way back is the same without adding
    Cost: the head of this file. Check: distlab check 3.24
    """
    ### BEGIN SOLUTION topology.halving_doubling
    #| keep one half, give away the other: until each rank has one chunk of the sum.
    #| what did it give away last, and to whom? from there it gets it back
    team = team_of(comm)
    gather_in(comm, team, tensor)
    mine, way_back = tensor.view(-1), []
    distance = team.size // 2
    while distance and not team.is_beside:
        partner = team.rank_at(team.place ^ distance, comm.world_size)
        first, last = mine.tensor_split(2)
        mine, theirs = (last, first) if team.place & distance else (first, last)
        box = torch.empty_like(mine)
        comm.sendrecv(theirs, partner, box, partner)
        mine += box
        way_back.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(way_back):
        comm.sendrecv(mine, partner, theirs, partner)
    hand_out(comm, team, tensor)
    ### END SOLUTION
