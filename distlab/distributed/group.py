"""Create, query and destroy the default group of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from distlab.comm import Comm
from distlab.distributed.environment import Place, default_backend, read_place
from distlab.distributed.opening import open_comm, usable_transport
from distlab.distributed.parts import tasks
from distlab.distributed.regrouping import RegroupingComm, open_regrouping
from distlab.transports import Transport

DEFAULT_TIMEOUT_S = 1800.0  # torch's own default
PARTING_S = 5.0


@dataclass(frozen=True)
class Group:
    """A communicator, the way we opened it, and the function that closes it."""

    comm: Comm
    transport: Transport
    place: Place
    close: Callable[[], None]


@dataclass
class _State:
    group: Group | None = None
    num_opened: int = 0
    endings: list[Callable[[], None]] = field(default_factory=list)


_STATE = _State()


def init_process_group(
    backend: str | None = None,
    init_method: str = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Meet the other ranks and create the default group; collective.

    If you pass no arguments, we read the rank and the address from RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which a launcher sets, or from the
    variables that srun sets. A single process needs none of them. `backend` is "gloo",
    "nccl" or "tcp"; without it, we use the backend of `distlab.launch --backend`, or
    gloo. `timeout_s` limits every wait for another rank. Over "tcp" the ranks meet
    through the store of unit process_group.

    Raises:
        ValueError: the backend doesn't exist, or a part of the rank or address is
            missing.
        RuntimeError: there is a default group already.
        PeerLost, MeetingError: a rank didn't come within `timeout_s`.

    Example:
        init_process_group("gloo", timeout_s=60)
        assert is_initialized()
        destroy_process_group()
    """
    if _STATE.group is not None:
        raise RuntimeError(
            "there is a default group already: call destroy_process_group() first"
        )
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, must be positive")
    transport = usable_transport(backend or default_backend())
    if (regrouping := open_regrouping(transport, timeout_s)) is not None:
        place = Place(rank=0, world_size=1, local_rank=0)
        _STATE.group = Group(regrouping, transport, place, regrouping.end)
        return
    place = read_place(init_method, world_size, rank)
    comm, close = open_comm(transport, place, timeout_s, _STATE.num_opened)
    _STATE.num_opened += 1
    _STATE.group = Group(comm, transport, place, close)


def destroy_process_group() -> None:
    """Close the default group of this process, or do nothing if there is none.

    Call it on every rank. It waits up to 5 s for the other ranks, so that none of them
    loses this one in its last collective. If an exception is propagating, it doesn't
    wait.

    Example:
        init_process_group("tcp")
        destroy_process_group()
        assert not is_initialized()
    """
    group, _STATE.group = _STATE.group, None
    endings, _STATE.endings = _STATE.endings, []
    if group is not None:
        all_are_done = False
        if sys.exc_info()[0] is None:
            with contextlib.suppress(RuntimeError, ValueError):  # PeerLost and others
                group.comm.barrier(timeout_s=PARTING_S)
                all_are_done = True
        if not all_are_done and group.transport.aborts:
            with contextlib.suppress(RuntimeError):
                group.comm.abort()  # its threads may wait for a rank that is gone
        for end in reversed(endings):
            end()
        group.close()


def before_destruction(end: Callable[[], None]) -> None:
    """Make destroy_process_group() call `end` before it closes the default group."""
    _STATE.endings.append(end)


def is_initialized() -> bool:
    """Return True if this process has a default group.

    Example:
        assert not is_initialized()
        init_process_group()
        assert is_initialized()
    """
    return _STATE.group is not None


def default_comm() -> Comm:
    """Return the default group's communicator, which every task of the course gets.

    Raises:
        RuntimeError: there is no default group.

    Example:
        init_process_group()
        comm = default_comm()
        comm.barrier(timeout_s=30)
        assert comm.rank == get_rank()
    """
    return require_group().comm


def require_group() -> Group:
    """Return the default group.

    Raises:
        RuntimeError: there is no default group.
    """
    if _STATE.group is None:
        raise RuntimeError("there is no default group: call init_process_group() first")
    return _STATE.group


def has_rank() -> bool:
    """Return True if this process knows its rank; under --standby, from step 0 on."""
    comm = require_group().comm
    return not isinstance(comm, RegroupingComm) or comm.is_set_up


def get_rank() -> int:
    """Return this process's rank in the default group.

    Example:
        init_process_group()
        assert 0 <= get_rank() < get_world_size()
    """
    return require_group().comm.rank


def get_world_size() -> int:
    """Return the number of ranks in the default group.

    Example:
        init_process_group()
        assert get_world_size() == len(all_gather(torch.zeros(1)))
    """
    return require_group().comm.world_size


def get_distributed_info() -> dict[str, Any]:
    """Describe the group and whose code runs, even before init_process_group.

    `units` has a row for each task that a public name uses, with the task's number and
    id, whose code runs ("mine" or "reference"), and the digest of that code.

    Example:
        assert not get_distributed_info()["initialized"]
        init_process_group("tcp")
        info = get_distributed_info()
        assert (info["backend"], info["rank"]) == ("tcp", get_rank())
        assert {row["whose"] for row in info["units"]} <= {"mine", "reference"}
    """
    group = _STATE.group
    return {
        "available": bool(dist.is_available()),
        "initialized": group is not None,
        "world_size": group.comm.world_size if group else 1,
        "rank": group.comm.rank if group else 0,
        "local_rank": group.comm.local_rank if group else 0,
        "backend": group.transport.name if group else None,
        "transport": group.transport.title if group else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "units": [
            {
                "number": part.number,
                "task": part.task,
                "whose": part.whose,
                "digest": part.digest,
            }
            for part in tasks()
        ],
    }
