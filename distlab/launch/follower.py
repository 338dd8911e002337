"""Start, signal and watch ranks as node 0 says: the agent of every other node."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.comm.tcp.caller import GoneError
from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import StrangerError
from distlab.given.process_group import Ended, Interrupted
from distlab.launch.config import LaunchConfig
from distlab.launch.forked import Heard
from distlab.launch.host import LOOK_S, Host, Looked, as_words
from distlab.launch.hub import Say
from distlab.launch.inbox import Inbox
from distlab.launch.logs import RankLog, Terminal, open_another
from distlab.launch.nodes import ALIVE_S, Client, StaleError
from distlab.launch.ranks import Meeting, Ranks
from distlab.launch.report import PREFIX, Gone, interrupted

UNREACHABLE = 1
"""The exit code of an agent that has lost node 0."""
_LOST = (GoneError, TimeoutError, OSError, FrameError, StrangerError, RuntimeError)


@dataclass(frozen=True)
class Told:
    """Node 0 has given this order in this generation."""

    generation: int
    words: dict[str, Any]


@dataclass(frozen=True)
class Joined:
    """This generation has all of its nodes."""

    generation: int
    nodes: Sequence[int]


@dataclass(frozen=True)
class Stale:
    """There is a newer generation than this one."""

    generation: int


@dataclass(frozen=True)
class Unreachable:
    """Node 0 has ended, or we can't reach it."""

    reason: str


