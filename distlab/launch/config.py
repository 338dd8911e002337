"""What a launch is told: how many ranks, where they meet, how often they may restart.

The names and their meanings are torchrun's.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "nccl", "tcp")
DEFAULT_PORT = 29500  # torchrun's
LOOPBACK = "127.0.0.1"


class LaunchError(ValueError):
    """The launch cannot begin; the message is one sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How to start `nnodes * nproc_per_node` ranks.

    Raises:
        LaunchError: a field has a value that cannot be.
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    """From 0; only with one node may it be left out. Node 0 keeps the store."""
    master_addr: str = LOOPBACK
    """An address of node 0 that all nodes reach."""
    master_port: int = 0
    """One node: MASTER_PORT, and 0 is a free one. Several: where their agents meet."""
    backend: str = "gloo"
    """The ranks find it in DISTLAB_BACKEND; `nccl` needs a GPU for each rank."""
    max_restarts: int = 0
    """After a failure all ranks start again, at most so often."""
    monitor_interval: float = 0.1
    """Seconds from one look at the ranks to the next: a failure is noticed then."""
    start_timeout: float = 300.0
    """Seconds that the agents of several nodes wait for one another."""
    grace_period: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    log_dir: str | Path = "."
    """The folder of rank_<r>.log; made if it is not there."""

    def __post_init__(self) -> None:
        self._expect_whole_numbers()
        self._expect_seconds()
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise LaunchError(f"backend is {self.backend!r}; there are {known}")
        if not 0 <= self.master_port < 2**16:
            raise LaunchError(f"master_port is {self.master_port}, no port: 0 to 65535")
        self._expect_node_rank()

    @property
    def world_size(self) -> int:
        """The ranks of all nodes."""
        return self.nnodes * self.nproc_per_node

    @property
    def node(self) -> int:
        """`node_rank`, where 0 need not be said."""
        return self.node_rank or 0

    @property
    def meeting_port(self) -> int:
        """Where the agents of several nodes meet."""
        return self.master_port or DEFAULT_PORT

    def _expect_whole_numbers(self) -> None:
        least = {"nproc_per_node": 1, "nnodes": 1, "max_restarts": 0, "master_port": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise LaunchError(f"{name} is {value!r}, must be a whole number")
            if value < smallest:
                raise LaunchError(f"{name} is {value}, must be at least {smallest}")

    def _expect_seconds(self) -> None:
        for name in ("monitor_interval", "start_timeout", "grace_period"):
            value = getattr(self, name)
            is_zero_fine = name == "grace_period"
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise LaunchError(f"{name} is {value!r}, must be a number of seconds")
            if value < 0 or (value == 0 and not is_zero_fine):
                least = "at least 0" if is_zero_fine else "more than 0"
                raise LaunchError(f"{name} is {value:g} s, must be {least}")

    def _expect_node_rank(self) -> None:
        if self.nnodes > 1 and self.node_rank is None:
            raise LaunchError(
                f"nnodes is {self.nnodes}: say which node this is, with --node-rank "
                f"0 to {self.nnodes - 1}"
            )
        if not 0 <= self.node < self.nnodes:
            raise LaunchError(
                f"node_rank is {self.node_rank}, but with {self.nnodes} "
                f"node{'s' * (self.nnodes > 1)} it is "
                + (f"0 to {self.nnodes - 1}" if self.nnodes > 1 else "0")
            )


def config_from(values: Mapping[str, Any]) -> LaunchConfig:
    """A configuration from names and values.

    Raises:
        LaunchError: there is no such name, or a value cannot be.
    """
    known = [field.name for field in fields(LaunchConfig)]
    for name in values:
        if name not in known:
            raise LaunchError(f"there is no {name!r}; there are {', '.join(known)}")
    return LaunchConfig(**values)


def expect_address(config: LaunchConfig) -> None:
    """See that `master_addr` can be looked up.

    Raises:
        LaunchError: it cannot.
    """
    try:
        socket.getaddrinfo(config.master_addr, None, socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(
            f"master_addr {config.master_addr!r} cannot be looked up: {reason}"
        ) from error
