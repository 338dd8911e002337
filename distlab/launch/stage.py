"""Meet the agents of several nodes and tell them what to do: node 0's side."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from distlab.comm.services import Handle
from distlab.comm.tcp.caller import GoneError
from distlab.comm.tcp.frames import FrameError
from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.inbox import Inbox
from distlab.launch.nodes import Client, Hall, NodeLost, Said, StaleError, agreed
from distlab.launch.ranks import Meeting
from distlab.launch.report import PREFIX
from distlab.launch.stores import listen

FAREWELL_S = 10.0  # that the other agents may take to have heard the end
_LOOK_S = 0.02


class OtherNodes:
    """All other nodes, as node 0's agent sees them."""

    def __init__(
        self,
        config: LaunchConfig,
        rendezvous: Handle,
        inbox: Inbox,
        listener: socket.socket | None = None,
    ) -> None:
        """Open the port where agents meet, unless there is a listener already.

        Raises:
            LaunchError: the port is in use, or master_addr isn't an address of this
                node.
        """
        self._config, self._inbox = config, inbox
        listener = listener or listen(config.listens_on, config.meeting_port)
        self._hall = Hall(config, listener, rendezvous, inbox)
        self._client = Client(config)
        self._generation = 0
        self._num_told: dict[int, int] = {}
        self.members: Sequence[int] = range(config.nnodes)
        """The nodes of this generation: their ranks in this order."""

    def waiting(self) -> str:
        """Return a line that says which nodes node 0's agent is about to wait for."""
        config = self._config
        where = f"{config.master_addr}:{config.meeting_port}"
        others = "node 1" if config.nnodes == 2 else f"nodes 1 to {config.nnodes - 1}"
        within = f"at most {config.start_timeout:g} s"
        if config.may_shrink:
            within += f", and {config.last_call:g} s if {config.min_nodes} are there"
        return f"{PREFIX} waits at {where} for the agent of {others}, {within}\n"

    def meet(self, generation: int) -> bool:
        """Wait for the agents of all nodes; return False if a signal came first.

        Raises:
            LaunchError: not all of them, or too few, arrived within start_timeout.
        """
        self._generation = generation
        self._num_told.clear()
        until = time.monotonic() + self._config.start_timeout
        self._ask("set", key="config", value=agreed(self._config), until=until)
        self._client.claim(generation, until)
        may_differ = self._config.may_shrink or self._config.stays
        if may_differ and not self._gather(until):
            return False
        if not self._all_join(until):
            return False
        for node in self._others:
            self.welcome(node)
        return True

    def welcome(self, node: int) -> None:
        """Listen to a node that has claimed its number in this generation."""
        self._num_told[node] = 0
        self._hall.heard_s[node] = time.monotonic()
        arguments = (node, self._hall.names[node], self._generation)
        threading.Thread(target=self._listen, args=arguments, daemon=True).start()

    def dismiss(self, node: int) -> None:
        """Give a node up, so that another agent can claim its number."""
        text = f"{PREFIX} node 0 has given node {node} up; exit code 1\n"
        self.order(node, {"finish": 1, "text": text})
        self._hall.forget(node)
        with contextlib.suppress(StaleError, GoneError, OSError, RuntimeError):
            self._ask("set", key=f"claim/{node}", value="")

    def start(self, ranks: Sequence[int], meeting: Meeting) -> None:
        """Tell the nodes to start these ranks."""
        common = {"port": meeting.port, "nodes": list(self.members)}
        for node in self._others:
            theirs = [rank for rank in ranks if self.node_of(rank) == node]
            self.order(node, {"start": theirs, **common})

    def signal(self, rank: int, number: int) -> None:
        """Tell a rank's node to send the rank a signal."""
        self.order(self.node_of(rank), {"signal": [rank, number]})

    def finish(self, code: int, text: str) -> None:
        """Tell all agents that the job is over, and wait for them briefly."""
        until = time.monotonic() + FAREWELL_S
        # Those too that came late, and wait for the next generation.
        others = {*self._others, *self._hall.claimed(self._generation)} - {0}
        for node in sorted(others):
            self.order(node, {"finish": code, "text": text})
        with contextlib.suppress(GoneError, OSError, StaleError, RuntimeError):
            keys = [f"bye/{node}" for node in others if self._is_here(node)]
            self._ask("wait", keys=keys, until=until)

    def silent(self) -> list[object]:
        """Return the nodes that have been silent for too long."""
        found = self._hall.silent()
        for node in found:
            self._hall.heard_s.pop(node, None)
        return [NodeLost(node) for node in found]

    def close(self) -> None:
        """Release the port."""
        self._client.close()
        self._hall.close()

    def node_of(self, rank: int) -> int:
        """Return the node whose rank this is."""
        return self.members[rank // self._config.nproc_per_node]

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node; none if it isn't a member."""
        if node not in self.members:
            return range(0)
        first = self.members.index(node) * self._config.nproc_per_node
        return range(first, first + self._config.nproc_per_node)

    @property
    def _others(self) -> list[int]:
        return [node for node in self.members if node]

    def _gather(self, until: float) -> bool:
        """Announce the members after the last call; False if a signal came first."""
        config, interrupts = self._config, self._inbox.num_interrupts
        last_call = time.monotonic() + config.last_call
        while True:
            here, now = self._hall.claimed(self._generation), time.monotonic()
            is_enough = len(here) >= (config.min_nodes or config.nnodes)
            if len(here) == config.nnodes or (is_enough and now >= last_call):
                break
            if now >= until:
                raise LaunchError(self._missing())
            if self._inbox.num_interrupts > interrupts:
                return False
            time.sleep(_LOOK_S)
        self.members = here
        self._ask("set", key="members", value=json.dumps(here), until=until)
        return True

    def _all_join(self, until: float) -> bool:
        joined = threading.Thread(target=self._join, args=(until,), daemon=True)
        joined.start()
        interrupts = self._inbox.num_interrupts
        while joined.is_alive():
            if self._inbox.num_interrupts > interrupts:
                return False
            joined.join(_LOOK_S)
        if not self._has_met:
            raise LaunchError(self._missing())
        return True

    _has_met = False

    def _join(self, until: float) -> None:
        self._has_met = False
        with contextlib.suppress(GoneError, OSError, StaleError, RuntimeError):
            self._client.join(self._generation, until)
            self._has_met = True

    def _listen(self, node: int, name: str, generation: int) -> None:
        """Receive the messages of a node until there is a newer generation."""
        number = 0
        with contextlib.suppress(
            StaleError, GoneError, OSError, FrameError, RuntimeError
        ):
            while True:
                key = f"said/{name}/{number}"
                words = json.loads(str(self._client.ask("get", generation, key=key)))
                if self._hall.names.get(node) != name:
                    return
                self._inbox.put(Said(node, words))
                number += 1

    def order(self, node: int, words: Mapping[str, object]) -> None:
        """Send an order to a node."""
        if node not in self._hall.names:  # given up
            return
        key = f"do/{self._hall.names[node]}/{self._num_told.get(node, 0)}"
        self._num_told[node] = self._num_told.get(node, 0) + 1
        # What the Rendezvous raises is in the inbox: see Hall.
        with contextlib.suppress(StaleError, GoneError, OSError, RuntimeError):
            self._ask("set", key=key, value=json.dumps(words))

    def _ask(
        self, op: str, *, until: float = float("inf"), **fields: object
    ) -> str | int:
        return self._client.ask(op, self._generation, until=until, **fields)

    def _is_here(self, node: int) -> bool:
        return node in self._hall.heard_s

    def _missing(self) -> str:
        missing = []
        for node in range(1, self._config.nnodes):
            try:
                until = time.monotonic() + 0.2
                self._ask("get", key=f"claim/{node}", until=until)
            except (GoneError, OSError, RuntimeError):
                missing.append(str(node))
        nodes = f"node{'s' * (len(missing) != 1)} {', '.join(missing)}"
        within = f"within {self._config.start_timeout:g} s"
        return (
            f"no agent of {nodes} came {within}" if missing else f"no meeting {within}"
        )
