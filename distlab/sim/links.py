"""How long a message is under way: the networks that can be put under a simulated run.

A network is a description (`AlphaBeta`, frozen, shared); `wires` makes the state that
one run of it needs. Whatever has the two methods of `Wires` can take its place.

Source: R. Hockney, "The communication challenge for MPP" (1994), for alpha and beta.
Symbols: alpha_s = seconds per message; bytes_per_s = 1 / beta; n ranks; S bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

PS = 1_000_000_000_000
"""Picoseconds in a second. Time is a whole number of them: it adds up exactly."""


def picoseconds(seconds: float) -> int:
    """The nearest whole number of picoseconds."""
    return round(seconds * PS)


class Wires(Protocol):
    """The state of one network during one run."""

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """When a message that could go now starts and is complete; books its way."""

    def collective(self, op: str, n: int, num_bytes: int) -> int:
        """Picoseconds that a library collective of n ranks takes."""


class Network(Protocol):
    """What `run` takes as its `net`."""

    def wires(self, world_size: int) -> Wires:
        """A network on which nothing is under way yet."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Every pair is joined alike: S bytes take alpha_s + S / bytes_per_s seconds.

    Each rank has one way out and one way in: messages that share one follow each
    other, byte after byte, while their latencies overlap. The defaults are those of a
    good data centre: 10 µs, 100 Gbit/s.

    Raises:
        ValueError: a negative latency, or a speed that is not above zero.
    """

    alpha_s: float = 10e-6
    bytes_per_s: float = 12.5e9

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_s < math.inf:
            raise ValueError(f"alpha_s is {self.alpha_s}: seconds, 0 or more")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}: it must be above 0")

    def wires(self, world_size: int) -> Wires:
        """A network on which nothing is under way yet."""
        return _Ports(self, world_size)


class _Ports:
    """When each rank's way out and way in are free again."""

    def __init__(self, net: AlphaBeta, world_size: int) -> None:
        self._alpha_ps = picoseconds(net.alpha_s)
        self._ps_per_byte = PS / net.bytes_per_s
        self._out_free_ps = [0] * world_size
        self._in_free_ps = [0] * world_size

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """See `Wires.message`."""
        start = max(now_ps, self._out_free_ps[src], self._in_free_ps[dst])
        free = start + round(num_bytes * self._ps_per_byte)
        self._out_free_ps[src] = self._in_free_ps[dst] = free
        return start, free + self._alpha_ps

    def collective(self, op: str, n: int, num_bytes: int) -> int:
        """The bandwidth-optimal algorithms; `num_bytes` is what each rank puts in."""
        share = num_bytes * self._ps_per_byte / n
        depth = math.ceil(math.log2(n))  # hops of a tree to the furthest rank
        steps, chunks = {
            "all_reduce": (2 * (n - 1), 2 * (n - 1)),
            "reduce_scatter": (n - 1, n - 1),
            "all_to_all": (n - 1, n - 1),
            "all_gather": (n - 1, n * (n - 1)),
            "broadcast": (depth, depth * n),
            "reduce": (depth, depth * n),
        }.get(op, (depth, 0))
        return round(steps * self._alpha_ps + chunks * share)
