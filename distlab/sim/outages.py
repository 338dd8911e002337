"""Carry out the deaths, restarts and freezes of one simulated run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distlab.sim.disk import DiskCrash
from distlab.sim.faults import STORE, Faults, Node, node_words
from distlab.sim.kernel import Kernel
from distlab.sim.net.links import PS, picoseconds
from distlab.sim.net.quantities import time_words
from distlab.sim.services import Services

_MOST_OPERATIONS = 4

Kind = Literal["kill", "crash", "restart", "freeze", "thaw"]


@dataclass(frozen=True)
class Struck:
    """A fault of one node that took place; a "crash" may be followed by a "restart"."""

    kind: Kind
    node: Node
    at_ps: int

    def __str__(self) -> str:
        verb = {
            "kill": "died", "crash": "crashed", "restart": "restarted",
            "freeze": "froze", "thaw": "thawed",
        }[self.kind]  # fmt: skip
        return f"{node_words(self.node)} {verb} at {time_words(self.at_ps / PS)}"


class Outages:
    """Plans the outages; `kill` and `revive` handle the part that isn't about services.

    `kill` returns True if the rank was still alive.
    """

    def __init__(
        self,
        kernel: Kernel,
        services: Services,
        kill: Callable[[int], bool],
        revive: Callable[[int], None],
    ) -> None:
        self._kernel, self._services, self._nodes = kernel, services, services.nodes
        self._kill_rank, self._revive_rank = kill, revive
        self._killed: set[Node] = set()
        self._torn_until_ps: dict[Node, int] = {}
        self.struck: list[Struck] = []
        services.when_torn = self._was_torn

    def plan(self, faults: Faults) -> None:
        """Schedule each outage; those of one instant happen in this order."""
        at = self._kernel.at
        for node, seconds in faults.kill.items():
            at(picoseconds(seconds), self._kill, node)
        for node, from_s, to_s in faults.restart:
            at(picoseconds(from_s), self._crash, node, picoseconds(to_s))
        for node, from_s, to_s in faults.torn:
            at(picoseconds(from_s), self._tear, node, picoseconds(to_s))
        for node, from_s, to_s in faults.freeze:
            at(picoseconds(from_s), self._freeze, node, picoseconds(to_s))

    def until(self, end_s: float | None) -> tuple[Struck, ...]:
        """Return the outages until the run was over, or all of them."""
        end_ps = None if end_s is None else picoseconds(end_s)
        return tuple(o for o in self.struck if end_ps is None or o.at_ps <= end_ps)

    def _kill(self, node: Node) -> None:
        self._killed.add(node)
        if self._end(node):
            self._note("kill", node)

    def _crash(self, node: Node, until_ps: int) -> None:
        if self._end(node):
            self._note("crash", node)
            self._kernel.at(until_ps, self._revive, node)

    def _tear(self, node: Node, until_ps: int) -> None:
        """Let the node die in one of its next operations on its disk."""
        if node in self._nodes.down:
            return
        disk = self._nodes.disk(node)
        disk.crash_after = self._nodes.draw(node).randint(1, _MOST_OPERATIONS)
        disk.when_torn = lambda: self._in_an_operation(node, until_ps)
        self._kernel.at(until_ps, setattr, disk, "crash_after", None)

    def _in_an_operation(self, node: Node, until_ps: int) -> None:
        if isinstance(node, int) and self._kernel.runs(node):
            self._crash(node, until_ps)
            self._kernel.pause(self._kernel.fibers[node])  # and never comes back
        self._torn_until_ps[node] = until_ps
        raise DiskCrash

    def _was_torn(self, node: Node) -> None:
        """Handle a service that `DiskCrash` has left, in a call or at its start."""
        self._crash(node, self._torn_until_ps[node])

    def _end(self, node: Node) -> bool:
        """End the node's process; return False if there is none any more."""
        if node in self._nodes.down:
            return False
        if isinstance(node, int) and not self._kill_rank(node):
            return False
        self._services.crash(node)
        return True

    def _revive(self, node: Node) -> None:
        if node in self._killed:
            return
        self._nodes.revive(node)
        self._note("restart", node)
        if isinstance(node, int):
            self._revive_rank(node)
        elif node != STORE:
            self._services.start(node)

    def _freeze(self, node: Node, until_ps: int) -> None:
        is_rank = isinstance(node, int)
        if node in self._nodes.down or (is_rank and not self._kernel.freeze(node)):  # type: ignore[arg-type]
            return
        self._nodes.freeze(node)
        self._note("freeze", node)
        crashes = self._nodes.crashes[node]
        self._kernel.at(until_ps, self._thaw, node, crashes)

    def _thaw(self, node: Node, crashes: int) -> None:
        if self._nodes.crashes[node] != crashes:
            return  # the process that was frozen is no more
        self._note("thaw", node)
        self._nodes.thaw(node)
        if isinstance(node, int):
            self._kernel.thaw(node)

    def _note(self, kind: Kind, node: Node) -> None:
        self.struck.append(Struck(kind, node, self._kernel.now_ps))
