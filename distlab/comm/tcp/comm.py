"""Implement Comm over plain sockets, with nothing but TCP below it.

    TcpComm          refuses mistakes, counts calls, turns losses into PeerLost
      Engine         who moves the bytes: the rank that waits, or one that stands by
        Exchange     which send belongs to which receive, in which group
          Line       frames on one socket, payloads in the tensors' own memory
    Meeting          how the lines come about, and the proof of the job's secret

Every message is a rendezvous, as on gloo, so a program hangs here exactly if it hangs
there. Collectives use textbook algorithms over these messages (see `collectives`).

Guide: `Comm` documents the contract of each call.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distlab.comm._plain import plain
from distlab.comm._protocol import ANY, SUM, Comm, CommRefusedError, ReduceOp
from distlab.comm._refusals import Refusals
from distlab.comm._seams import Store
from distlab.comm._started import later_or_now
from distlab.comm.tcp import collectives
from distlab.comm.tcp.engine import ExchangeDriver
from distlab.comm.tcp.exchange import Exchange
from distlab.comm.tcp.flights import Flight, Membership, Schedule, Step, Transfer
from distlab.comm.tcp.handshake import MIN_SECRET_BYTES, Identity
from distlab.comm.tcp.line import Line
from distlab.comm.tcp.mesh import MeshMeeting
from distlab.comm.tcp.work import TcpWork

DEFAULT_TIMEOUT_S = 1800.0  # as on the other transports
_MAX_TAG = (1 << 63) - 1
_CPU = torch.device("cpu")


class TcpComm:
    """A rank's communicator over one TCP connection to every other rank.

    If a send or recv exceeds its `timeout_s`, the whole group is given up, here and for
    the ranks that wait for this one. A collective that times out gives up nothing. If
    part of a message has already been sent by then, the connection to that rank closes
    for all groups. Tensors must be in CPU memory. Every rank that joins has to prove
    that it knows the secret, but messages are neither encrypted nor signed.
    """

    def __init__(
        self,
        engine: ExchangeDriver,
        group: Membership,
        *,
        local_rank: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        turned_away: Counter[str] | None = None,
    ) -> None:
        self.engine, self._group = engine, group
        self.turned_away = turned_away or Counter()
        """Connections of strangers while the ranks met, by the reason."""
        self._local_rank = group.rank if local_rank is None else local_rank
        self._timeout_s = timeout_s
        self._step = 0
        self._num_groups = 0
        self._refuse = Refusals(group.rank, len(group.members))
        self._groups: list[TcpComm] = []

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        local_rank: int | None = None,
    ) -> TcpComm:
        """Meet the other ranks through `store` and connect to each; collective.

        `secret` belongs to the job and must be the same on every rank. `host` is the
        address of this machine by which the other ranks reach it. `port` is the one to
        listen on, where 0 lets the system choose.

        Raises:
            ValueError: the secret is too short, or we can't listen on the address.
            MeetingError: a rank didn't arrive within `timeout_s`, or doesn't have the
                same secret.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"the secret has {len(secret)} bytes, fewer than {MIN_SECRET_BYTES}: "
                "secrets.token_bytes(32) makes a good one"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0")
        me = Identity(secret, rank, world_size)
        meeting = MeshMeeting(store, me, host=host, port=port, timeout_s=timeout_s)
        lines = [Line(line, peer) for peer, line in sorted(meeting.hold().items())]
        exchange = Exchange(rank, lines)
        world = Membership("world", range(world_size), rank)
        exchange.add_group(world)
        comm = cls(
            ExchangeDriver(exchange),
            world,
            local_rank=local_rank,
            timeout_s=timeout_s,
            turned_away=meeting.turned_away,
        )
        atexit.register(comm._close_in, os.getpid())
        return comm

    @property
    def rank(self) -> int:
        """Implement `Comm.rank`."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Implement `Comm.world_size`."""
        return len(self._group.members)

    @property
    def local_rank(self) -> int:
        """Implement `Comm.local_rank`."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """Implement `Comm.device`."""
        return _CPU

    # ── point to point ──────────────────────────────────────────────────────────────

    @plain
    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.send`."""
        transfer = self._sending(tensor, dst, tag)
        self.engine.post(lambda: self.engine.exchange.send(transfer))
        self._work(transfer, dst).wait(timeout_s)

    @plain
    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Implement `Comm.recv`."""
        exchange = self.engine.exchange
        if src != ANY:
            transfer = self._receiving(tensor, src, tag)
            self.engine.post(lambda: exchange.receive(transfer))
            self._work(transfer, src).wait(timeout_s)
            return src
        self._refuse.tensor(tensor, "recv")
        transfer = Transfer(self._group, self._key(tag), ANY, tensor)
        self.engine.post(lambda: exchange.receive_from_anyone(transfer))
        self._work(transfer, None).wait(timeout_s)
        return self._group.members.index(transfer.peer)

    @plain
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> TcpWork:
        """Implement `Comm.isend`."""
        transfer = self._sending(tensor, dst, tag)
        exchange = self.engine.exchange
        self.engine.post(lambda: exchange.send(transfer, look=True), overlap=True)
        return self._work(transfer, dst)

    @plain
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> TcpWork:
        """Implement `Comm.irecv`."""
        transfer = self._receiving(tensor, src, tag)
        self.engine.post(lambda: self.engine.exchange.receive(transfer), overlap=True)
        return self._work(transfer, src)

    @plain
    def sendrecv(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Implement `Comm.sendrecv`."""
        self._refuse.tensor(send_tensor, "sendrecv")
        self._refuse.tensor(recv_tensor, "sendrecv")
        if dst == src == self.rank:  # one rank alone: its own neighbor on both sides
            self._refuse.unlike(send_tensor, recv_tensor)
            recv_tensor.view(-1).copy_(send_tensor.view(-1))
            return
        self._refuse.peer(dst, "sends to")
        self._refuse.peer(src, "receives from")
        sending = self._sending(send_tensor, dst, 0)
        receiving = self._receiving(recv_tensor, src, 0)
        exchange = self.engine.exchange
        self.engine.post(
            lambda: exchange.receive(receiving), lambda: exchange.send(sending)
        )
        sent = self._work(sending, dst)
        self._work(receiving, src).wait(timeout_s)
        sent.wait(timeout_s)

    # ── collectives ─────────────────────────────────────────────────────────────────

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Implement `Comm.barrier`."""
        self._barrier("barrier", timeout_s)

    @plain
    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.broadcast`."""
        self._refuse.rank(src, "broadcasts from")
        self._refuse.tensor(tensor, "broadcast")
        steps = collectives.broadcast(*self._place(), _flat(tensor), src)
        self._start(f"broadcast {src}", steps).wait(timeout_s)

    @plain
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TcpWork | None:
        """Implement `Comm.all_reduce`."""
        self._refuse.limit("all_reduce", async_op, timeout_s)
        self._refuse.tensor(tensor, "all_reduce")
        self._check_average(tensor, op)
        steps = collectives.all_reduce(*self._place(), _flat(tensor), op)
        work = self._start("all_reduce", steps, overlap=async_op)
        return later_or_now(work, async_op, timeout_s)

    @plain
    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Implement `Comm.reduce`."""
        self._refuse.rank(dst, "reduces to")
        self._refuse.tensor(tensor, "reduce")
        self._check_average(tensor, op)
        steps = collectives.reduce(*self._place(), _flat(tensor), dst, op)
        self._start(f"reduce {dst}", steps).wait(timeout_s)

    @plain
    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TcpWork | None:
        """Implement `Comm.all_gather`."""
        self._refuse.limit("all_gather", async_op, timeout_s)
        self._refuse.gathered(output, input, "all_gather")
        steps = collectives.all_gather(*self._place(), _flat(output), _flat(input))
        work = self._start("all_gather", steps, overlap=async_op)
        return later_or_now(work, async_op, timeout_s)

    @plain
    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TcpWork | None:
        """Implement `Comm.reduce_scatter`."""
        self._refuse.limit("reduce_scatter", async_op, timeout_s)
        self._refuse.chunks(output, input, "reduce_scatter")
        self._check_average(output, op)
        flat = _flat(output), _flat(input)
        steps = collectives.reduce_scatter(*self._place(), *flat, op)
        work = self._start("reduce_scatter", steps, overlap=async_op)
        return later_or_now(work, async_op, timeout_s)

    @plain
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TcpWork | None:
        """Implement `Comm.all_to_all`."""
        self._refuse.limit("all_to_all", async_op, timeout_s)
        self._refuse.exchanged(output, input, "all_to_all")
        steps = collectives.all_to_all(*self._place(), _flat(output), _flat(input))
        work = self._start("all_to_all", steps, overlap=async_op)
        return later_or_now(work, async_op, timeout_s)

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Implement `Comm.new_group`."""
        members = list(ranks)
        self._refuse.group(members)
        name = f"{self._group.name}/{self._num_groups}:{members}"
        self._num_groups += 1
        self._barrier("new_group", None)  # like torch's: members or not, all call it
        if self.rank not in members:
            return None
        outer = [self._group.members[member] for member in members]
        group = Membership(name, outer, members.index(self.rank))
        with self.engine.lock:
            self.engine.exchange.add_group(group)
        comm = TcpComm(
            self.engine,
            group,
            timeout_s=self._timeout_s,
            local_rank=self._local_rank,
        )
        self._groups.append(comm)
        return comm

    def time(self) -> float:
        """Implement `Comm.time`."""
        return time.monotonic()

    def abort(self) -> None:
        """Implement `Comm.abort`."""
        for comm in (self, *self._groups):
            comm.abort_group()

    def abort_group(self) -> None:
        """Give up this group, but keep its subgroups."""
        self.engine.post(lambda: self.engine.exchange.leave(self._group))

    def close(self) -> None:
        """Shut down properly: send everything that is due, then leave all peers."""
        atexit.unregister(self._close_in)
        self.engine.close()

    # ── how ─────────────────────────────────────────────────────────────────────────

    def _close_in(self, pid: int) -> None:
        if os.getpid() == pid:  # not in a child that was forked: the lines are ours
            self.close()

    def _key(self, tag: int) -> tuple[int, int]:
        if not isinstance(tag, int) or not -_MAX_TAG <= tag <= _MAX_TAG:
            raise CommRefusedError(f"a tag is a whole number of 64 bits, not {tag!r}")
        return self._group.id, tag

    def _place(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def _sending(self, tensor: Tensor, dst: int, tag: int) -> Transfer:
        self._refuse.peer(dst, "sends to")
        self._refuse.tensor(tensor, "send")
        return Transfer(self._group, self._key(tag), self._group.members[dst], tensor)

    def _receiving(self, tensor: Tensor, src: int, tag: int) -> Transfer:
        self._refuse.peer(src, "receives from")
        self._refuse.tensor(tensor, "recv")
        return Transfer(self._group, self._key(tag), self._group.members[src], tensor)

    def _check_average(self, tensor: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            self._refuse.whole_average(tensor)

    def _barrier(self, op: str, timeout_s: float | None) -> None:
        self._start(op, collectives.barrier(*self._place())).wait(timeout_s)

    def _start(
        self, op: str, steps: Iterator[list[Step]], *, overlap: bool = False
    ) -> TcpWork:
        schedule = Schedule(self._group, op, steps)
        exchange = self.engine.exchange
        self.engine.post(lambda: exchange.start(schedule), overlap=overlap)
        return self._work(schedule, None)

    def _work(self, flight: Flight, peer: int | None) -> TcpWork:
        self._step += 1
        return TcpWork(self.engine, flight, peer, self._step, self._timeout_s)


def _flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor without autograd, because a message isn't an operation."""
    return tensor.detach().view(-1)
