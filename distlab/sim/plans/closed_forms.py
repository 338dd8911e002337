"""Formulas for how long the explicit schedules take, and for how long any must take.

Symbols: n ranks on q nodes of k; S = num_bytes of the full tensor; alpha seconds per
message and beta seconds per byte, of an `AlphaBeta`: alpha_s and 1 / bytes_per_s; m
microbatches, p stages, v model chunks. All results are seconds.

    ring reduce-scatter, all-gather   (n-1) (alpha + beta S / n)
    ring all-reduce                 2 (n-1) (alpha + beta S / n)
    recursive doubling              log2 n  (alpha + beta S)            n = 2, 4, 8, …
    Rabenseifner                  2 log2 n · alpha + 2 (n-1)/n · beta S n = 2, 4, 8, …
    tree broadcast, reduce         ⌈log2 n⌉ (alpha + beta S)
    tree all-reduce              2 ⌈log2 n⌉ (alpha + beta S)
    hierarchical                  2 (k-1) (alpha + beta S / k)          intra-node
                                + 2 (q-1) (alpha + beta S / n)          inter-node
    parameter server              2 (alpha + beta (n-1) S)
    GPipe                        (m + p - 1) (t_f + t_b) + 2 (p-1) hop
    1F1B                         (m + p - 1) (t_f + t_b)                hop = 0
    interleaved 1F1B, v chunks  (mv + p - 1) (t_f + t_b)    of a chunk, hop = 0

    any all-reduce         at least  ⌈log2 n⌉ · alpha   and   2 (n-1)/n · beta S

They count the time on the wires, while additions take no time. All chunks must have the
same size, and if a formula doesn't hold for some n, it raises an error. The simulator
counts in whole picoseconds, so a message may differ from its formula by half of one.

Source: R. Thakur, R. Rabenseifner, W. Gropp (2005), sections 4 and 5; E. Chan et al.,
"Collective communication: theory, practice, and experience" (2007), section 3, for the
lower bounds; Y. Huang et al., "GPipe" (2019) and D. Narayanan et al. (2019, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from distlab.sim.net.links import AlphaBeta
from distlab.sim.plans.schedules import require_power_of_two


def ring_reduce_scatter_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds of n - 1 steps of one chunk; the all-gather takes as long.

    Raises:
        ValueError: the chunks would differ in size.
    """
    require_equal_chunks(n, num_bytes)
    return (n - 1) * net.message_s(num_bytes / n)


def ring_all_reduce_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds of a reduce-scatter and an all-gather.

    Raises:
        ValueError: the chunks would differ in size.
    """
    return 2 * ring_reduce_scatter_s(n, num_bytes, net)


def recursive_doubling_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds of log2 n steps with the full tensor.

    Raises:
        ValueError: n isn't a power of two.
    """
    require_power_of_two(n, "recursive doubling")
    return math.log2(n) * net.message_s(num_bytes)


def rabenseifner_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds of log2 n steps with S/2, S/4, … S/n, and as many back.

    Raises:
        ValueError: n isn't a power of two, or the chunks would differ in size.
    """
    require_power_of_two(n, "Rabenseifner's algorithm")
    require_equal_chunks(n, num_bytes)
    bytes_s = num_bytes / net.bytes_per_s
    return 2 * math.log2(n) * net.alpha_s + 2 * (n - 1) / n * bytes_s


def tree_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds of a tree whose root talks to ⌈log2 n⌉ ranks in turn.

    This holds for a broadcast and for a reduce, with any n.
    """
    require_ranks(n)
    return (n - 1).bit_length() * net.message_s(num_bytes)


def tree_all_reduce_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds to go up the tree and down again."""
    return 2 * tree_s(n, num_bytes, net)


def hierarchical_s(
    nodes: int,
    node_size: int,
    num_bytes: int,
    intra_node: AlphaBeta,
    inter_node: AlphaBeta,
) -> float:
    """Return the seconds of inter-node all-reduces within intra-node halves.

    The intra-node reduce-scatter and all-gather use chunks of S / k, and the inter-node
    all-reduces use chunks of S / n. `inter_node` is the link of one rank to the next
    node, which is a fraction of a NIC if several ranks share it.

    Raises:
        ValueError: the chunks would differ in size.
    """
    require_equal_chunks(nodes * node_size, num_bytes)
    around = 2 * ring_reduce_scatter_s(node_size, num_bytes, intra_node)
    return around + ring_all_reduce_s(nodes, num_bytes // node_size, inter_node)


def parameter_server_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds to send all tensors into rank 0 and as many bytes out."""
    require_ranks(n)
    if n == 1:
        return 0.0
    return 2 * (net.alpha_s + (n - 1) * num_bytes / net.bytes_per_s)


