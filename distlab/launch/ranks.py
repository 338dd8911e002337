"""Run the processes of this node: their environment, their ends, and the cleanup.

Each rank leads a session, so that Ctrl-C reaches only the agent, and so that we can
find everything that the rank starts. A thread waits for each rank. We therefore learn
of ends in the order in which they happened, and know which rank failed first, even
though the agent looks only rarely.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from distlab.given.process_group import Ended
from distlab.launch import boot
from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.hangs import Hangs
from distlab.launch.interfaces import interface_to
from distlab.launch.logs import RankLog, Terminal
from distlab.launch.monitored import Monitored
from distlab.launch.records import ERROR_FILE
from distlab.launch.report import NUM_LINES, Gone
from distlab.processes.tree import descendants, end_sessions, is_stopped

LOCAL_RANK_MACRO = "${local_rank}"  # torchrun replaces it in a script's arguments
_RUN_PATH = """\
import runpy, sys
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The place where the ranks of one generation find their store."""

    address: str
    port: int
    generation: int
    nodes: tuple[int, ...] = ()
    """The nodes whose ranks come in this order; empty means all of the launch."""


class Ranks:
    """The ranks of this node; `inbox` gets an Ended for each process that ends."""

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        logs: Mapping[int, RankLog],
        terminal: Terminal,
        inbox: SimpleQueue[object],
        monitored: Monitored | None = None,
        hangs: Hangs | None = None,
    ) -> None:
        self._monitored, self._hangs = monitored, hangs
        self._config, self._command = config, list(command)
        self._logs, self._terminal, self._inbox = logs, terminal, inbox
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()

    def start(self, rank: int, meeting: Meeting) -> None:
        """Start a rank; its output goes to its log.

        Raises:
            LaunchError: the system can't start the process.
        """
        log = self._logs[rank]
        log.begin(meeting.generation)
        variables = rank_variables(self._config, rank, meeting, os.environ)
        if self._monitored:
            variables |= self._monitored.variables(meeting.generation, variables)
        if self._hangs:
            variables |= self._hangs.variables(variables)
        variables[ERROR_FILE] = str(log.error_file.absolute())
        try:
            process = subprocess.Popen(
                self._command_of(rank),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log.descriptor,
                stderr=log.stderr,
                start_new_session=True,
            )
        except OSError as error:  # too many processes, arguments too long, …
            reason = error.strerror or str(error)
            raise LaunchError(f"rank {rank} can't be started: {reason}") from error
        self._running[rank] = process
        self._sessions.add(process.pid)
        threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of `rank`, if it runs.

        A stopped process also gets SIGCONT, because otherwise it would never get the
        signal.
        """
        process = self._running.get(rank)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            if number != signal.SIGKILL and is_stopped(process.pid):
                process.send_signal(signal.SIGCONT)

    def buried(self, ended: Ended) -> Gone:
        """End whatever this rank has left, and show and return its last lines."""
        rank, code, log = ended.rank, ended.code, self._logs[ended.rank]
        process = self._running.pop(rank, None)
        if process is not None and sys.platform.startswith("linux"):
            end_sessions({process.pid})
        self._terminal.catch_up([rank])
        return Gone(
            number=rank,
            code=code,
            lines=log.last_lines(NUM_LINES) if code else (),
            log=log.where,
            node=node_name(self._config),
            record=log.record() if code else {},
        )

    @property
    def running(self) -> list[int]:
        """Return the ranks whose end nobody has noticed yet."""
        return sorted(self._running)

    def kill(self) -> None:
        """Send SIGKILL to all ranks and all they have started; wait for them to end."""
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
        """Return what still runs in the sessions of this node's ranks (Linux)."""
        return [
            pid for pid in descendants(os.getpid()) if _session(pid) in self._sessions
        ]

    def _command_of(self, rank: int) -> list[str]:
        local_rank = str(self._config.local_rank(rank))
        own = [part.replace(LOCAL_RANK_MACRO, local_rank) for part in self._command]
        if self._config.numa_binding is not None:
            own = bound_to_cpus(own, int(local_rank), self._config.numa_binding)
        return [sys.executable, "-I", "-S", boot.__file__, str(os.getpid()), *own]

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._inbox.put(Ended(rank, process.wait()))


