"""A communicator whose group can be replaced, and how a process gets its state.

set-up     the process is alone as rank 0 of 1, and sends nothing
form       the agent says who is in the group, and gloo connects them
take       all of them take the state of the same step: see `copies`
lost       a peer has gone, so the process leaves the group and waits for the next one
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    TCPStore,
)

from distlab.comm import Call, Comm, CommRefusedError, TorchComm, Work, Wrapper
from distlab.comm._process_groups import make_gloo_group
from distlab.distributed.environment import LOOPBACK, own_host
from distlab.launch.control import Go, Member
from distlab.launch.pages import Page
from distlab.transports import Transport, transport_names

T = TypeVar("T")
FORM_S = 10.0  # to connect processes that have all just said that they are here


class FormError(RuntimeError):
    """Raised if a group can't be connected because one of its processes has ended."""


class RegroupingComm(Wrapper):
    """The default communicator under an agent that can regroup.

    It stays the same object, so everything that refers to it continues with the new
    group.
    """

    def __init__(self, member: Member, page: Page, timeout_s: float) -> None:
        super().__init__(_alone())
        self.member, self.page = member, page
        self.generation = 0
        self.shift = 1  # from a rank to the one that keeps a copy of its own state
        self._timeout_s = timeout_s
        self._store: Any = None
        member.on_regroup(self.abort)

    @property
    def is_set_up(self) -> bool:
        """Return True if this process has been given its rank."""
        return self.generation > 0

    def form(self, go: Go) -> None:
        """Connect the group of `go`; collective over its members.

        Raises:
            FormError: one of the members has ended.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = os.environ.get("DISTLAB_HOST") or own_host((host, port))
        if self._store is None:
            limit = timedelta(seconds=FORM_S)
            self._store = TCPStore(
                host, port, None, False, limit, wait_for_workers=False
            )
        store = PrefixStore(f"generation/{go.generation}", self._store)
        try:
            group = make_gloo_group(store, go.rank, go.size, FORM_S, own)
        except RuntimeError as error:
            raise FormError(str(error)) from error
        # From now on a call may wait for a rank that computes for long.
        group._set_default_timeout(timedelta(seconds=self._timeout_s))
        comm = TorchComm(
            group, store=store, local_rank=go.local_rank, timeout_s=self._timeout_s
        )
        self._inner, self.generation = cast(Comm, comm), go.generation
        self.shift = go.shift
        os.environ |= {
            "RANK": str(go.rank),
            "LOCAL_RANK": str(go.local_rank),
            "LOCAL_WORLD_SIZE": str(go.local_size),
            "WORLD_SIZE": str(go.size),
        }

    def leave(self) -> None:
        """Close this group's connections, so that no other member waits for us."""
        with contextlib.suppress(RuntimeError):
            self._inner.abort()

    def end(self) -> None:
        """Leave the last group and end its threads."""
        self.leave()
        cast(TorchComm, self._inner).close()

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.op == "new_group":
            raise CommRefusedError(
                "new_group is not available here: the group of all ranks may be made "
                "anew at any step, and a part of the old one would be lost"
            )
        with self.page.waiting():
            result = proceed()
        if call.blocking:
            return result
        return _WatchedWork(cast(Work, result), self.page)  # type: ignore[return-value]

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        raise AssertionError("new_group is refused")


class _WatchedWork:
    """A Work that tells the agent when the process waits in it."""

    def __init__(self, work: Work, page: Page) -> None:
        self._work, self._page = work, page

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        with self._page.waiting():
            self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._work.is_completed()


def send_bytes(comm: Comm, data: bytes, dst: int) -> None:
    """Send bytes of any length; the other side calls `recv_bytes`."""
    comm.send(torch.tensor([len(data)]), dst)
    if data:
        comm.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst)


def recv_bytes(comm: Comm, src: int) -> bytes:
    """Receive the bytes that `send_bytes` sent."""
    length = torch.zeros(1, dtype=torch.int64)
    comm.recv(length, src)
    data = torch.empty(int(length), dtype=torch.uint8)
    if len(data):
        comm.recv(data, src)
    return data.numpy().tobytes()


def pass_on(comm: Comm, data: bytes, shift: int = 1) -> bytes:
    """Send bytes to the rank `shift` further on, and return those sent to this one."""
    rank, n = comm.rank, comm.world_size
    after, before = (rank + shift) % n, (rank - shift) % n
    lengths = torch.tensor([len(data), 0])
    comm.sendrecv(lengths[:1], after, lengths[1:], before)
    received = torch.empty(int(lengths[1]), dtype=torch.uint8)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    comm.sendrecv(sent, after, received, before)
    return received.numpy().tobytes()


def open_regrouping(transport: Transport, timeout_s: float) -> RegroupingComm | None:
    """Open this process's communicator; return None without an agent that can regroup.

    Raises:
        ValueError: the transport's groups can't be formed again.
    """
    member, page = Member.from_environment(), Page.from_environment()
    if member is None or page is None:
        return None
    if not transport.regroups:
        able = " or ".join(transport_names(lambda one: one.regroups))
        raise ValueError(
            f"backend {transport.name!r}: --standby and --elastic need {able}"
        )
    page.beat()
    return RegroupingComm(member, page, timeout_s)


def _alone() -> Comm:
    group = make_gloo_group(HashStore(), 0, 1, FORM_S, LOOPBACK)
    return cast(Comm, TorchComm(group, store=HashStore(), local_rank=0))
