"""A cluster: nodes with fast links, NICs, leaf switches and a spine.

                         ═══════════ spine ═══════════
                          ▲ leaf0.up0       ▼ leaf1.down0       NICs ÷ oversub
                        [leaf 0]          [leaf 1]
                          ▲ nic0.out        ▼ nic0.in
    node 0  ┌ gpu 0 ─ gpu 1 ─ … ┐       ┌ gpu k ─ … ┐  node 1
              └── NVLink switch ──┘       └───────────┘

Rank r is GPU r mod k of node r div k. An intra-node message goes through the GPU's own
port and the NVLink switch. An inter-node message goes through the NIC that serves the
GPU and, if the nodes have different leaf switches, through an uplink to the spine. NICs
and uplinks are shared, so messages wait for each other there.

A leaf has as many uplinks as there are NICs below it, divided by the oversubscription.
If that isn't an integer, the uplinks are fewer and faster. If it is less than 1, there
is one uplink, which is slower than a NIC. A message takes the uplink that is free
first.

A link carries one message at a time, at its full speed, in the order in which the
messages were sent, but a later message may use a pause if it fits in. A message isn't
stored between its links, so a message that is alone takes latency + S / (the slowest
link's bandwidth).

We leave out packets, routes that collide while others are free, congestion control, and
the limits of a switch's buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from distlab.sim.net.links import (
    PS,
    Wires,
    collective_ps,
    picoseconds,
    require_duration,
    require_speed,
)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of `node_size` ranks; `nodes_per_leaf` of them on each leaf switch.

    Raises:
        ValueError: a count is below 1, a time is negative, a speed isn't above zero, or
            an oversubscription is below 1.
    """

    node_size: int = 8
    intra_node_alpha_s: float = 3e-6
    intra_node_bytes_per_s: float = 450e9  # each way, of each GPU
    nics: int = 1  # per node
    nic_bytes_per_s: float = 50e9  # each way
    nic_alpha_s: float = 10e-6  # inter-node latency
    nodes_per_leaf: int = 1
    oversub: float = 1.0  # bandwidth of the NICs below a leaf ÷ that of its uplinks

    def __post_init__(self) -> None:
        for name in ("node_size", "nics", "nodes_per_leaf"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} is {count}, but it must be 1, 2, 3 …")
        require_duration("intra_node_alpha_s", self.intra_node_alpha_s)
        require_duration("nic_alpha_s", self.nic_alpha_s)
        require_speed("intra_node_bytes_per_s", self.intra_node_bytes_per_s)
        require_speed("nic_bytes_per_s", self.nic_bytes_per_s)
        if not 1 <= self.oversub < math.inf:
            raise ValueError(
                f"oversub is {self.oversub}, but it must be finite and at least 1, as "
                "in 4 for four to one"
            )

    def wires(self, world_size: int) -> Wires:
        """Return the state of a network on which no message is in flight yet."""
        return FabricWires(self, world_size)

    @property
    def cables(self) -> int:
        """The number of uplinks of each leaf, and of links down to it."""
        return max(1, int(self.nodes_per_leaf * self.nics / self.oversub))

    @property
    def cable_bytes_per_s(self) -> float:
        """The bandwidth of each uplink, each way."""
        below = self.nodes_per_leaf * self.nics * self.nic_bytes_per_s
        return below / self.oversub / self.cables

    def path(self, src: int, dst: int) -> list[Hop]:
        """Return the hops from one rank to another, in order."""
        node, other = src // self.node_size, dst // self.node_size
        if node == other:
            speed = self.intra_node_bytes_per_s
            return [Hop((f"gpu{src}.out",), speed), Hop((f"gpu{dst}.in",), speed)]
        leaf, other_leaf = node // self.nodes_per_leaf, other // self.nodes_per_leaf
        first = Hop((f"node{node}.{self._nic(src)}.out",), self.nic_bytes_per_s)
        last = Hop((f"node{other}.{self._nic(dst)}.in",), self.nic_bytes_per_s)
        if leaf == other_leaf:
            return [first, last]
        ways = (f"leaf{leaf}.up", f"leaf{other_leaf}.down")
        up, down = (
            Hop(tuple(f"{way}{i}" for i in range(self.cables)), self.cable_bytes_per_s)
            for way in ways
        )
        return [first, up, down, last]

    def links(self, world_size: int) -> dict[str, float]:
        """Return all links that `world_size` ranks can use: name → bytes per second."""
        found: dict[str, float] = {}
        for rank in range(world_size):
            for peer in self._one_of_each_kind(rank, world_size):
                for hop in self.path(rank, peer) + self.path(peer, rank):
                    found.update(dict.fromkeys(hop.names, hop.bytes_per_s))
        return found

    def alpha_s(self, src: int, dst: int) -> float:
        """Return the seconds that an empty message takes from one rank to another."""
        is_intra_node = src // self.node_size == dst // self.node_size
        return self.intra_node_alpha_s if is_intra_node else self.nic_alpha_s

    def _nic(self, rank: int) -> str:
        return f"nic{rank % self.node_size % self.nics}"

    def _one_of_each_kind(self, rank: int, world_size: int) -> list[int]:
        """Return a peer on the node, one on the leaf and one beyond, if they exist."""
        leaf = self.nodes_per_leaf * self.node_size
        starts = {
            size: (rank // size * size, rank // size * size + size)
            for size in (self.node_size, leaf)
        }
        node = range(*starts[self.node_size])
        near = {next((r for r in node if r != rank), rank)}
        for start, end in starts.values():
            near |= {start - 1, end % world_size}
        return [r for r in near if 0 <= r < world_size and r != rank]


class Hop(NamedTuple):
    """One step of a path: the links that serve it, and the bandwidth of each."""

    names: tuple[str, ...]
    bytes_per_s: float


class Link:
    """One direction of one cable: when it is free, and how long it was busy."""

    __slots__ = ("busy_ps", "free_ps", "name", "pauses", "ps_per_byte")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name, self.ps_per_byte = name, PS / bytes_per_s
        self.free_ps = self.busy_ps = 0
        self.pauses: list[tuple[int, int]] = []  # before free_ps, and still to come

    def book(self, from_ps: int, took_ps: int, now_ps: int) -> int:
        """Return the first time from `from_ps` on at which it is free for so long."""
        self.busy_ps += took_ps
        if self.pauses:
            begin = self._book_pause(from_ps, took_ps, now_ps)
            if begin is not None:
                return begin
        free_ps = self.free_ps
        begin = from_ps if from_ps > free_ps else free_ps
        if begin > free_ps and begin > now_ps:
            self.pauses.append((free_ps, begin))
        self.free_ps = begin + took_ps
        return begin

    def _book_pause(self, from_ps: int, took_ps: int, now_ps: int) -> int | None:
        self.pauses = [pause for pause in self.pauses if pause[1] > now_ps]
        for number, (start, end) in enumerate(self.pauses):
            begin = max(start, from_ps)
            if begin + took_ps <= end:
                rests = [(start, begin), (begin + took_ps, end)]
                self.pauses[number : number + 1] = [r for r in rests if r[0] < r[1]]
                return begin
        return None


class FabricWires:
    """The links of one run, each with its bookings."""

    def __init__(self, fabric: Fabric, world_size: int) -> None:
        self._fabric, self._world_size = fabric, world_size
        self._links: dict[str, Link] = {}
        self._paths: dict[tuple[int, int], tuple[int, list[list[Link]]]] = {}
        self._hops: dict[tuple[int, ...], tuple[int, float]] = {}

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """Implement `Wires.message`."""
        alpha_ps, hops = self._paths.get((src, dst)) or self._find_path(src, dst)
        start, begin, done = -1, now_ps, now_ps
        for cables in hops:
            link = cables[0]
            if link.free_ps > begin and len(cables) > 1:
                link = _first_free(cables, begin)
            took = round(num_bytes * link.ps_per_byte)
            begin = link.book(begin, took, now_ps)
            if start < 0:
                start = begin
            # The last byte is through when it came and this link has sent all of them.
            if begin + took > done:
                done = begin + took
        return start, done + alpha_ps

    def collective(
        self, op: str, n: int, num_bytes: int, members: Sequence[int] = ()
    ) -> int:
        """Implement `Wires.collective`; a step takes as long as its slowest hop."""
        alpha_ps, ps_per_byte = self._slowest_hop(tuple(members or range(n)))
        return collective_ps(
            op, n, num_bytes, lambda size: alpha_ps + size * ps_per_byte
        )

    def usage(self) -> dict[str, int]:
        """Implement `Metered.usage`."""
        links = sorted(self._links.items())
        return {name: link.busy_ps for name, link in links if link.busy_ps}

    def _find_path(self, src: int, dst: int) -> tuple[int, list[list[Link]]]:
        alpha_ps = picoseconds(self._fabric.alpha_s(src, dst))
        hops = [
            [self._link(name, hop.bytes_per_s) for name in hop.names]
            for hop in self._fabric.path(src, dst)
        ]
        self._paths[src, dst] = alpha_ps, hops
        return alpha_ps, hops

    def _link(self, name: str, bytes_per_s: float) -> Link:
        if name not in self._links:
            self._links[name] = Link(name, bytes_per_s)
        return self._links[name]

    def _slowest_hop(self, members: tuple[int, ...]) -> tuple[int, float]:
        """Return latency and picoseconds per byte when all send to the next at once."""
        if members not in self._hops:
            pairs = [*pairwise(members), (members[-1], members[0])]
            pairs = [(src, dst) for src, dst in pairs if src != dst]
            paths = [self._fabric.path(src, dst) for src, dst in pairs]
            flows = Counter(hop for path in paths for hop in path)
            speeds = [
                hop.bytes_per_s / math.ceil(count / len(hop.names))
                for hop, count in flows.items()
            ]
            alphas = [self._fabric.alpha_s(src, dst) for src, dst in pairs]
            alpha_ps = picoseconds(max(alphas, default=0.0))
            self._hops[members] = alpha_ps, PS / min(speeds, default=math.inf)
        return self._hops[members]


def _first_free(cables: list[Link], from_ps: int) -> Link:
    """Return the cable that is free first, or of several the one named first."""
    first = cables[0]
    for link in cables:
        if link.free_ps <= from_ps:
            return link
        if link.free_ps < first.free_ps:
            first = link
    return first
