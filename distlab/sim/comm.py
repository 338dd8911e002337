"""The Comm of a simulated rank: the same calls, answered in virtual time.

Guide: the contract of each call is in `Comm`. What cannot be known from it follows
gloo, so that a program hangs here exactly if it hangs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm import ANY, SUM, Comm, PeerLost, ReduceOp
from distlab.comm._refusals import Refusals
from distlab.sim.channels import End, Group
from distlab.sim.collectives import Act, Part
from distlab.sim.kernel import Flight, Lost
from distlab.sim.links import PS, picoseconds

_LEAST_S = 0.001  # the shortest wait there is on gloo, to which 0 means no limit


class SimWork:
    """A simulated transfer under way."""

    def __init__(
        self, comm: SimComm, flight: Flight, peer: int | None, step: int
    ) -> None:
        self._comm, self._flight, self._peer, self._step = comm, flight, peer, step

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self.wait_with((), timeout_s)

    def wait_with(self, needs: tuple[Flight, ...], timeout_s: float | None) -> None:
        """Wait, as a part of a call that needs all of `needs`."""
        comm, flight = self._comm, self._flight
        kernel = comm.group.kernel
        started = kernel.now_ps
        in_time = kernel.wait(flight, comm.limit_ps(timeout_s), needs)
        if in_time and flight.error is None:
            return
        if not in_time and isinstance(flight, End):
            comm.abort_group()  # as on gloo: who gives up closes its connections
        if in_time and not isinstance(flight.error, Lost):
            assert flight.error is not None
            raise flight.error
        waited_s = (kernel.now_ps - started) / PS
        raise PeerLost(comm.rank, self._step, self._peer, waited_s)


class SimComm:
    """One rank's communicator in the simulated cluster.

    `limit_s` is how long the run may take: a wait that gives up later than that is
    taken to be one for good, as the runner takes it.
    """

    def __init__(self, group: Group, rank: int, limit_s: float) -> None:
        self.group = group
        self._rank = rank
        self._limit_s = limit_s
        self._step = 0
        self._num_groups = 0
        self._refuse = Refusals(rank, len(group.members))
        self._groups: list[SimComm] = []

    @property
    def rank(self) -> int:
        """See `Comm.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See `Comm.world_size`."""
        return len(self.group.members)

    @property
    def local_rank(self) -> int:
        """See `Comm.local_rank`; all simulated ranks are on one machine."""
        return self._rank

    @property
    def device(self) -> torch.device:
        """See `Comm.device`."""
        return _CPU

    def limit_ps(self, timeout_s: float | None) -> int | None:
        """The virtual time after which a wait is given up; None is never."""
        if timeout_s is None or timeout_s >= self._limit_s:
            return None
        return picoseconds(max(timeout_s, _LEAST_S))

    # ── point to point ──────────────────────────────────────────────────────────────

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """See `Comm.send`."""
        self.isend(tensor, dst, tag).wait(timeout_s)

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """See `Comm.recv`."""
        if src != ANY:
            self.irecv(tensor, src, tag).wait(timeout_s)
            return src
        self._refuse.tensor(tensor, "recv")
        end = self._post("recv", tensor, ANY, tag)
        SimWork(self, end, None, self._step).wait(timeout_s)
        return end.source

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> SimWork:
        """See `Comm.isend`."""
        self._refuse.peer(dst, "sends to")
        self._refuse.tensor(tensor, "send")
        end = self._post("send", tensor, dst, tag)
        return SimWork(self, end, dst, self._step)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> SimWork:
        """See `Comm.irecv`."""
        self._refuse.peer(src, "receives from")
        self._refuse.tensor(tensor, "recv")
        end = self._post("recv", tensor, src, tag)
        return SimWork(self, end, src, self._step)

    def sendrecv(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """See `Comm.sendrecv`."""
        self._refuse.tensor(send_tensor, "sendrecv")
        self._refuse.tensor(recv_tensor, "sendrecv")
        if dst == src == self._rank:  # one rank alone: its own neighbour on both sides
            self._refuse.unlike(send_tensor, recv_tensor)
            recv_tensor.view(-1).copy_(send_tensor.view(-1))
            return
        self._refuse.peer(dst, "sends to")
        self._refuse.peer(src, "receives from")
        sending = self._post("send", send_tensor, dst, 0)
        send_step = self._step
        receiving = self._post("recv", recv_tensor, src, 0)
        both = (sending, receiving)
        SimWork(self, receiving, src, self._step).wait_with(both, timeout_s)
        SimWork(self, sending, dst, send_step).wait(timeout_s)

    # ── collectives ─────────────────────────────────────────────────────────────────

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See `Comm.barrier`."""
        self._join(("barrier", None)).wait(timeout_s)

    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """See `Comm.broadcast`."""
        self._refuse.rank(src, "broadcasts from")
        self._refuse.tensor(tensor, "broadcast")
        self._join(("broadcast", src), tensor, tensor).wait(timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> SimWork | None:
        """See `Comm.all_reduce`."""
        self._refuse.tensor(tensor, "all_reduce")
        self._check_average(tensor, op)
        work = self._join(("all_reduce", None), tensor, tensor, op)
        if async_op:
            return work
        work.wait()
        return None

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """See `Comm.reduce`."""
        self._refuse.rank(dst, "reduces to")
        self._refuse.tensor(tensor, "reduce")
        self._check_average(tensor, op)
        self._join(("reduce", dst), tensor, tensor, op).wait(timeout_s)

    def all_gather(
        self, output: Tensor, input: Tensor, *, timeout_s: float | None = None
    ) -> None:
        """See `Comm.all_gather`."""
        self._refuse.gathered(output, input, "all_gather")
        self._join(("all_gather", None), input, output).wait(timeout_s)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """See `Comm.reduce_scatter`."""
        self._refuse.chunks(output, input, "reduce_scatter")
        self._check_average(output, op)
        self._join(("reduce_scatter", None), input, output, op).wait(timeout_s)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, timeout_s: float | None = None
    ) -> None:
        """See `Comm.all_to_all`."""
        self._refuse.exchanged(output, input, "all_to_all")
        self._join(("all_to_all", None), input, output).wait(timeout_s)

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """See `Comm.new_group`."""
        members = list(ranks)
        self._refuse.group(members)
        key = (self._num_groups, tuple(members))
        self._num_groups += 1
        self._join(("new_group", None)).wait()
        if self._rank not in members:
            return None
        shared = self.group.subgroup(key, members)
        group = SimComm(shared, members.index(self._rank), self._limit_s)
        self._groups.append(group)
        return group

    def time(self) -> float:
        """See `Comm.time`; virtual seconds since the start of the run."""
        return self.group.kernel.now_s

    def abort(self) -> None:
        """See `Comm.abort`."""
        for comm in (self, *self._groups):
            comm.abort_group()

    def abort_group(self) -> None:
        """Close this rank's connections in this group alone."""
        self.group.leave(self._rank)

    # ── how ─────────────────────────────────────────────────────────────────────────

    def _check_average(self, tensor: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            self._refuse.whole_average(tensor)

    def _post(self, op: str, tensor: Tensor, peer: int, tag: int) -> End:
        group = self.group
        group.kernel.enter()
        self._step += 1
        end = End(group, op, self._rank, peer, tag, tensor, self._step)
        if op == "send":
            group.send(end)
        else:
            group.receive(end)
        return end

    def _join(
        self,
        act: Act,
        sent: Tensor | None = None,
        received: Tensor | None = None,
        op: ReduceOp = SUM,
    ) -> SimWork:
        self.group.kernel.enter()
        self._step += 1
        part = Part(act, op, _flat(sent), _flat(received))
        meeting = self.group.collectives.join(self._rank, part)
        return SimWork(self, meeting, None, self._step)


_CPU = torch.device("cpu")


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.data.view(-1)
