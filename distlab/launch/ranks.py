"""The processes of this node: their environment, their ends, and nothing left of them.

Each rank leads a session, so that Ctrl-C reaches the agent only and what a rank starts
can be found. A thread waits for each: the ends come in the order in which they
happened, and the rank that failed first is known, though the agent looks rarely.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from distlab.given.launching import Ended
from distlab.launch import boot
from distlab.launch.config import LaunchConfig
from distlab.launch.interfaces import interface_to
from distlab.launch.logs import Log
from distlab.runner.processes import descendants, end_sessions, is_stopped


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of one generation find their store."""

    address: str
    port: int
    generation: int
    nodes: tuple[int, ...] = ()
    """Whose ranks come in this order; none: all of the launch."""


class Ranks:
    """The ranks of this node; `inbox` gets an Ended for each process that ends."""

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        logs: Mapping[int, Log],
        inbox: SimpleQueue[object],
    ) -> None:
        self._config, self._command = config, list(command)
        self._logs, self._inbox = logs, inbox
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()

    def start(self, rank: int, meeting: Meeting) -> None:
        """Start one; what it prints goes into its log."""
        log = self._logs[rank]
        log.begin(meeting.generation)
        first = [sys.executable, "-I", "-S", boot.__file__, str(os.getpid())]
        process = subprocess.Popen(
            [*first, *self._command],
            env=rank_variables(self._config, rank, meeting, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log.descriptor,
            stderr=log.descriptor,
            start_new_session=True,
        )
        self._running[rank] = process
        self._sessions.add(process.pid)
        threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of `rank`, if it runs.

        One that is stopped is sent SIGCONT too, or it would never get the other.
        """
        process = self._running.get(rank)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            if number != signal.SIGKILL and is_stopped(process.pid):
                process.send_signal(signal.SIGCONT)

    def buried(self, rank: int) -> None:
        """The agent has taken notice of its end: end what that rank has left."""
        process = self._running.pop(rank, None)
        if process is not None and sys.platform.startswith("linux"):
            end_sessions({process.pid})

    @property
    def running(self) -> list[int]:
        """The ranks whose end has not been noticed."""
        return sorted(self._running)

    def kill(self) -> None:
        """SIGKILL for all of them and for all they have started; returns when done."""
        for process in self._running.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        if sys.platform.startswith("linux"):
            end_sessions(self._sessions)
        self._running.clear()

    def left(self) -> list[int]:
        """What still runs in the sessions of this node's ranks (Linux)."""
        return [
            pid for pid in descendants(os.getpid()) if _session(pid) in self._sessions
        ]

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._inbox.put(Ended(rank, process.wait()))


def rank_variables(
    config: LaunchConfig, rank: int, meeting: Meeting, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of `rank`: what torchrun sets, and DISTLAB_BACKEND.

    TORCHELASTIC_USE_AGENT_STORE=True makes every rank a client of the store at
    MASTER_PORT; without it, init_process_group("env://") of rank 0 would open one.
    """
    nproc, nodes = config.nproc_per_node, meeting.nodes or range(config.nnodes)
    place = nodes.index(config.node)
    world_size = config.world_size if config.stays else len(nodes) * nproc
    own: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank - place * nproc,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": place,
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RESTART_COUNT": meeting.generation - 1,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_RUN_ID": inherited.get("SLURM_JOB_ID", "none"),
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "DISTLAB_BACKEND": config.backend,
    }
    defaults = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun; the ranks share the cores
    if interface := interface_to(meeting.address):
        # gloo would look up the host's own name: often 127.0.1.1, or slow.
        defaults["GLOO_SOCKET_IFNAME"] = interface
    texts = {name: str(value) for name, value in own.items()}
    return defaults | dict(inherited) | texts


def command_for(script: str, arguments: Sequence[str]) -> list[str]:
    """How a script is run: by this Python."""
    return [sys.executable, str(Path(script)), *map(str, arguments)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
