"""The Comm of a simulated rank, with the same calls in virtual time.

Guide: `Comm` documents the contract of each call. Where it leaves something open, we do
as gloo does, so that a program hangs here exactly if it hangs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm import (
    ANY,
    SUM,
    ByteMeter,
    Call,
    Comm,
    PeerLost,
    ReduceOp,
    Traffic,
)
from distlab.comm._plain import plain
from distlab.comm._refusals import Refusals
from distlab.comm._started import later_or_now
from distlab.sim.channels import End, Group
from distlab.sim.collectives import Act, Part
from distlab.sim.fast import FastExchange
from distlab.sim.kernel import Fiber, Flight, GaveUp
from distlab.sim.net.links import PS, picoseconds
from distlab.sim.routes import Route, SimWork, can_travel, look_closer

__all__ = ["SimComm", "SimWork"]

_LEAST_S = 0.001  # the shortest wait there is on gloo, to which 0 means no limit


class SimComm(FastExchange):
    """One rank's communicator in the simulated cluster.

    `limit_s` is how long the run may take. If a call would wait longer than that, we
    treat the wait as endless, as the runner does. If there is a `traffic`, it counts
    everything that is sent, like a ByteMeter.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        limit_s: float,
        traffic: Traffic | None = None,
        *,
        local_rank: int | None = None,
    ) -> None:
        super().__init__(group, rank, traffic)
        self._limit_s = limit_s
        self._num_groups = 0
        self._local_rank = rank if local_rank is None else local_rank
        self._refuse = Refusals(rank, len(group.members))
        self._groups: list[SimComm] = []
        self._out: dict[tuple[int, int], Route] = {}  # by peer and tag
        self._in: dict[tuple[int, int], Route] = {}
        self._keeps_ends = group.conditions is None

    @property
    def local_rank(self) -> int:
        """Implement `Comm.local_rank`."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """Implement `Comm.device`."""
        return _CPU

    def limit_ps(self, timeout_s: float | None) -> int | None:
        """Return the virtual time after which a wait gives up; None means never."""
        if timeout_s is None or timeout_s >= self._limit_s:
            return None
        return picoseconds(max(timeout_s, _LEAST_S))

    # ── point to point ──────────────────────────────────────────────────────────────

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.send`."""
        route = self._route_out(dst, tag)
        if not can_travel(tensor):
            look_closer(self._refuse, tensor, "send")
        group = self.group
        fiber = group.kernel.enter()
        end = self._take(route, "send", tensor, dst, tag)
        group.post_send(route.channel, end)
        self._finish(fiber, end, (end,), timeout_s, route)

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Implement `Comm.recv`."""
        if src == ANY:
            return self._receive_any(tensor, tag, timeout_s)
        route = self._route_in(src, tag)
        if not can_travel(tensor):
            look_closer(self._refuse, tensor, "recv")
        group = self.group
        fiber = group.kernel.enter()
        end = self._take(route, "recv", tensor, src, tag)
        group.post_receive(route.channel, end)
        self._finish(fiber, end, (end,), timeout_s, route)
        return src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> SimWork:
        """Implement `Comm.isend`."""
        route = self._route_out(dst, tag)
        if not can_travel(tensor):
            look_closer(self._refuse, tensor, "send")
        group = self.group
        group.kernel.enter()
        route.spare = None
        end = self._take(route, "send", tensor, dst, tag)
        group.post_send(route.channel, end)
        return SimWork(self, end, dst, self._step)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> SimWork:
        """Implement `Comm.irecv`."""
        route = self._route_in(src, tag)
        if not can_travel(tensor):
            look_closer(self._refuse, tensor, "recv")
        group = self.group
        group.kernel.enter()
        route.spare = None
        end = self._take(route, "recv", tensor, src, tag)
        group.post_receive(route.channel, end)
        return SimWork(self, end, src, self._step)

    def exchange(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        timeout_s: float | None,
    ) -> None:
        """Implement `Comm.sendrecv`, for the cases that `fast` can't handle."""
        if not (can_travel(send_tensor) and can_travel(recv_tensor)):
            look_closer(self._refuse, send_tensor, "sendrecv")
            look_closer(self._refuse, recv_tensor, "sendrecv")
        if dst == src == self.rank:  # one rank alone: its own neighbor on both sides
            self._refuse.unlike(send_tensor, recv_tensor)
            recv_tensor.view(-1).copy_(send_tensor.view(-1))
            return
        out, back = self._route_out(dst, 0), self._route_in(src, 0)
        group = self.group
        fiber = group.kernel.enter()
        sending = self._take(out, "send", send_tensor, dst, 0)
        group.post_send(out.channel, sending)
        receiving = self._take(back, "recv", recv_tensor, src, 0)
        group.post_receive(back.channel, receiving)
        if not receiving.done:
            both = (sending, receiving)
            self.await_in(fiber, receiving, both, timeout_s, src, receiving.step)
        self._finish(fiber, receiving, (), timeout_s, back)
        self._finish(fiber, sending, (sending,), timeout_s, out)

    # ── collectives ─────────────────────────────────────────────────────────────────

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Implement `Comm.barrier`."""
        self._join(("barrier", None)).wait(timeout_s)

    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.broadcast`."""
        self._refuse.rank(src, "broadcasts from")
        self._refuse.tensor(tensor, "broadcast")
        self._join(("broadcast", src), tensor, tensor).wait(timeout_s)

    @plain
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> SimWork | None:
        """Implement `Comm.all_reduce`."""
        self._refuse.limit("all_reduce", async_op, timeout_s)
        self._refuse.tensor(tensor, "all_reduce")
        self._check_average(tensor, op)
        work = self._join(("all_reduce", None), tensor, tensor, op)
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
        self._join(("reduce", dst), tensor, tensor, op).wait(timeout_s)

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> SimWork | None:
        """Implement `Comm.all_gather`."""
        self._refuse.limit("all_gather", async_op, timeout_s)
        self._refuse.gathered(output, input, "all_gather")
        work = self._join(("all_gather", None), input, output)
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
    ) -> SimWork | None:
        """Implement `Comm.reduce_scatter`."""
        self._refuse.limit("reduce_scatter", async_op, timeout_s)
        self._refuse.chunks(output, input, "reduce_scatter")
        self._check_average(output, op)
        work = self._join(("reduce_scatter", None), input, output, op)
        return later_or_now(work, async_op, timeout_s)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> SimWork | None:
        """Implement `Comm.all_to_all`."""
        self._refuse.limit("all_to_all", async_op, timeout_s)
        self._refuse.exchanged(output, input, "all_to_all")
        work = self._join(("all_to_all", None), input, output)
        return later_or_now(work, async_op, timeout_s)

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Implement `Comm.new_group`."""
        members = list(ranks)
        self._refuse.group(members)
        key = (self._num_groups, tuple(members))
        self._num_groups += 1
        self._join(("new_group", None)).wait()
        if self.rank not in members:
            return None
        shared = self.group.subgroup(key, members)
        number = members.index(self.rank)
        group = SimComm(
            shared,
            number,
            self._limit_s,
            self._traffic,
            local_rank=self._local_rank,
        )
        self._groups.append(group)
        return group

    def time(self) -> float:
        """Implement `Comm.time`, in virtual seconds since the start of the run."""
        return self.group.kernel.now_s

    def abort(self) -> None:
        """Implement `Comm.abort`."""
        for comm in (self, *self._groups):
            comm.abort_group()

    def abort_group(self) -> None:
        """Close this rank's connections in this group only."""
        self.group.leave(self.rank)

    # ── how ─────────────────────────────────────────────────────────────────────────

    def await_in(
        self,
        fiber: Fiber,
        flight: Flight,
        needs: tuple[Flight, ...],
        timeout_s: float | None,
        peer: int | None,
        step: int,
    ) -> None:
        """Wait for `flight`, as part of a call that needs all of `needs`."""
        kernel = self.group.kernel
        started, in_time = kernel.now_ps, True
        if not flight.done:
            limit_ps = None if timeout_s is None else self.limit_ps(timeout_s)
            in_time = kernel.wait_in(fiber, flight, limit_ps, needs)
        if not in_time or flight.error is not None:
            self.give_up(flight, in_time, started, peer, step)

    def give_up(
        self, flight: Flight, in_time: bool, since_ps: int, peer: int | None, step: int
    ) -> None:
        """Raise the reason why a flight that the rank awaited didn't succeed."""
        if not in_time and isinstance(flight, End):
            self.abort_group()  # as on gloo: who gives up closes its connections
        if in_time and not isinstance(flight.error, GaveUp):
            assert flight.error is not None
            raise flight.error
        waited_s = (self.group.kernel.now_ps - since_ps) / PS
        raise PeerLost(self.rank, step, peer, waited_s)

    def _finish(
        self,
        fiber: Fiber,
        end: End,
        needs: tuple[Flight, ...],
        timeout_s: float | None,
        route: Route,
    ) -> None:
        if not end.done or end.error is not None:
            self.await_in(fiber, end, needs, timeout_s, end.peer, end.step)
        if self._keeps_ends and timeout_s is None:  # a timer might still know it
            end.tensor, route.spare = None, end

    def _receive_any(self, tensor: Tensor, tag: int, timeout_s: float | None) -> int:
        look_closer(self._refuse, tensor, "recv")
        fiber = self.group.kernel.enter()
        self._step += 1
        end = End(self.group, "recv", self.rank, ANY, tag, tensor, self._step)
        self.group.receive(end)
        self.await_in(fiber, end, (end,), timeout_s, None, self._step)
        return end.source

    def _route_out(self, dst: int, tag: int) -> Route:
        route = self._out.get((dst, tag))
        if route is None or type(dst) is not int:
            self._refuse.peer(dst, "sends to")
            route = Route(self.group.channel(self.rank, dst, tag))
            self._out[dst, tag] = route
        return route

    def _route_in(self, src: int, tag: int) -> Route:
        route = self._in.get((src, tag))
        if route is None or type(src) is not int:
            self._refuse.peer(src, "receives from")
            route = Route(self.group.channel(src, self.rank, tag))
            self._in[src, tag] = route
        return route

    def _take(self, route: Route, op: str, tensor: Tensor, peer: int, tag: int) -> End:
        """Return an end for this call's tensor, and reuse the spare one if possible."""
        self._step += 1
        if self._traffic is not None and op == "send":
            self._traffic.messages += 1
            self._traffic.sent_bytes += tensor.nbytes
        end = route.spare
        if end is None:
            return End(self.group, op, self.rank, peer, tag, tensor, self._step)
        route.spare = None
        end.done = end.met = False
        end.tensor, end.step = tensor, self._step
        return end

    def _check_average(self, tensor: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            self._refuse.whole_average(tensor)

    def _join(
        self,
        act: Act,
        sent: Tensor | None = None,
        received: Tensor | None = None,
        op: ReduceOp = SUM,
    ) -> SimWork:
        self.group.kernel.enter()
        self._step += 1
        if self._traffic is not None:
            self._count(act, sent)
        part = Part(act, op, _flat(sent), _flat(received))
        meeting = self.group.collectives.join(self.rank, part)
        return SimWork(self, meeting, None, self._step)

    def _count(self, act: Act, sent: Tensor | None) -> None:
        """Count a call as a ByteMeter counts a library collective."""
        call = Call(op=act[0], root=act[1], sent=sent)
        copies = ByteMeter(self, self._traffic)._copies_sent(call)
        assert self._traffic is not None
        self._traffic.add(copies, 0 if sent is None else sent.nbytes)


_CPU = torch.device("cpu")


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.data.view(-1)
