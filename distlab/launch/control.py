"""Messages between an agent and a rank's process: one JSON object per packet.

From the agent:
    regroup  leave the group, at once or after this step, and join a round
    go       all processes of the round have joined, and this is the group
    over     all processes of the group have said done

From a process:
    ready    its script has come to the first step, and waits
    joined   it is in no group: the round, its step, and a report of what it holds
    at       the step that it has completed
    formed   it has its state and continues; later the times of everything in between
    failed   the group of the round could not be connected
    done     its last step is complete

The processes inherit their ends from the agent, so no other process can write to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONTROL = "DISTLAB_CONTROL"
"""The environment variable with the descriptor of a process's end."""
_PACKET = 1 << 18
_GONE = "the agent of this job has ended"

Words = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """Open a pair of ends: the agent's and the process's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, words: Words) -> None:
    """Send a message, unless the process has ended."""
    with contextlib.suppress(OSError):
        end.send(json.dumps(words).encode())


def receive(end: socket.socket) -> Words | None:
    """Receive the next packet, or None if the other side has ended."""
    try:
        packet = end.recv(_PACKET)
    except OSError:
        return None
    return json.loads(packet) if packet else None


@dataclass(frozen=True, kw_only=True)
class Go:
    """The group that this process should join, with its members' reports by rank."""

    number: int  # of the round
    generation: int
    rank: int
    reports: tuple[Words, ...]
    log: str  # the file of this rank
    local_rank: int  # among the members on this process's node, local_size of them
    local_size: int
    shift: int  # from a rank to the one that keeps a copy of its own state
    source: int | None = None  # the rank whose state all take, if it is decided
    grad_accum_steps: int = 1

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.reports)


class AgentGoneError(RuntimeError):
    """Raised if the agent has ended, so that no group can form any more."""


class Member:
    """A process's end; a thread listens to the agent, and the trainer does the rest."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._changed = threading.Condition()
        self._regroup: Words = {}
        self._go: Words = {}
        self._over = 0  # the round whose work is done
        self._is_gone = False
        self._on_regroup: Callable[[], None] = lambda: None
        self._joined = 0  # the newest round that this process has joined
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def from_environment(cls) -> Member | None:
        """Open this process's end; return None without an agent that can regroup."""
        descriptor = os.environ.get(CONTROL)
        if descriptor is None:
            return None
        return cls(socket.socket(fileno=int(descriptor)))

    def on_regroup(self, call: Callable[[], None]) -> None:
        """Make the thread call `call` when the process must leave the group at once."""
        self._on_regroup = call

    @property
    def must_regroup(self) -> bool:
        """Return True if the agent waits for this process to join a round."""
        return int(self._regroup.get("regroup", 0)) > self._joined

    def say(self, **words: Any) -> None:
        """Send a message to the agent."""
        send(self._end, words)

    def join(self, report: Callable[[], Words]) -> Go:
        """Join the next round, and newer ones, until one has all of its members.

        This blocks without a limit, because the agent knows who is missing and why.

        Raises:
            AgentGoneError: the agent has ended.
        """
        before = self._joined
        with self._changed:
            while True:
                if self._is_gone:
                    raise AgentGoneError(_GONE)
                wanted = int(self._regroup.get("regroup", 0))
                if wanted > self._joined:
                    self._joined = wanted
                    self.say(joined=wanted, **report())
                if wanted > before and self._go.get("go") == wanted:
                    return _as_go(self._go)
                self._changed.wait(1.0)  # with a limit, so that signals are handled

    def wait_until_over(self) -> bool:
        """Wait until all processes have completed the last step; False: regroup first.

        Raises:
            AgentGoneError: the agent has ended.
        """
        self.say(done=self._joined)
        with self._changed:
            while not self.must_regroup:
                if self._over == self._joined:
                    return True
                if self._is_gone:
                    raise AgentGoneError(_GONE)
                self._changed.wait(1.0)
        return False

    def _listen(self) -> None:
        while (words := receive(self._end)) is not None:
            with self._changed:
                if "regroup" in words:
                    self._regroup = words
                if "go" in words:
                    self._go = words
                self._over = words.get("over", self._over)
                self._changed.notify_all()
            if words.get("now"):
                self._on_regroup()
        with self._changed:
            self._is_gone = True
            self._end.close()
            self._changed.notify_all()


def _as_go(words: Words) -> Go:
    return Go(
        number=words["go"],
        generation=words["generation"],
        rank=words["rank"],
        reports=tuple(words["reports"]),
        log=words["log"],
        local_rank=words["local_rank"],
        local_size=words["local_size"],
        shift=words["shift"],
        source=words["source"],
        grad_accum_steps=words["grad_accum_steps"],
    )
