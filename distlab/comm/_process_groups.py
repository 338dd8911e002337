"""Create the process groups of torch that `TorchComm` uses."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_ABORT_TAG = (1 << 31) - 1


def make_gloo_group(
    store: Any, rank: int, world_size: int, timeout_s: float, host: str = LOOPBACK
) -> Any:
    """Meet the other ranks through `store`; collective.

    `host` is the address of this machine by which the other ranks reach it.

    Returns:
        torch's ProcessGroupGloo.
    """
    gloo: Any = dist.ProcessGroupGloo  # its options are missing from torch's stubs
    options = gloo._Options()
    # An address by number: a laptop's host name may resolve to an interface that is
    # down, and then gloo waits in silence.
    device = gloo.create_device(hostname=host)
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, world_size, options)


def make_nccl_group(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Meet the other ranks, each on a GPU; if there are too few, ranks share them.

    Returns:
        torch's ProcessGroupNCCL; this process's current GPU is the rank's.
    """
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    if world_size > num_gpus:
        # NCCL refuses two ranks of one host on one GPU; by this name they are on hosts
        # of their own, and reach each other through sockets.
        os.environ.setdefault("NCCL_HOSTID", f"distlab-{rank // num_gpus}")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    group.eager_connect_single_device(device)  # while all are here: see `connected`
    return group


def connected(group: Any, device: torch.device) -> Any:
    """Return the ProcessGroupNCCL of a torch group after connecting it; collective.

    To connect a communicator, all of its ranks must take part, but a first message
    involves only two.
    """
    backend = group._get_backend(device)
    if group.bound_device_id is None:
        backend.eager_connect_single_device(device)
    return backend


def close_gloo_group(group: Any) -> None:
    """Close the connections of a ProcessGroupGloo of several ranks."""
    # gloo's own abort does nothing. What does close a group's connections is a receive
    # that is given up: one, with a tag that nobody uses, for 1 ms.
    anyone = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], anyone, _ABORT_TAG).wait(timedelta(milliseconds=1))
