"""Let agents of several nodes meet and talk through process_group.rendezvous.

The agent of node 0 serves a Rendezvous at master_addr:master_port, and every agent,
including node 0's own, is a client. Each generation of the launcher is a generation of
the rendezvous. If an agent is refused as stale, it therefore knows that all ranks
restart.

    config          node 0 sets it: what all agents must agree on
    seat            asks for a node number, if the agent doesn't have one
    claim/<k>       compare_set by node k: two agents cannot be the same node
    join            answered once all agents are there
    members         instead of it where fewer may go on: node 0 says who is there
    do/<n>/<i>      node 0 tells the agent named n: start, signal, finish
    said/<n>/<i>    it tells node 0: a rank has ended, or the agent got a signal
    seen/<n>        what its processes do now, under --standby and --elastic
    alive/<k>       add, again and again: a node that is cut off says nothing more

Each agent invents its own name. Under --standby and --elastic, where a generation of
the ranks isn't one of the rendezvous, a node can therefore be lost and come back.

Limits: only a secret keeps others out, so set the same DISTLAB_SECRET on all nodes.
torch's own store, which the ranks use, has no secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distlab.comm.services import Handle, PeerGone
from distlab.comm.tcp.caller import Caller, GoneError
from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import NO_RANK, Identity, StrangerError
from distlab.comm.tcp.server import Server
from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.inbox import Inbox

ALIVE_S = 1.0  # between two signs of life
_NAME = "agents"
_PAUSE_S = 0.05
_SEAT = "seat"
_SEAT_S = 30.0  # how long we reserve a number for the agent that asked for it


class StaleError(Exception):
    """Raised if the rendezvous refuses a request: a newer generation, or no room."""


@dataclass(frozen=True)
class NodeLost:
    """The agent of this node has ended, or we don't hear from it any more."""

    node: int


@dataclass(frozen=True)
class NodeCame:
    """The agent of this node has claimed its number."""

    node: int


@dataclass(frozen=True)
class Said:
    """A message from node `node` to node 0."""

    node: int
    words: dict[str, Any]


def identity(config: LaunchConfig) -> Identity:
    """Return what an agent must know: DISTLAB_SECRET or the address, and the job name.

    It keeps agents of two jobs with the same address from joining each other.
    """
    own = os.environ.get("DISTLAB_SECRET", "")
    text = own or f"distlab.launch {config.meeting_port} {config.nnodes}"
    text += f" {config.run_id}" * (config.run_id is not None)
    return Identity(hashlib.sha256(text.encode()).digest(), NO_RANK, config.nnodes)


class Client:
    """One agent's connection to the rendezvous, which any thread may use."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self.name = secrets.token_hex(8)
        self._caller = self._new_caller()
        self._num_claims = 0

    def reach(self, until: float, give_up: Callable[[], bool]) -> bool:
        """Try until an agent answers; return False if `give_up` says so.

        Raises:
            LaunchError: nobody answers, or the answer isn't from an agent of this
                launch.
        """
        where = f"{self._config.master_addr}:{self._config.meeting_port}"
        while not give_up():
            try:
                # A key that has a value from the start, in no generation that counts.
                self.ask("add", 0, key="reached", amount=1, until=until)
            except StaleError:
                return True
            except (StrangerError, FrameError, RuntimeError) as error:
                raise LaunchError(
                    f"who listens at {where} refuses us: {error}"
                ) from error
            except (GoneError, TimeoutError, OSError):
                if time.monotonic() >= until:
                    raise LaunchError(
                        f"no agent of node 0 at {where} within "
                        f"{self._config.start_timeout:g} s"
                    ) from None
                time.sleep(_PAUSE_S)
                self._caller.close()
                self._caller = self._new_caller()
            else:
                return True
        return False

    def seat(self, until: float) -> int:
        """Ask node 0 for a node number; it numbers the others as they arrive.

        Raises:
            LaunchError: all node numbers are taken.
            GoneError, TimeoutError, OSError: node 0 has ended, or can't be reached.
        """
        try:
            return int(self.ask(_SEAT, 0, key="", until=until))
        except StaleError:
            where = f"{self._config.master_addr}:{self._config.meeting_port}"
            raise LaunchError(
                f"all {self._config.nnodes} nodes have already arrived at {where}: "
                "check --nnodes"
            ) from None

    def claim(self, generation: int, until: float) -> None:
        """Claim this node's number in this generation.

        Raises:
            LaunchError: another agent has the number, or the agents don't agree.
        """
        config = json.loads(str(self.ask("get", generation, key="config", until=until)))
        for name, theirs in config.items():
            if getattr(self._config, name) != theirs:
                raise LaunchError(
                    f"{name} is {getattr(self._config, name)} on node "
                    f"{self._config.node}, but {theirs} on node 0"
                )
        key = f"claim/{self._config.node}"
        has = self.ask("compare_set", generation, key=key, value=self.name, until=until)
        if has != self.name:
            raise LaunchError(
                f"node_rank is {self._config.node} here and on another node: each "
                "node needs its own"
            )

    def join(self, generation: int, until: float) -> Sequence[int]:
        """Wait until this generation has its nodes, and return them."""
        if self._config.may_shrink or self._config.stays:
            members = self.ask("get", generation, key="members", until=until)
            return [int(node) for node in json.loads(str(members))]
        self.ask("join", generation, key=self.name, until=until)
        return range(self._config.nnodes)

    def ask(
        self,
        op: str,
        generation: int,
        *,
        until: float = float("inf"),
        **fields: object,
    ) -> str | int:
        """Send a request to the rendezvous; return its reply.

        Raises:
            StaleError: the rendezvous refuses the request.
            GoneError, TimeoutError, OSError: node 0 has ended, or can't be reached.
            RuntimeError: process_group.rendezvous raised an error.
        """
        message = json.dumps({"op": op, "generation": generation, **fields})
        answer = json.loads(self._caller.call(message.encode(), until))
        if "refused" in answer:
            raise StaleError(answer["refused"])
        reply: str | int = answer["reply"]
        return reply

    def close(self) -> None:
        """Close the connections that aren't in use."""
        self._caller.close()

    def _new_caller(self) -> Caller:
        address = (self._config.master_addr, self._config.meeting_port)
        return Caller(address, identity(self._config), _NAME)