def gpipe_s(
    stages: int,
    microbatches: int,
    forward_s: float,
    backward_s: float,
    hop_s: float = 0.0,
) -> float:
    """Return the seconds of GPipe, in which p - 1 forwards and backwards are idle time.

    `hop_s` is the time of one message to the next stage, which travels while the stages
    compute.

    Raises:
        ValueError: there is less than 1 stage or microbatch, or a message takes longer
            than the computation that should hide it.
    """
    require_ranks(stages)
    require_microbatches(microbatches)
    if hop_s > min(forward_s, backward_s):
        raise ValueError(
            f"messages of {hop_s} s do not hide behind {forward_s} s and {backward_s} s"
        )
    slots = microbatches + stages - 1
    return slots * (forward_s + backward_s) + 2 * (stages - 1) * hop_s


def one_f_one_b_s(
    stages: int, microbatches: int, forward_s: float, backward_s: float
) -> float:
    """Return the seconds of 1F1B: the same bubble as GPipe if messages take no time.

    Raises:
        ValueError: there is less than 1 stage or microbatch.
    """
    return gpipe_s(stages, microbatches, forward_s, backward_s)


def interleaved_s(
    stages: int, microbatches: int, chunks: int, forward_s: float, backward_s: float
) -> float:
    """Return the seconds of 1F1B with `chunks` parts of the model on each rank.

    The times are those of one part.

    Raises:
        ValueError: there is less than 1 stage, microbatch or chunk, or you can't group
            the microbatches into as many as there are stages.
    """
    require_ranks(stages)
    require_microbatches(microbatches)
    if chunks < 1:
        raise ValueError(f"{chunks} chunks: at least 1")
    if microbatches % stages:
        raise ValueError(f"{microbatches} microbatches, {stages} stages: no multiple")
    return (microbatches * chunks + stages - 1) * (forward_s + backward_s)


# ── what no algorithm can beat ──────────────────────────────────────────────────────


def latency_bound_s(n: int, net: AlphaBeta) -> float:
    """Return the time of ⌈log2 n⌉ empty messages.

    No rank can be faster, because after r rounds its result depends on at most 2^r
    ranks.
    """
    require_ranks(n)
    return (n - 1).bit_length() * net.alpha_s


def bandwidth_bound_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the seconds in which the busiest rank sends at least 2 (n-1)/n · S.

    In an all-reduce, that is the average. Each element needs n - 1 messages before the
    first rank has its sum, and n - 1 until the last rank has it, so all ranks together
    send 2 (n-1) S.
    """
    require_ranks(n)
    return 2 * (n - 1) / n * num_bytes / net.bytes_per_s


def all_reduce_bound_s(n: int, num_bytes: int, net: AlphaBeta) -> float:
    """Return the larger of the two bounds; no all-reduce is faster."""
    return max(latency_bound_s(n, net), bandwidth_bound_s(n, num_bytes, net))


Form = Callable[[int, int, AlphaBeta], float]
ALL_REDUCES: dict[str, Form] = {
    "ring": ring_all_reduce_s,
    "recursive doubling": recursive_doubling_s,
    "Rabenseifner": rabenseifner_s,
    "tree": tree_all_reduce_s,
    "parameter server": parameter_server_s,
}
"""Every all-reduce on equal links: name → seconds of (n, num_bytes, net)."""


def require_ranks(n: int) -> None:
    """Require at least one rank.

    Raises:
        ValueError: there is none.
    """
    if n < 1:
        raise ValueError(f"{n} ranks: at least 1")


def require_microbatches(count: int) -> None:
    """Require at least one microbatch.

    Raises:
        ValueError: there is none.
    """
    if count < 1:
        raise ValueError(f"{count} microbatches: at least 1")


def require_equal_chunks(n: int, num_bytes: int) -> None:
    """Require that you can split the tensor into n chunks of equal size.

    Raises:
        ValueError: you can't.
    """
    require_ranks(n)
    if num_bytes % n:
        raise ValueError(
            f"{num_bytes} bytes do not fall into {n} equal chunks: the formula holds "
            "for equal ones only"
        )
