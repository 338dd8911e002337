"""Given to `process_group`: a launcher's events and actions, and real processes.

`run` turns what happens to processes into events, and the launcher's actions into
processes and signals; a launcher itself touches neither.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, signal
from typing import Protocol

from distlab.comm.services import Tick, WakeAt

# ── what happens, and what to do about it ───────────────────────────────────────────


@dataclass(frozen=True)
class Begin:
    """Event: the launcher has been made; comes once, first."""


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
    """Action: the launcher itself ends, with this exit code."""

    exit_code: int


Event = Begin | Ended | Interrupted | Tick
Action = Start | Signal | WakeAt | Finish
"""`WakeAt(at_s)` asks for one `Tick` at that time. A later one replaces it."""


class Launches(Protocol):
    """A launcher, as `run` sees it."""

    world_size: int

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        """What to do about an event; `now_s` never decreases."""


# ── the launcher at work: real processes, a real clock ──────────────────────────────


class Processes:
    """The real processes of a launcher, and what happens to them as events."""

    def __init__(self, command: Sequence[str], world_size: int) -> None:
        self.command, self.world_size = command, world_size
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.ports: dict[int, int] = {}  # of the store, by generation
        self.wake_at_s = math.inf
        self.events: list[Event] = [Begin()]
        for number in (SIGINT, SIGTERM):
            signal(number, lambda which, _: self.events.append(Interrupted(which)))

    def start(self, rank: int, generation: int) -> None:
        """Start this rank; torch.distributed reads its environment."""
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
        """What has happened since the last call."""
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
    """Drive the launcher with real processes of this command; returns its exit code."""
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
    """A port of this node that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
