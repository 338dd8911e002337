"""The faults of a simulated run: slow, dead and late ranks, and lost messages.

Everything is drawn from `seed`, in the order in which messages start. The same faults
and the same program therefore give the same run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import Any

Node = int | str
"""A rank's number, or the name of a service, or "store" for the store."""

STORE = "store"

Partition = tuple[tuple[Node, ...], float, float]
"""These nodes are cut off from all others, from one time to another, in seconds."""

Outage = tuple[Node, float, float]
"""A node, and the times in seconds at which its outage begins and ends."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults of one run.

    straggler   rank: factor. What it computes (`context.clock.sleep`) and every byte it
                sends or receives takes that many times as long, but not the latency.
                For a message between two stragglers, the slower one counts.
    kill        node: seconds. It dies at that time, like a process: a rank that waits
                for it or calls it afterwards gets PeerLost.
    restart     nodes, from, to. It dies at the first time, and starts again at the
                second. Its memory is gone; its disk has what was synced, and a random
                part of the rest. A rank restarts its program. The others have given up
                its part in their Comm, and so has it, but Endpoint and Store still
                work.
    torn        nodes, from, to. As `restart`, but it dies at the end of one of the
                first four operations on its disk after the first time, drawn at random
                and maybe in the middle of a call. If there are fewer operations until
                the second time, it lives.
    freeze      nodes, from, to. In between it does nothing, as after SIGSTOP, and
                everything that arrives waits. Its clock continues.
    late        rank: seconds. It starts its program at that time.
    loss        the share of messages that vanish. A message sent after a lost one
                doesn't take its place, so the receiver waits forever, and the sender
                doesn't notice. Library collectives and `new_group` lose nothing.
    duplicate   the share of messages that arrive twice. A Comm discards the second copy
                because of its number; an Endpoint passes both to its program.
    partitions  each: nodes, from, to. In between, no message starts between these nodes
                and the others. Messages of a Comm or a Store wait until it is over, and
                those of an Endpoint vanish. Connections stay, so no peer is lost.

    If a process finished before, we don't kill, restart or freeze it. A process that
    was killed doesn't restart, and one that restarts isn't frozen.

    Raises:
        ValueError: a share is outside of 0 … 1, a time is negative or infinite, a
            factor isn't above 0, an outage ends before it begins, two outages of the
            same kind and node overlap, or a rank restarts before it starts.
    """

    straggler: Mapping[int, float] = field(default_factory=dict)
    kill: Mapping[Node, float] = field(default_factory=dict)
    restart: tuple[Outage, ...] = ()
    torn: tuple[Outage, ...] = ()
    freeze: tuple[Outage, ...] = ()
    late: Mapping[int, float] = field(default_factory=dict)
    loss: float = 0.0
    duplicate: float = 0.0
    partitions: tuple[Partition, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for rank, factor in self.straggler.items():
            if not 0 < factor < math.inf:
                raise ValueError(
                    f"straggler: rank {rank} has the factor {factor}; it must be above "
                    "0 and finite"
                )
        for name in ("kill", "late"):
            for node, seconds in getattr(self, name).items():
                _require_time(f"{name}: {node_words(node)} at", seconds)
        for name in ("loss", "duplicate"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}, but it must be between 0 and 1")
        for partition in self.partitions:
            _require_partition(partition)
        _require_outages("restart or torn", (*self.restart, *self.torn))
        _require_outages("freeze", self.freeze)
        _require_started((*self.restart, *self.torn), self.late)

    def check(self, world_size: int, services: Collection[str] = ()) -> None:
        """Require that every node is one of `world_size` ranks, a service or the store.

        Raises:
            ValueError: a node isn't one of these.
        """
        for name, nodes in self.nodes().items():
            for node in nodes:
                _require_node(name, node, world_size, services)

    def nodes(self) -> dict[str, list[Node]]:
        """Return the nodes that each kind of fault names."""
        return {
            "straggler": list(self.straggler),
            "kill": list(self.kill),
            "late": list(self.late),
            "restart": [node for node, _, _ in self.restart],
            "torn": [node for node, _, _ in self.torn],
            "freeze": [node for node, _, _ in self.freeze],
            "partition": [node for nodes, _, _ in self.partitions for node in nodes],
        }

    def __bool__(self) -> bool:
        """Return True if anything can go wrong."""
        return any(getattr(self, f.name) for f in fields(self) if f.name != "seed")


def node_words(node: Node) -> str:
    """Name a node: `rank 3`, `the store`, `the service "ps"`."""
    if isinstance(node, int):
        return f"rank {node}"
    return "the store" if node == STORE else f'the service "{node}"'


def _require_node(
    name: str, node: Node, world_size: int, services: Collection[str]
) -> None:
    if isinstance(node, str):
        known = (STORE, *services)
        if node not in known or name in ("straggler", "late"):
            raise ValueError(
                f'{name} names "{node}", but there is only rank 0 … {world_size - 1}'
                + ("" if name in ("straggler", "late") else f" and {', '.join(known)}")
            )
    elif not 0 <= node < world_size:
        raise ValueError(
            f"{name} names rank {node}, but there are only ranks 0 … {world_size - 1}"
        )


def _require_time(what: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{what} {seconds} s, but times must be 0 or more and finite")


def _require_span(what: str, from_s: float, to_s: float) -> None:
    _require_time(f"{what}: from", from_s)
    _require_time(f"{what}: to", to_s)
    if to_s <= from_s:
        raise ValueError(f"{what}: it ends at {to_s} s, before it begins")


def _require_partition(partition: Partition) -> None:
    nodes, from_s, to_s = partition
    if not nodes or len(set(nodes)) != len(nodes):
        raise ValueError(f"partition of {nodes}: name at least 1 node, and each once")
    _require_span("partition", from_s, to_s)


def _require_started(restart: Iterable[Outage], late: Mapping[Any, float]) -> None:
    for node, from_s, _ in restart:
        if from_s <= late.get(node, -1.0):
            raise ValueError(f"restart: rank {node} has not started at {from_s} s")


def _require_outages(name: str, outages: Iterable[Outage]) -> None:
    outages = list(outages)
    for _, from_s, to_s in outages:
        _require_span(name, from_s, to_s)
    for (node, from_s, to_s), (other, other_from_s, other_to_s) in combinations(
        outages, 2
    ):
        if node == other and from_s <= other_to_s and other_from_s <= to_s:
            raise ValueError(
                f"{name}: {node_words(node)} twice at {max(from_s, other_from_s):g} s"
            )


class Luck:
    """The random draws of one run."""

    def __init__(self, faults: Faults) -> None:
        self._random = random.Random(faults.seed)
        self._loss, self._duplicate = faults.loss, faults.duplicate

    def loses(self) -> bool:
        """Return True if the message that starts now vanishes."""
        return self._loss > 0 and self._random.random() < self._loss

    def doubles(self) -> bool:
        """Return True if the message that starts now arrives twice."""
        return self._duplicate > 0 and self._random.random() < self._duplicate
