"""Meet the other ranks of a job and open a communicator by any transport.

    every rank ─▶ torch's store at MASTER_ADDR:MASTER_PORT ─▶ gloo, NCCL: TorchComm
    every rank ─▶ the same, for one address ─▶ the course's Rendezvous ─▶ tcp: TcpComm

torchrun and `distlab.launch` keep torch's store in their own process; without them,
rank 0 keeps it. Over TCP, the ranks use it only to find out where the course's store
listens. They find each other through that one, and send everything else through
TcpComm. Each transport in distlab.transports decides which of the two stores it uses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    TCPStore,
)

from distlab.comm import Comm, MeetingError
from distlab.distributed.attendance import check_in, report_second_keeper
from distlab.distributed.environment import Place, own_host
from distlab.distributed.meeting import meet
from distlab.distributed.parts import UnitError
from distlab.transports import Meeting, Transport, find_transport, transport_names


def usable_transport(backend: str) -> Transport:
    """Return a transport that can work here.

    Raises:
        ValueError: there is none of that name, or this machine doesn't have it.
    """
    if backend == "mpi":
        known = ", ".join(transport_names())
        raise ValueError(
            f"backend 'mpi' needs a torch built with MPI: choose one of {known}"
        )
    transport = find_transport(backend)
    if transport.needs_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"backend {backend!r} needs a GPU, and torch finds none: use gloo"
        )
    return transport


def open_comm(
    transport: Transport, place: Place, timeout_s: float, number: int
) -> tuple[Comm, Callable[[], None]]:
    """Meet the other ranks; return a communicator and how to close it; collective.

    `number` counts the groups opened before, and must be equal on all ranks.

    Raises:
        ValueError: MASTER_ADDR can't be looked up, MASTER_PORT is in use, or ranks
            disagree about RANK or WORLD_SIZE.
        MeetingError: a rank did not arrive within `timeout_s`.
    """
    prefix = f"distlab/{place.generation}/{number}"
    store = PrefixStore(prefix, _base_store(place, timeout_s, prefix))
    host = os.environ.get("DISTLAB_HOST") or own_host(place.address)
    check_in(PrefixStore("attendance", store), place, timeout_s)
    meeting = _Meeting(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        host=host,
        timeout_s=timeout_s,
        place=place,
        store=store,
    )
    try:
        comm = transport.open(meeting)
    except Exception as error:
        meeting.close()
        if isinstance(error.__cause__, UnitError):  # the store failed, and no rank
            raise error.__cause__ from None
        raise

    def close() -> None:
        comm.close()
        meeting.close()

    return comm, close


@dataclass(kw_only=True)
class _Meeting(Meeting):
    """The meeting of a job's ranks."""

    place: Place
    store: Any
    _close: Callable[[], None] | None = field(default=None, init=False)

    def torch_store(self) -> Any:
        """Implement `Meeting.torch_store`."""
        return self.store

    def own_store(self) -> tuple[Any, bytes]:
        """Implement `Meeting.own_store`: that of unit process_group."""
        keeper = meet(self.store, self.place, self.host, self.timeout_s)
        self._close = keeper.close
        return keeper.store, keeper.secret

    def close(self) -> None:
        """Close our own store, if it was opened."""
        if self._close is not None:
            self._close()


_ANSWER_S = 2.0
_STORES: dict[tuple[str, int], Any] = {}
"""Torch's stores by address, because later groups of this process reuse them."""


def _base_store(place: Place, timeout_s: float, prefix: str) -> Any:
    if place.address is None:
        return HashStore()
    if place.address not in _STORES:
        host, port = place.address
        is_keeper = place.rank == 0 and not place.has_agent
        try:
            _STORES[place.address] = TCPStore(
                host_name=host,
                port=port,
                world_size=place.world_size,
                is_master=is_keeper,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            if is_keeper:
                _tell_the_other(place, prefix)
                raise ValueError(
                    f"rank 0 can't open the job's store at port {port} of {host}: "
                    "another program or a second rank 0 uses the port, or the address "
                    "isn't this machine's; set MASTER_ADDR and MASTER_PORT"
                ) from error
            raise MeetingError(
                f"rank {place.rank} waited {timeout_s:g} s for the job's store on rank "
                f"0, but nothing answers at port {port} of {host}; are "
                "MASTER_ADDR and MASTER_PORT the same on all ranks?"
            ) from error
    found = _STORES[place.address]
    found.set_timeout(timedelta(seconds=timeout_s))
    return found


def _tell_the_other(place: Place, prefix: str) -> None:
    """If another rank 0 hosts a store there, tell it, so it needn't time out."""
    assert place.address is not None
    host, port = place.address
    limit = timedelta(seconds=_ANSWER_S)
    with contextlib.suppress(RuntimeError):  # some other program uses the port
        other = TCPStore(host, port, is_master=False, timeout=limit)
        store = PrefixStore("attendance", PrefixStore(prefix, other))
        report_second_keeper(store, place)
