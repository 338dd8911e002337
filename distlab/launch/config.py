"""Settings of a launch: how many ranks, where they meet, how often they may restart.

The settings have the same names and meanings as torchrun's.
"""

from __future__ import annotations

import ipaddress
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from distlab.launch.output import Output
from distlab.transports import Transport, find_transport, transport_names

ON_HANG = ("abort", "restart", "report")
RUN_AS = ("script", "module", "command", "path")
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # as torchrun
DEFAULT_PORT = 29500  # torchrun's
LOOPBACK = "127.0.0.1"
LONGEST_S = 10**9  # 31 years; no wait of Python's can be longer than 292 years


class LaunchError(ValueError):
    """Raised if the launch can't start; the message is one sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings to start `nnodes * nproc_per_node` ranks.

    Raises:
        LaunchError: a field has an invalid value.
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    min_nodes: int | None = None
    """Start with this many nodes if the rest don't join in time: `--nnodes MIN:MAX`."""
    node_rank: int | None = None
    """Counted from 0; you may leave it out only with one node. Node 0 keeps the
    store."""
    master_addr: str = LOOPBACK
    """Address of node 0 that all nodes can reach."""
    master_port: int = 0
    """On one node MASTER_PORT, or 0 for a free one; on several, the agents' meeting
    port."""
    backend: str = "gloo"
    """We pass it to the ranks in DISTLAB_BACKEND; `nccl` needs a GPU for each rank."""
    max_restarts: int = 0
    """Restart all ranks after a failure, at most this many times."""
    monitor_interval: float = 0.1
    """Seconds between two looks at the ranks, which is when we notice a failure."""
    start_timeout: float = 300.0
    """Seconds that the agents of several nodes wait for each other."""
    last_call: float = 30.0
    """With min_nodes: seconds that this many nodes wait for the others."""
    node_timeout: float = 15.0
    """Seconds of silence after which a node counts as lost; torchrun uses 3 × 5 s."""
    grace_period: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    log_dir: str | Path | None = None
    """Folder for rank_<r>.log, created if needed. None: we don't keep the logs."""
    output: Output = field(default_factory=Output)
    """Which lines to show on the terminal."""
    run_as: str = "script"
    """How to run the script: as a `script`, a `module`, a `command` without Python, or
    a `path` with runpy.run_path."""
    role: str = "default"
    """We pass it to the ranks in ROLE_NAME."""
    run_id: str | None = None
    """The name of this job, for TORCHELASTIC_RUN_ID. Agents with another name can't
    join this job's agents. None: SLURM's, or on one node a new one for each launch."""
    local_addr: str | None = None
    """This node's own address, if the ranks shouldn't look for it themselves."""
    any_node: bool = False
    """Instead of node_rank: the owner of master_addr is node 0 and numbers the rest."""
    any_port: bool = False
    """On one node, use another port if master_port is taken."""
    signals_to_handle: tuple[str, ...] = ()
    """Signals that stop the job and reach the ranks unchanged. SIGTERM, SIGINT, SIGHUP
    and SIGQUIT always stop it, but reach the ranks as SIGTERM unless named here."""
    virtual_local_rank: bool = False
    """Set LOCAL_RANK to 0 on all ranks, and show each only its own GPU."""
    numa_binding: str | None = None
    """Keep each rank on the CPUs near its GPU: node, socket, exclusive, …"""
    monitor: str | Path | None = None
    """A new folder for records of the ranks' steps, which `distlab top` shows."""
    also: tuple[str, ...] = ()
    """With monitor: also send them to places such as prometheus:9400."""
    explain_hangs: bool = False
    """Record the ranks' calls; on a hang, say which ranks disagree and where."""
    on_hang: str = "abort"
    """Then `abort` the job, count it as a failure (`restart`), or only `report` it."""
    no_progress: float = 60.0
    """With explain_hangs: say where every rank is after this long without a call."""
    hang_report: str | Path | None = None
    """With explain_hangs: a file for the report, JSON or (`.html`) a timeline."""
    hang_stacks: bool = False
    """With explain_hangs: print Python's stacks of all ranks too."""
    standby: int | None = None
    """Processes that wait to replace a rank that dies, while the other ranks stay."""
    elastic: str | None = None
    """Numbers of ranks allowed, MIN:MAX; the others continue when some die or join."""
    global_batch_size: int | None = None
    """With elastic: samples per step on all ranks, for grad_accum_steps (MAX)."""
    microbatch_size: int | None = None
    """With elastic: the most samples that fit a rank at once (global_batch_size)."""
    join_grace: float = 0.5
    """With elastic: seconds that a smaller group waits for more ranks to join."""
    freeze_timeout: float = 10.0
    """With these: a rank counts as frozen after this long and ten usual steps."""

    def __post_init__(self) -> None:
        host = self.master_addr.removeprefix("[").removesuffix("]")  # as in [::1]:29500
        object.__setattr__(self, "master_addr", host)
        self._expect_whole_numbers()
        self._expect_seconds()
        self._transport()
        if not 0 <= self.master_port < 2**16:
            raise LaunchError(
                f"master_port is {self.master_port}, but it must be 0 to 65535"
            )
        if self.run_as not in RUN_AS:
            raise LaunchError(f"run_as is {self.run_as!r}; choose one of {RUN_AS}")
        if self.on_hang not in ON_HANG:
            known = ", ".join(ON_HANG)
            raise LaunchError(f"on_hang is {self.on_hang!r}; choose one of {known}")
        if self.also and self.monitor is None:
            raise LaunchError("also needs monitor, so name a folder for it")
        self._expect_signals()
        self._expect_node_rank()
        self._expect_nodes()
        self._expect_one_node()

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes, or the maximum of an elastic job."""
        return self.sizes[1] if self.elastic else self.nnodes * self.nproc_per_node

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the minimum and maximum number of ranks of an elastic job.

        Raises:
            LaunchError: elastic doesn't have the form MIN:MAX.
        """
        least, _, most = (self.elastic or "").partition(":")
        if least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most):
            return int(least), int(most)
        raise LaunchError(
            f"elastic is {self.elastic!r}, but it must be MIN:MAX, such as 2:4"
        )

    @property
    def stays(self) -> bool:
        """Return True if the other ranks stay when one dies."""
        return self.standby is not None or self.elastic is not None

    @property
    def may_shrink(self) -> bool:
        """Return True if fewer than `nnodes` nodes may continue."""
        return self.min_nodes is not None and self.min_nodes < self.nnodes

    @property
    def node(self) -> int:
        """Return `node_rank`, which is 0 by default."""
        return self.node_rank or 0

    @property
    def num_on_node(self) -> int:
        """Return how many ranks a node has, or at most under elastic."""
        if self.elastic is None:
            return self.nproc_per_node
        return math.ceil(self.world_size / self.nnodes)

    def local_rank(self, rank: int) -> int:
        """Return the local rank of a rank on this node."""
        return rank % self.num_on_node

    @property
    def meeting_port(self) -> int:
        """Return the port where the agents of several nodes meet."""
        return self.master_port or DEFAULT_PORT

    @property
    def listens_on(self) -> str:
        """Return node 0's address for its listeners; empty means all of its addresses.

        On node 0 itself, a host name often stands for 127.0.1.1, which no other node
        can reach.
        """
        is_number = is_address(self.master_addr)
        return self.master_addr if is_number or self.nnodes == 1 else ""

    @property
    def handled(self) -> tuple[str, ...]:
        """Return the names of all signals that stop the job."""
        return tuple(dict.fromkeys((*self.signals_to_handle, *HANDLED)))

    @property
    def forwarded(self) -> frozenset[int]:
        """Return the signals that reach the ranks unchanged rather than as SIGTERM."""
        return frozenset(getattr(signal, name) for name in self.signals_to_handle)

    def _expect_whole_numbers(self) -> None:
        least = {"nproc_per_node": 1, "nnodes": 1, "max_restarts": 0, "master_port": 0}
        optional = {"standby": 0, "global_batch_size": 1, "microbatch_size": 1}
        for name, smallest in {**optional, "min_nodes": 0}.items():
            if getattr(self, name) is not None:
                least[name] = smallest
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise LaunchError(f"{name} is {value!r}, but it must be a whole number")
            if value < smallest:
                raise LaunchError(
                    f"{name} is {value}, but it must be at least {smallest}"
                )

    def _expect_seconds(self) -> None:
        may_be_zero = ("grace_period", "join_grace")
        others = ("monitor_interval", "start_timeout", "last_call", "freeze_timeout")
        for name in (*others, "node_timeout", "no_progress", *may_be_zero):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not abs(value) < math.inf:
                raise LaunchError(
                    f"{name} is {value!r}, but it must be a number of seconds"
                )
            if value < 0 or (value == 0 and name not in may_be_zero):
                least = "at least 0" if name in may_be_zero else "more than 0"
                raise LaunchError(f"{name} is {value} s, but it must be {least}")
            if value > LONGEST_S:
                raise LaunchError(
                    f"{name} is {value} s, but it must be at most {LONGEST_S} s"
                )

    def _expect_nodes(self) -> None:
        if self.min_nodes is None:
            return
        if not 1 <= self.min_nodes <= self.nnodes:
            raise LaunchError(
                f"nnodes is {self.min_nodes}:{self.nnodes}, but it must be MIN:MAX, "
                "such as 1:2"
            )

    def _expect_one_node(self) -> None:
        if not self.stays:
            return
        name = "standby" if self.elastic is None else "elastic"
        if self.elastic is not None:
            _, most = self.sizes
            if self.standby is not None:
                raise LaunchError("standby and elastic can't be combined: choose one")
            if self.nproc_per_node not in (1, most):
                raise LaunchError(
                    "elastic already says how many ranks to start, so drop "
                    "--nproc-per-node"
                )
            if (self.global_batch_size or most) < most:
                raise LaunchError(
                    f"global_batch_size must be at least {most}, so that each of MAX "
                    "ranks gets a sample"
                )
        if self.may_shrink and self.elastic is None:
            raise LaunchError(
                "standby keeps the number of ranks, so nnodes must be one number, not "
                f"{self.min_nodes}:{self.nnodes}"
            )
        if not self._transport().regroups:
            able = " or ".join(transport_names(lambda one: one.regroups))
            raise LaunchError(
                f"{name} works only with the backend {able}, not with {self.backend}"
            )
        self._expect_what_forked_processes_can(name)

    def _transport(self) -> Transport:
        try:
            return find_transport(self.backend)
        except ValueError as error:
            raise LaunchError(str(error)) from None

    def _expect_what_forked_processes_can(self, name: str) -> None:
        if self.run_as == "command":
            raise LaunchError(f"{name} only runs Python scripts, so drop --no-python")
        if any(self.output.is_split(rank) for rank in range(self.world_size)):
            raise LaunchError(
                f"{name} writes both streams of a rank to one file, so redirect either "
                "both or neither, and drop --duplicate-stdout-filters"
            )
        for option in (
            *("virtual_local_rank", "numa_binding", "monitor", "explain_hangs"),
        ):
            if getattr(self, option):
                flag = option.replace("_", "-")
                raise LaunchError(f"{name} doesn't support --{flag}, so drop it")

    def _expect_signals(self) -> None:
        for name in self.signals_to_handle:
            number = getattr(signal, name, None)
            if not name.startswith("SIG") or not isinstance(number, signal.Signals):
                raise LaunchError(
                    f"signals_to_handle names {name!r}, which is not a signal; use a "
                    "name such as SIGUSR1"
                )
            if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
                raise LaunchError(f"signals_to_handle: {name} can't be handled")

    def _expect_node_rank(self) -> None:
        if self.nnodes > 1 and self.node_rank is None and not self.any_node:
            raise LaunchError(
                f"nnodes is {self.nnodes}, so use --node-rank, from 0 to "
                f"{self.nnodes - 1}, to say which node this is"
            )
        if not 0 <= self.node < self.nnodes:
            raise LaunchError(
                f"node_rank is {self.node_rank}, but with {self.nnodes} "
                f"node{'s' * (self.nnodes > 1)} it is "
                + (f"0 to {self.nnodes - 1}" if self.nnodes > 1 else "0")
            )


def is_address(host: str) -> bool:
    """Return True if `host` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def config_from(values: Mapping[str, Any]) -> LaunchConfig:
    """Make a configuration from names and values.

    Raises:
        LaunchError: there is no such name, or a value is invalid.
    """
    known = [one.name for one in fields(LaunchConfig)]
    for name in values:
        if name not in known:
            raise LaunchError(
                f"there is no setting {name!r}; choose from {', '.join(known)}"
            )
    return LaunchConfig(**values)