def rank_variables(
    config: LaunchConfig, rank: int, meeting: Meeting, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of `rank`: what torchrun sets, and DISTLAB_BACKEND.

    TORCHELASTIC_USE_AGENT_STORE=True makes every rank a client of the store at
    MASTER_PORT. Without it, init_process_group("env://") of rank 0 would open another
    one.
    """
    nproc, nodes = config.nproc_per_node, meeting.nodes or range(config.nnodes)
    place = nodes.index(config.node)
    world_size = config.world_size if config.stays else len(nodes) * nproc
    local_rank = rank - place * nproc
    own: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": place,
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_NAME": config.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RESTART_COUNT": meeting.generation - 1,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_RUN_ID": job_name(config, inherited),
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(config.handled),
        "DISTLAB_BACKEND": config.backend,
    }
    if config.virtual_local_rank:
        own["LOCAL_RANK"] = 0
        own["CUDA_VISIBLE_DEVICES"] = own_gpu(local_rank, inherited)
    defaults = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun; the ranks share the cores
    if config.local_addr is not None:
        defaults["DISTLAB_HOST"] = config.local_addr
    if interface := interface_to(config.local_addr or meeting.address):
        # gloo would look up the host's own name: often 127.0.1.1, or slow.
        defaults["GLOO_SOCKET_IFNAME"] = interface
    texts = {name: str(value) for name, value in own.items()}
    return defaults | dict(inherited) | texts


def node_name(config: LaunchConfig) -> str:
    """Return the name of this node in reports, which is empty for node 0."""
    return f"node {config.node} ({socket.gethostname()})" if config.node else ""


def job_name(config: LaunchConfig, inherited: Mapping[str, str]) -> str:
    """Return the name of the job: the given one, SLURM's, or torchrun's "none"."""
    return config.run_id or inherited.get("SLURM_JOB_ID", "none")


def with_own_name(config: LaunchConfig, inherited: Mapping[str, str]) -> LaunchConfig:
    """Name a job of one node that has no name yet, as torchrun --standalone does.

    Scripts use the name for folders and groups of runs, so two jobs on one machine must
    not share it. If there are several nodes, their agents can't invent a name.
    """
    if config.nnodes > 1 or job_name(config, inherited) != "none":
        return config
    return replace(config, run_id=str(uuid.uuid4()))


def own_gpu(local_rank: int, inherited: Mapping[str, str]) -> str:
    """Return a value for CUDA_VISIBLE_DEVICES that shows a rank only its own GPU.

    Raises:
        LaunchError: there are fewer visible GPUs.
    """
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    names = [name.strip() for name in visible.split(",")]
    if local_rank >= len(names):
        raise LaunchError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU of its own in "
            f"CUDA_VISIBLE_DEVICES={visible}"
        )
    return names[local_rank]


def bound_to_cpus(command: Sequence[str], gpu: int, how: str) -> list[str]:
    """Wrap the command so that it stays on the CPUs near a GPU, which torch finds.

    Raises:
        LaunchError: this version of torch can't do this, or there is no such GPU.
    """
    try:
        from torch.numa import binding

        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(how))
        wrap = binding._maybe_wrap_command_args_with_numa_binding
        return list(wrap(tuple(command), gpu_index=gpu, numa_options=options))
    except Exception as error:  # torch's private function may raise anything
        raise LaunchError(
            f"--numa-binding {how}: torch can't bind local rank {gpu} to the CPUs "
            f"near its GPU ({type(error).__name__}: {error}); drop the option"
        ) from error


def command_for(program: Sequence[str], run_as: str = "script") -> list[str]:
    """Return the command to run a script, with this Python or with PYTHON_EXEC."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    first = {
        "script": [python],
        "module": [python, "-m"],
        "command": [],
        "path": [python, "-c", _RUN_PATH],
    }
    return [*first[run_as], *program]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
