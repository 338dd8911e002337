"""Seconds of four all-reduces, on equal links and on nodes: formulas.

They belong to the checks. On nodes they are a model: messages that share an uplink get
equal fractions of its bandwidth. tests/workbench/test_topology.py compares the model
with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.sim import AlphaBeta

NAMES = ("naive", "ring", "recursive doubling", "hierarchical")


def flat_s(n: int, num_bytes: float, link: AlphaBeta) -> dict[str, float]:
    """Seconds of the first three where every pair of ranks has an equal link."""
    return {
        "naive": 2 * (n - 1) * link.message_s(num_bytes),
        "ring": 2 * (n - 1) * link.message_s(num_bytes / n),
        "recursive doubling": doubling_rounds(n) * link.message_s(num_bytes),
    }


def doubling_rounds(n: int) -> int:
    """log2 n; if n is not a power of two, ⌊log2 n⌋, one before and one after."""
    doublings = n.bit_length() - 1
    return doublings if n == 2**doublings else doublings + 2


@dataclass(frozen=True)
class NodesModel:
    """n ranks on nodes of k, which share an uplink; k = 1: one rank per node."""

    name: str
    n: int
    k: int
    intra_node: AlphaBeta
    inter_node: AlphaBeta
    uplink_bytes_per_s: float

    @property
    def p(self) -> int:
        """The number of nodes."""
        return self.n // self.k

    @property
    def setting(self) -> str:
        """In words."""
        where = f" on nodes of {self.k}" if self.k > 1 else ""
        return f"{self.n} ranks{where}, {self.name}"

    def shared(self, flows: int) -> AlphaBeta:
        """The link of one of `flows` messages that leave a node at the same time."""
        share = self.uplink_bytes_per_s / flows
        speed = min(self.inter_node.bytes_per_s, share)
        return AlphaBeta(alpha_s=self.inter_node.alpha_s, bytes_per_s=speed)

    def seconds(self, num_bytes: int, *, flows: int = 0) -> dict[str, float]:
        """Of all four; with `flows`, as if that many messages shared the uplink."""
        n, k, p = self.n, self.k, self.p
        shared = self.shared(flows or k)
        links = [self.intra_node] * (k > 1) + [self.inter_node] * (p > 1)
        steps = [link.message_s(num_bytes / n) for link in links]
        intra_node_s = (k - 1) * self.intra_node.message_s(num_bytes)
        inter_node_s = (n - k) * self.inter_node.message_s(num_bytes)
        doubling = doubling_rounds(k) * self.intra_node.message_s(num_bytes)
        doubling += doubling_rounds(p) * shared.message_s(num_bytes)
        levels = 2 * (k - 1) * self.intra_node.message_s(num_bytes / k)
        levels += 2 * (p - 1) * shared.message_s(num_bytes / n)
        if k == 1:
            flat = flat_s(n, num_bytes, self.inter_node)
            return {**flat, "hierarchical": flat["ring"]}
        return {
            "naive": 2 * (intra_node_s + inter_node_s),
            "ring": 2 * (n - 1) * max(steps, default=0.0),
            "recursive doubling": doubling,
            "hierarchical": levels,
        }
