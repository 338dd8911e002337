"""How long four all-reduces take, on links alike and on nodes: formulas.

They are the checks' own. On nodes they are a model: flows that share an uplink get
equal parts of it. tests/workbench/test_topology.py lays it beside the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.sim import AlphaBeta

NAMES = ("naive", "ring", "recursive doubling", "hierarchical")


def flat_s(n: int, num_bytes: float, link: AlphaBeta) -> dict[str, float]:
    """Seconds of the first three where every pair of ranks is joined alike."""
    return {
        "naive": 2 * (n - 1) * link.message_s(num_bytes),
        "ring": 2 * (n - 1) * link.message_s(num_bytes / n),
        "recursive doubling": doubling_rounds(n) * link.message_s(num_bytes),
    }


def doubling_rounds(n: int) -> int:
    """log2 n; for what is no power of two a round before and one after it."""
    doublings = n.bit_length() - 1
    return doublings if n == 2**doublings else doublings + 2


@dataclass(frozen=True)
class Nodes:
    """n ranks in nodes of k, which share an uplink; k = 1 is no node."""

    name: str
    n: int
    k: int
    inside: AlphaBeta
    between: AlphaBeta
    uplink_bytes_per_s: float

    @property
    def p(self) -> int:
        """How many nodes."""
        return self.n // self.k

    @property
    def setting(self) -> str:
        """In words."""
        where = f" in nodes of {self.k}" if self.k > 1 else ""
        return f"{self.n} ranks{where}, {self.name}"

    def crowded(self, flows: int) -> AlphaBeta:
        """What one of so many messages out of a node at once sees."""
        share = self.uplink_bytes_per_s / flows
        speed = min(self.between.bytes_per_s, share)
        return AlphaBeta(alpha_s=self.between.alpha_s, bytes_per_s=speed)

    def seconds(self, num_bytes: int, *, flows: int = 0) -> dict[str, float]:
        """Of all four; with `flows`, as if so many shared the uplink, and not k."""
        n, k, p = self.n, self.k, self.p
        crowded = self.crowded(flows or k)
        links = [self.inside] * (k > 1) + [self.between] * (p > 1)
        steps = [link.message_s(num_bytes / n) for link in links]
        inside_s = (k - 1) * self.inside.message_s(num_bytes)
        outside_s = (n - k) * self.between.message_s(num_bytes)
        doubling = doubling_rounds(k) * self.inside.message_s(num_bytes)
        doubling += doubling_rounds(p) * crowded.message_s(num_bytes)
        levels = 2 * (k - 1) * self.inside.message_s(num_bytes / k)
        levels += 2 * (p - 1) * crowded.message_s(num_bytes / n)
        if k == 1:
            flat = flat_s(n, num_bytes, self.between)
            return {**flat, "hierarchical": flat["ring"]}
        return {
            "naive": 2 * (inside_s + outside_s),
            "ring": 2 * (n - 1) * max(steps, default=0.0),
            "recursive doubling": doubling,
            "hierarchical": levels,
        }
