"""The processes of all nodes, as the agent of --standby and --elastic sees them.

    Agent ──▶ Hosts ──▶ the Host of node 0
                  └──▶ Stage ── orders, events ── Follower ──▶ the Host of node k

A process stays on the node where it has started, and whoever takes over its rank may be
on any node.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Sequence

from distlab.launch.config import LaunchConfig
from distlab.launch.control import Words
from distlab.launch.host import Host, as_event
from distlab.launch.nodes import NodeCame, NodeLost, Said
from distlab.launch.report import Gone
from distlab.launch.stage import OtherNodes
from distlab.launch.stores import Store


class Hosts:
    """Gives each process a node, and each order to the node of its process."""

    def __init__(
        self,
        config: LaunchConfig,
        own: Host,
        store: Store,
        stage: OtherNodes | None,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._own, self._store = config, own, store
        self._stage, self._say = stage, say
        self._nodes = [0]
        self._node_of: dict[int, int] = {}  # by process, as long as it runs
        self.spares: set[int] = set()  # with several nodes: beyond the room of theirs

    def begin(self) -> bool:
        """Wait until there can be processes; return False if a signal came first.

        Raises:
            LaunchError: agents are missing, or this node can't fork processes.
        """
        self._store.begin()
        if self._stage is not None:
            self._say(self._stage.waiting())
            if not self._stage.meet(1):
                return False
            for node in self._stage.members:
                self._welcome(node)
        self._own.begin(self._store.port)
        return True

    # ── orders ──────────────────────────────────────────────────────────────────────

    def start(self, number: int) -> None:
        """Start a process on the first node that has room, or else the emptiest one."""
        taken = {node: list(self._node_of.values()).count(node) for node in self._nodes}
        free = [n for n in self._nodes if taken[n] < self._config.num_on_node]
        node = free[0] if free else min(self._nodes, key=taken.__getitem__)
        self._node_of[number] = node
        if self._stage is not None and not free:
            self.spares.add(number)
        self._order("start", number)

    def signal(self, number: int, which: int) -> None:
        """Send a signal to a process, if it runs."""
        self._order("signal", number, which)

    def tell(self, number: int, **words: object) -> None:
        """Send a message to a process."""
        self._order("tell", number, words)

    def finish(self, code: int, text: str) -> None:
        """Tell the agents of the other nodes that the job is over."""
        if self._stage is not None:
            self._stage.finish(code, text)

    # ── what happens ────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """Return how many ranks the nodes of this job have room for."""
        return len(self._nodes) * self._config.num_on_node

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets that become readable when there is something to take."""
        return self._own.sockets

    def take(self, readable: Sequence[socket.socket]) -> Iterator[object]:
        """Yield the events of this node's processes; those of others are Said."""
        for event in self._own.take(readable):
            yield self._noted(event)

    def look(self) -> list[object]:
        """Return what the processes here do, and the nodes that have been silent."""
        silent = [] if self._stage is None else self._stage.silent()
        return [self._own.look(), *silent]

    def heard(self, said: Said) -> object:
        """Return the event that another node has sent; None if that one is given up."""
        if said.node not in self._nodes:
            return None
        return self._noted(as_event(said.words))

    def came(self, event: NodeCame) -> bool:
        """Return True if a node has come that takes part from now on."""
        if self._stage is None or event.node in self._nodes:
            return False
        self._stage.welcome(event.node)
        self._welcome(event.node)
        return True

    def lost(self, event: NodeLost) -> list[Gone]:
        """Return the processes that are lost with this node."""
        if self._stage is None or event.node not in self._nodes:
            return []
        self._stage.dismiss(event.node)
        self._nodes.remove(event.node)
        lost = [n for n, node in self._node_of.items() if node == event.node]
        gone = [Gone(number=n, code=-signal.SIGKILL, is_lost=True) for n in lost]
        for number in lost:
            del self._node_of[number]
        return gone

    def places(self, members: dict[int, int]) -> dict[int, Words]:
        """Return local_rank, local_size and shift of each rank of a group."""
        on = [self._node_of.get(members[rank]) for rank in sorted(members)]
        shift = best_shift(on)
        places: dict[int, Words] = {}
        for node in self._nodes:
            here = [r for r in sorted(members) if self._node_of.get(members[r]) == node]
            for local_rank, rank in enumerate(here):
                place = {"local_rank": local_rank, "local_size": len(here)}
                places[rank] = {**place, "shift": shift}
        return places

    def _noted(self, event: object) -> object:
        if isinstance(event, Gone):
            self._node_of.pop(event.number, None)
        return event

    def _welcome(self, node: int) -> None:
        if node:
            assert self._stage is not None
            self._nodes.append(node)
            self._stage.order(node, {"begin": self._store.port})

    def _order(self, order: str, number: int, *arguments: object) -> None:
        node = self._node_of.get(number)
        if node == 0:
            self._own.obey(order, (number, *arguments))
        elif node is not None and self._stage is not None:
            words = {"order": order, "arguments": (number, *arguments)}
            self._stage.order(node, words)


def best_shift(nodes: Sequence[int | None]) -> int:
    """Return how far from a rank its copy should be, given the node of each rank.

    It is the smallest number with which the most copies are on another node.
    Example: [0, 0, 1, 1] → 2; on one node always 1
    """
    size = len(nodes)

    def num_apart(shift: int) -> int:
        others = (nodes[(rank + shift) % size] for rank in range(size))
        return sum(one != other for one, other in zip(nodes, others, strict=True))

    return max(range(1, max(size, 2)), key=num_apart)
