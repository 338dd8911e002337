"""Messages over NCCL: none is launched alone that may have to wait for another.

    isend ─┐ noted                     rank 0   send → 1 ┐     rank 1   send → 0 ┐
    irecv ─┤ noted                              recv ← 1 ┘              recv ← 0 ┘
    wait  ─┴─▶ one launch of all                 one group               one group

Source: NCCL user guide, "Point-to-point communication"; torch's `batch_isend_irecv`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm._protocol import CommRefusedError


def make_nccl_group(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Meet the other ranks (collective), each with a GPU, shared if there are too few.

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
    """The ProcessGroupNCCL of a group of torch's, connected (collective).

    A communicator needs all of its ranks, and a first message has only two.
    """
    backend = group._get_backend(device)
    if group.bound_device_id is None:
        backend.eager_connect_single_device(device)
    return backend


class NcclMessages:
    """The sends and receives of a rank that were started and not yet launched.

    NCCL connects two ranks when the first message between them is launched, and the
    launch waits for that: two ranks that both send first would wait for each other. So
    a start is only noted. Whoever has to wait, for a message or in a collective,
    launches all that is noted as one group, whose members run side by side.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._noted: list[NcclMessage] = []

    def note(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int
    ) -> NcclMessage:
        """Start a message; it is under way from the next launch on.

        Raises:
            CommRefusedError: it has a tag. NCCL matches messages by their order.
        """
        if tag:
            raise CommRefusedError(f"{kind} with tag {tag}: NCCL knows no tags")
        message = NcclMessage(self, kind, tensor, peer)
        self._noted.append(message)
        return message

    def launch(self) -> None:
        """Hand all that is noted to NCCL, as one group."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        self._group._start_coalescing()
        for message in noted:
            getattr(self._group, message.kind)([message.tensor], message.peer, 0)
        work = self._group._end_coalescing()
        for message in noted:
            message.work = work


class NcclMessage:
    """One of them: to `TorchWork` what torch's Work is."""

    def __init__(
        self,
        messages: NcclMessages,
        kind: Literal["send", "recv"],
        tensor: Tensor,
        peer: int,
    ) -> None:
        self._messages = messages
        self.kind, self.tensor, self.peer = kind, tensor, peer
        self.work: Any = None

    def wait(self, timeout: timedelta) -> None:
        """Until the group that it was launched in is over."""
        if self.work is None:
            self._messages.launch()
        self.work.wait(timeout)
