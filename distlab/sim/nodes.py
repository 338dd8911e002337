"""Which processes of a simulated run are down or frozen, and what their disks hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from distlab.sim.disk import SimDisk
from distlab.sim.faults import Node

Act = Callable[[], object]


class Nodes:
    """The ranks, services and the store of one run, as far as they differ from well."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.down: set[Node] = set()
        self.crashes: Counter[Node] = Counter()
        self._frozen: dict[Node, list[Act]] = {}  # and what has arrived meanwhile
        self._disks: dict[Node, SimDisk] = {}

    def disk(self, node: Node) -> SimDisk:
        """The disk of this node, as the process that runs there now sees it."""
        return self._disks.setdefault(node, SimDisk())

    def deliver(self, node: Node, act: Act) -> None:
        """`act()` by this node's process, when it can; never, if it crashes before."""
        if node in self._frozen:
            self._frozen[node].append(act)
        else:
            act()

    def connection(self, node: Node, act: Act) -> Act:
        """`act`, for a message that leaves now for this node as it runs now."""
        crashes = self.crashes[node]

        def arrive() -> None:
            if self.crashes[node] == crashes:
                self.deliver(node, act)

        return arrive

    def crash(self, node: Node) -> None:
        """The process is no more, and its disk has what was synced, and some more."""
        self.down.add(node)
        self._frozen.pop(node, None)
        self.crashes[node] += 1
        if node in self._disks:
            disk = self._disks[node]
            disk.crash(self.draw(node))
            # What still runs of the old process, at its unwinding, has the old one.
            self._disks[node] = SimDisk(disk.files)

    def draw(self, node: Node) -> random.Random:
        """What is drawn for this node, the same whatever else goes wrong."""
        return random.Random(f"{self._seed} {node} {self.crashes[node]}")

    def revive(self, node: Node) -> None:
        """A new process runs there."""
        self.down.discard(node)

    def freeze(self, node: Node) -> None:
        """What arrives has to wait."""
        self._frozen.setdefault(node, [])

    def thaw(self, node: Node) -> None:
        """It goes on with what has arrived, in the order in which it did."""
        for act in self._frozen.pop(node, ()):
            act()
