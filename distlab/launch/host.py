"""Start, watch and signal the processes of one node, under --standby and --elastic.

    agent of node 0 ── start, signal, tell ──▶ Host of each node ──▶ forker, processes
    agent of node 0 ◀── Heard, Looked, Gone ── Host of each node ◀── forker, processes

Every node has a Host, and none of them decides anything. That of node 0 is in the same
process as the agent, and the orders and events of all others travel as JSON.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distlab.given.process_group import Interrupted
from distlab.given.recovery import COMPUTE
from distlab.launch.config import LaunchConfig
from distlab.launch.control import Words
from distlab.launch.forked import Exited, Forked, Heard
from distlab.launch.logs import RankLog, Terminal, open_another
from distlab.launch.pages import Page
from distlab.launch.ranks import Meeting, node_name, rank_variables
from distlab.launch.report import NUM_LINES, Gone

LOOK_S = 0.1  # between two looks at the pages


class Look(NamedTuple):
    """What a process's page says; the times are on the clock of who has this."""

    step: int
    step_s: float
    doing: str
    since_s: float
    beat_s: float


NO_LOOK = Look(-1, 0.0, COMPUTE, 0.0, 0.0)


@dataclass(frozen=True)
class Looked:
    """Event: this is what the processes of a node do."""

    looks: Mapping[int, Look]


@dataclass
class _Process:
    page: Page
    log: RankLog
    rank: int | None = None


class Host:
    """The processes of this node; their numbers are unique in the whole job."""

    def __init__(
        self,
        config: LaunchConfig,
        program: Sequence[str],
        logs: dict[int, RankLog],
        terminal: Terminal,
    ) -> None:
        self._config, self._program = config, program
        self._logs, self._terminal = logs, terminal
        self._folder = Path(config.log_dir or ".")
        self._processes: dict[int, _Process] = {}
        self._forked: Forked | None = None

    def begin(self, port: int) -> None:
        """Get ready to fork processes that find the store at this port of node 0.

        Raises:
            LaunchError: the system can't start the process that forks them.
        """
        config = self._config
        meeting = Meeting(address=config.master_addr, port=port, generation=1)
        environment = rank_variables(config, 0, meeting, os.environ)
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
            environment.pop(name)
        self._forked = Forked(self._program, environment, run_as=config.run_as)
        self._forked.wait()

    # ── orders ──────────────────────────────────────────────────────────────────────

    def start(self, number: int) -> None:
        """Start a process."""
        assert self._forked is not None
        log = RankLog(number, self._folder, name=f"process_{number}.log")
        page = Page.new()
        self._processes[number] = _Process(page, log)
        error_file = str(log.error_file.absolute())
        self._forked.start(number, log.descriptor, page.descriptor, error_file)

    def signal(self, number: int, which: int) -> None:
        """Send a signal to a process, if it runs."""
        if self._forked is not None:
            self._forked.signal(number, which)

    def tell(self, number: int, words: Words) -> None:
        """Send a message to a process; a `go` also gives it a rank and its log."""
        if self._forked is None or number not in self._processes:
            return
        if "go" in words:
            words = {**words, "log": self._log_of(number, words)}
        self._forked.tell(number, **words)

    def obey(self, order: str, arguments: Sequence[Any]) -> None:
        """Carry out an order that has come as JSON."""
        match order:
            case "start":
                self.start(*arguments)
            case "signal":
                self.signal(*arguments)
            case "tell":
                self.tell(*arguments)

    def kill(self) -> None:
        """End all processes and whatever they have started."""
        if self._forked is not None:
            self._forked.close()
            self._forked = None
        self._processes.clear()

    # ── what happens ────────────────────────────────────────────────────────────────

    @property
    def running(self) -> list[int]:
        """Return the processes whose end nobody has noticed yet."""
        return sorted(self._processes)

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets that become readable when there is something to take."""
        return [] if self._forked is None else self._forked.sockets

    def take(self, readable: Sequence[socket.socket]) -> Iterator[object]:
        """Yield what these sockets report: Heard, and Gone after a Looked.

        Raises:
            LaunchError: the process that forks the others has ended.
        """
        if self._forked is None:
            return
        for heard in self._forked.take(readable):
            if isinstance(heard, Exited):
                yield self.look()  # with its last step
                yield self._gone(heard)
            else:
                yield heard

    def look(self) -> Looked:
        """Read the pages of all processes."""
        return Looked(
            {number: _look(one.page) for number, one in self._processes.items()}
        )

    def _gone(self, exited: Exited) -> Gone:
        process, config = self._processes.pop(exited.number), self._config
        rank = process.rank
        self._terminal.catch_up([] if rank is None else [rank])
        log = process.log if rank is None else self._logs[rank]
        gone = Gone(
            number=exited.number,
            code=exited.code,
            lines=log.last_lines(NUM_LINES),
            log=log.where,
            node=node_name(config),
            record=process.log.record(),
        )
        if rank is None:
            process.log.close()
            with contextlib.suppress(OSError):
                os.unlink(process.log.path)
        process.page.close()
        return gone

    def _log_of(self, number: int, words: Words) -> str:
        """Give a process its rank, and return the path of the rank's log."""
        process, rank = self._processes[number], int(words["rank"])
        if rank not in self._logs:  # until now it was on another node
            open_another(self._logs, rank, self._folder)
        if process.rank is None:
            process.log.close()
        if process.rank != rank:
            self._logs[rank].begin(words["generation"])
            process.rank = rank
        return str(self._logs[rank].path.absolute())


def _look(page: Page) -> Look:
    return Look(page.step, page.step_s, page.doing, page.since_s, page.beat_s)


# ── events as JSON, whose times count from now: nodes have no clock in common ───────


def as_words(event: object) -> Words:
    """Return an event of a Host as JSON."""
    now_s = time.monotonic()
    match event:
        case Heard(number, words):
            return {"heard": number, "words": _shifted(words, -now_s)}
        case Gone():
            return {"gone": asdict(event)}
        case Interrupted(number):
            return {"interrupted": number}
        case Looked(looks):
            rows = {n: _moved(look, -now_s) for n, look in looks.items()}
            return {"looked": rows}
    raise TypeError(f"{event!r} is no event of a Host")


def as_event(words: Words) -> object:
    """Return the event that another node's Host has sent."""
    now_s = time.monotonic()
    if "heard" in words:
        return Heard(words["heard"], _shifted(words["words"], now_s))
    if "gone" in words:
        return Gone(**words["gone"])
    if "interrupted" in words:
        return Interrupted(words["interrupted"])
    rows = words["looked"].items()
    return Looked({int(n): _moved(Look(*look), now_s) for n, look in rows})


def _moved(look: Look, by_s: float) -> Look:
    return look._replace(
        step_s=look.step_s + by_s,
        since_s=look.since_s + by_s,
        beat_s=look.beat_s + by_s,
    )


def _shifted(words: Words, by_s: float) -> Words:
    """Return words with the times of a regrouping, if they have any, moved."""
    if "times" not in words:
        return words
    times = {
        name: value + by_s if name.endswith("_s") else value
        for name, value in words["times"].items()
    }
    return {**words, "times": times}