class Hall:
    """Serves the rendezvous in a separate thread of node 0's agent."""

    def __init__(
        self,
        config: LaunchConfig,
        listener: socket.socket,
        rendezvous: Handle,
        inbox: Inbox,
    ) -> None:
        self._rendezvous, self._inbox = rendezvous, inbox
        self._timeout_s, self._stays = config.node_timeout, config.stays
        self.names: dict[int, str] = {}  # of the agents, by node
        self._nodes: dict[int, int] = {}  # by the number of the caller
        self.heard_s: dict[int, float] = {}  # the last word of each node
        self._claimed: dict[int, set[int]] = {}  # by generation
        self._num_nodes = config.nnodes
        self._seated_s: dict[int, float] = {}  # when a node got its number
        self._server = Server(listener, identity(config), _NAME, self)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """Handle a request with the Rendezvous, and remember who sent it."""
        if json.loads(message)["op"] == _SEAT:
            return self._seat()
        try:
            reply = self._rendezvous(peer, message)
        except Exception as error:
            self._inbox.put(error)
            raise
        request = json.loads(message)
        kind, _, node = str(request.get("key", "")).partition("/")
        is_claim = kind == "claim" and request["op"] == "compare_set"
        if is_claim and reply and json.loads(reply).get("reply") == request["value"]:
            self._nodes[peer] = int(node)  # and no other agent's
            self._claimed.setdefault(request["generation"], set()).add(int(node))
            self.names[int(node)] = request["value"]
            if self._stays:
                self._inbox.put(NodeCame(int(node)))
        if kind == "seen" and peer in self._nodes:
            words = json.loads(request["value"])
            self._inbox.put(Said(self._nodes[peer], words))
        if peer in self._nodes:
            self.heard_s[self._nodes[peer]] = time.monotonic()
        return reply

    def on(self, event: object, now_s: float) -> Sequence[object]:
        """Treat an agent whose connections are closed as ended."""
        if isinstance(event, PeerGone) and event.peer in self._nodes:
            node = self._nodes.pop(event.peer)
            self.heard_s.pop(node, None)  # nobody waits for a word of it any more
            self._seated_s.pop(node, None)
            self._inbox.put(NodeLost(node))
        return []

    def forget(self, node: int) -> None:
        """Ignore a node from now on, because node 0 has given it up."""
        for peer in [p for p, one in list(self._nodes.items()) if one == node]:
            self._nodes.pop(peer, None)
        self.names.pop(node, None)
        self.heard_s.pop(node, None)

    def _seat(self) -> bytes:
        now_s = time.monotonic()
        here = set(self._nodes.values())
        for node in range(1, self._num_nodes):
            given_s = self._seated_s.get(node, -_SEAT_S)
            if node not in here and now_s - given_s >= _SEAT_S:
                self._seated_s[node] = now_s
                return json.dumps({"reply": node}).encode()
        return json.dumps({"refused": "no seat"}).encode()

    def claimed(self, generation: int) -> list[int]:
        """Return the nodes whose agents have joined this generation."""
        return sorted(self._claimed.get(generation, ()))

    def silent(self) -> list[int]:
        """Return the nodes that have been silent for too long."""
        now = time.monotonic()
        known = set(self._nodes.values())
        return [
            node
            for node, at in list(self.heard_s.items())
            if node in known and node and now - at > self._timeout_s
        ]

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()
        self._thread.join()
        self._server.close()


def agreed(config: LaunchConfig) -> str:
    """Return the settings on which all agents must agree, as the value of `config`."""
    names = ("nnodes", "min_nodes", "nproc_per_node", "backend", "standby", "elastic")
    return json.dumps({name: asdict(config)[name] for name in names})
