"""A launcher's events and actions for unit `process_group`, and real processes.

`run` translates between a launcher and real processes: it turns news about processes
into events, and the launcher's actions into processes and signals. The launcher itself
therefore touches neither.
"""

from __future__ import annotations

import math
import os
import signal as signals
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, signal
from typing import Protocol

from distlab.comm.services import Tick, WakeAt

# Windows doesn't have it, but a decision to send it can be judged there all the same.
SIGKILL: int = getattr(signals, "SIGKILL", 9)

# ── what happens, and what to do about it ───────────────────────────────────────────


@dataclass(frozen=True)
class Begin:
    """Event: the launcher has been created; this is always the first event."""


@dataclass(frozen=True)
class Ended:
    """Event: the process of this rank has ended; the code is -s after signal s."""

    rank: int
    code: int


@dataclass(frozen=True)
class Interrupted:
    """Event: the launcher itself got this signal, from a user or a scheduler."""

    signal: int


@dataclass(frozen=True)
class Start:
    """Action: start the process of this rank."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Signal:
    """Action: send a signal to the process of this rank."""

    rank: int
    signal: int


@dataclass(frozen=True)
class Finish:
    """Action: end the launcher itself, with this exit code."""

    exit_code: int


Event = Begin | Ended | Interrupted | Tick
Action = Start | Signal | WakeAt | Finish
"""`WakeAt(at_s)` asks for one `Tick` at that time, and a later one replaces it."""


class Launches(Protocol):
    """The interface of a launcher that `run` can drive."""

    world_size: int

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        """Return the actions for an event; `now_s` never decreases."""


# ── the launcher at work: real processes, a real clock ──────────────────────────────


class Processes:
    """Starts a launcher's real processes and reports news about them as events."""

    def __init__(self, command: Sequence[str], world_size: int) -> None:
        self.command, self.world_size = command, world_size
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.ports: dict[int, int] = {}  # of the store, by generation
        self.wake_at_s = math.inf
        self.events: list[Event] = [Begin()]
        for number in (SIGINT, SIGTERM):
            signal(number, lambda which, _: self.events.append(Interrupted(which)))

    def start(self, rank: int, generation: int) -> None:
        """Start this rank with the environment that torch.distributed reads."""
        port = self.ports.setdefault(generation, free_port())
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size}
        own |= {"TORCHELASTIC_RESTART_COUNT": generation - 1, "MASTER_PORT": port}
        texts = {name: str(value) for name, value in own.items()}
        environment = os.environ | texts | {"MASTER_ADDR": "127.0.0.1"}
        # In a new session: Ctrl-C reaches the launcher only.
        self.running[rank] = subprocess.Popen(
            self.command, env=environment, start_new_session=True
        )

    def new_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        for rank, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[rank]
                events.append(Ended(rank, code))
        if time.monotonic() >= self.wake_at_s:
            self.wake_at_s = math.inf
            events.append(Tick())
        return events


def run(launcher: Launches, command: Sequence[str]) -> int:
    """Drive the launcher with real processes of this command; return its exit code."""
    processes = Processes(command, launcher.world_size)
    while True:
        for event in processes.new_events():
            for action in launcher.on(event, time.monotonic()):
                match action:
                    case Start(rank, generation):
                        processes.start(rank, generation)
                    case Signal(rank, number) if rank in processes.running:
                        processes.running[rank].send_signal(number)
                    case WakeAt(at_s):
                        processes.wake_at_s = at_s
                    case Finish(exit_code):
                        return exit_code
        time.sleep(0.02)


def free_port() -> int:
    """Return a port of this node on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
