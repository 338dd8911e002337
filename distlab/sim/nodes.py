"""Track which processes of a run are down or frozen, and what their disks hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from distlab.sim.disk import SimDisk
from distlab.sim.faults import Node

Act = Callable[[], object]


class Nodes:
    """The ranks, services and the store of one run, as far as faults affect them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.down: set[Node] = set()
        self.crashes: Counter[Node] = Counter()
        self._frozen: dict[Node, list[Act]] = {}  # and what has arrived meanwhile
        self._disks: dict[Node, SimDisk] = {}

    def disk(self, node: Node) -> SimDisk:
        """Return this node's disk, as the process that runs there now sees it."""
        return self._disks.setdefault(node, SimDisk())

    def deliver(self, node: Node, act: Act) -> None:
        """Call `act()` in this node's process when it can run; never if it crashes."""
        if node in self._frozen:
            self._frozen[node].append(act)
        else:
            act()

    def connection(self, node: Node, act: Act) -> Act:
        """Wrap `act` for a message that leaves now, meant for the process there now."""
        crashes = self.crashes[node]

        def arrive() -> None:
            if self.crashes[node] == crashes:
                self.deliver(node, act)

        return arrive

    def crash(self, node: Node) -> None:
        """End the process; its disk keeps what was synced, and some of the rest."""
        self.down.add(node)
        self._frozen.pop(node, None)
        self.crashes[node] += 1
        if node in self._disks:
            disk = self._disks[node]
            disk.crash(self.draw(node))
            # What still runs of the old process, at its unwinding, has the old one.
            self._disks[node] = SimDisk(disk.files)

    def draw(self, node: Node) -> random.Random:
        """Return this node's random source, which other faults don't affect."""
        return random.Random(f"{self._seed} {node} {self.crashes[node]}")

    def revive(self, node: Node) -> None:
        """Start a new process there."""
        self.down.discard(node)

    def freeze(self, node: Node) -> None:
        """Let everything that arrives wait."""
        self._frozen.setdefault(node, [])

    def thaw(self, node: Node) -> None:
        """Continue with everything that has arrived, in the order of arrival."""
        for act in self._frozen.pop(node, ()):
            act()