class Follower:
    """Carries out node 0's decisions with the ranks of this node."""

    def __init__(
        self,
        config: LaunchConfig,
        *,
        ranks: Ranks | Host,
        logs: dict[int, RankLog],
        terminal: Terminal,
        inbox: Inbox,
        say: Say,
    ) -> None:
        self._config, self._say = config, say
        self._ranks, self._logs, self._terminal = ranks, logs, terminal
        self._inbox = inbox
        self._client = Client(config)
        self._generation = 0
        self._num_said = 0
        self._stopped_by = 0
        self._is_member = False  # of the generation: node 0 listens to members only
        self._killed: set[int] = set()  # ranks whose end is no failure
        self._is_over = threading.Event()

    def run(self) -> int:
        """Run until node 0 tells us the exit code, and return it.

        Raises:
            LaunchError: node 0 doesn't answer, or the agents don't agree.
        """
        until = time.monotonic() + self._config.start_timeout
        if not self._client.reach(until, lambda: self._inbox.num_interrupts > 0):
            return self._interrupted_early()
        try:
            self._enter(1)
            while True:
                for event in self._inbox.take():
                    code = self._look_at(event)
                    if code is not None:
                        return code
                self._wait(self._config.monitor_interval)
        finally:
            self._is_over.set()
            self._client.close()

    def _wait(self, limit_s: float) -> None:
        self._inbox.wait(limit_s)

    def _enter(self, generation: int) -> None:
        """Join a generation, and put node 0's messages into the inbox."""
        self._generation, self._num_said = generation, 0
        self._is_member = False
        threading.Thread(target=self._listen, args=(generation,), daemon=True).start()

    def _look_at(self, event: object) -> int | None:
        match event:
            case Ended(rank) if rank in self._killed:
                self._killed.discard(rank)  # of the generation before
            case Ended():
                words = as_words(self._as_ranks.buried(event))
                self._tell({**words, "generation": self._generation})
            case Interrupted(number):
                return self._interrupt(number)
            case Joined(generation, nodes) if generation == self._generation:
                self._is_member = self._config.node in nodes
                if not self._is_member:
                    self._say(f"{PREFIX} waits: the others have begun without it\n")
            case Told(generation, words) if generation == self._generation:
                return self._obey(words)
            case Stale(generation) if generation == self._generation:
                self._killed |= set(self._ranks.running)
                self._ranks.kill()
                self._enter(generation + 1)
            case Unreachable(reason):
                return self._give_up(reason)
            case Exception():
                raise event
        return None

    # ── node 0 says ─────────────────────────────────────────────────────────────────

    def _obey(self, words: dict[str, Any]) -> int | None:
        config = self._config
        if "start" in words:
            meeting = Meeting(
                address=config.master_addr,
                port=words["port"],
                generation=self._generation,
                nodes=tuple(words["nodes"]),
            )
            for rank in words["start"]:
                if rank not in self._logs:  # with fewer nodes other ranks are here
                    is_split = config.output.is_split(config.local_rank(rank))
                    folder = Path(config.log_dir or ".")
                    open_another(self._logs, rank, folder, is_split=is_split)
                self._as_ranks.start(rank, meeting)
        elif "signal" in words:
            self._ranks.signal(*words["signal"])
        elif "finish" in words:
            self._ranks.kill()
            if words["finish"]:
                self._terminal.hurry()
            self._terminal.catch_up(list(self._logs))
            self._say(words["text"])
            self._try_to_say(f"bye/{config.node}", "")
            return int(words["finish"])
        return None

    def _listen(self, generation: int) -> None:
        inbox, ask = self._inbox, self._client.ask
        until = time.monotonic() + self._config.start_timeout
        try:
            self._client.claim(generation, until)
            alive = threading.Thread(
                target=self._keep_alive, args=(generation,), daemon=True
            )
            alive.start()
            number = 0
            while True:
                key = f"do/{self._client.name}/{number}"
                words = json.loads(str(ask("get", generation, key=key)))
                inbox.put(Told(generation, words))
                number += 1
        except StaleError:
            inbox.put(Stale(generation))
        except _LOST as error:
            inbox.put(Unreachable(str(error)))
        except Exception as error:  # what the user has said wrongly
            inbox.put(error)

    def _keep_alive(self, generation: int) -> None:
        """Join, and send signs of life from then on."""
        key = f"alive/{self._config.node}"
        try:
            until = time.monotonic() + self._config.start_timeout
            nodes = self._client.join(generation, until)
            self._inbox.put(Joined(generation, nodes))
            while not self._is_over.wait(ALIVE_S):
                until = time.monotonic() + self._config.node_timeout
                self._client.ask("add", generation, key=key, amount=1, until=until)
        except StaleError:
            pass  # the other thread says so
        except _LOST as error:
            self._inbox.put(Unreachable(str(error)))

    @property
    def _as_ranks(self) -> Ranks:
        assert isinstance(self._ranks, Ranks)
        return self._ranks

    # ── this node says ──────────────────────────────────────────────────────────────

    def _interrupt(self, number: int) -> int | None:
        self._stopped_by = self._stopped_by or number
        if self._inbox.num_interrupts > 1:
            self._ranks.kill()
        if not self._is_member:
            self._say(interrupted(self._stopped_by, 128 + self._stopped_by))
            return 128 + self._stopped_by
        self._tell({"interrupted": number})
        return None

    def _tell(self, words: dict[str, Any]) -> None:
        key = f"said/{self._client.name}/{self._num_said}"
        self._num_said += 1
        self._try_to_say(key, json.dumps(words))

    def _try_to_say(self, key: str, text: str) -> None:
        until = time.monotonic() + self._config.node_timeout
        try:
            self._client.ask("set", self._generation, key=key, value=text, until=until)
        except StaleError:
            pass  # nobody wants to know any more
        except _LOST as error:
            self._inbox.put(Unreachable(str(error)))

    # ── without node 0 ──────────────────────────────────────────────────────────────

    def _give_up(self, reason: str) -> int:
        """Stop the ranks of this node without an order from node 0."""
        for rank in self._ranks.running:
            self._ranks.signal(rank, signal.SIGTERM)
        until = time.monotonic() + self._config.grace_period
        while self._ranks.running and time.monotonic() < until:
            for event in self._inbox.take():
                if isinstance(event, Ended):
                    self._as_ranks.buried(event)
            self._wait(min(self._config.monitor_interval, 0.1))
        self._ranks.kill()
        self._terminal.hurry()
        self._terminal.catch_up(list(self._logs))
        if self._stopped_by:
            code = 128 + self._stopped_by
            self._say(interrupted(self._stopped_by, code))
            return code
        where = f"{self._config.master_addr}:{self._config.meeting_port}"
        self._say(
            f"{PREFIX} node 0 at {where} does not answer ({reason}); the ranks of "
            f"node {self._config.node} were stopped; exit code {UNREACHABLE}\n"
        )
        return UNREACHABLE

    def _interrupted_early(self) -> int:
        number = next(
            (e.signal for e in self._inbox.take() if isinstance(e, Interrupted)),
            signal.SIGTERM,
        )
        self._say(interrupted(number, 128 + number))
        return 128 + number


class HostFollower(Follower):
    """Carries out node 0's decisions under --standby and --elastic."""

    _look_at_s = 0.0

    @property
    def _host(self) -> Host:
        assert isinstance(self._ranks, Host)
        return self._ranks

    def _wait(self, limit_s: float) -> None:
        readable = self._inbox.wait_beside(self._host.sockets, min(limit_s, LOOK_S))
        for event in self._host.take(readable):
            self._inbox.queue.put(event)
        if time.monotonic() >= self._look_at_s and self._host.running:
            self._look_at_s = time.monotonic() + LOOK_S
            self._inbox.queue.put(self._host.look())

    def _look_at(self, event: object) -> int | None:
        match event:
            case Looked():
                key = f"seen/{self._client.name}"
                self._try_to_say(key, json.dumps(as_words(event)))
            case Heard() | Gone():
                self._tell(as_words(event))
            case _:
                return super()._look_at(event)
        return None

    def _obey(self, words: dict[str, Any]) -> int | None:
        if "begin" in words:
            self._is_member = True
            self._host.begin(words["begin"])
        elif "order" in words:
            self._host.obey(words["order"], words["arguments"])
        else:
            return super()._obey(words)
        return None
