"""The servers of `benchmarks/ps.py`: the unit's, put together, and two wrong ones.

    durable   DurableServer as it is: asynchronous, each push counted once
    bounded   the same log and the bound of StaleServer: SSP, each push counted once

Who counts for the bound: every worker whose process lives, a frozen one too. A process
that has ended leaves the bound when its connection closes. That goes into the log, for
a server that is restarted later is not told again. A process that ended while the
server was away is not heard in the server's next life: after a lease it does not count,
until it is heard. So the lease has to be longer than what a gradient takes. A worker
that is frozen for longer than the lease, across a restart, does not count either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks._ps_work import Plan, num_elements
from distlab.comm import Disk, ServiceContext
from distlab.comm.services import PeerGone, Started, Tick, WakeAt
from distlab.given.parameter_server import LOG, pack_record
from solutions.phase3_multi_node.parameter_server import DurableServer, StaleServer


class BoundedServer(DurableServer):
    """SSP with a log: the clocks and the departures outlive the process."""

    def __init__(
        self,
        weights: Tensor,
        num_workers: int,
        lr: float,
        disk: Disk,
        bound: int | None,
        lease_s: float,
    ) -> None:
        self.rule = StaleServer(weights, num_workers, lr, bound)  # its pull decides
        self.ended: set[int] = set()
        self.unheard = set(range(num_workers))  # since this life began
        self.lease_s = lease_s
        super().__init__(weights, num_workers, lr, disk)

    def apply(self, rank: int, number: int, gradient: Tensor) -> None:
        """A push; or, with the number 0, that the process of `rank` has ended."""
        if number == 0:
            self.ended.add(rank)
        else:
            super().apply(rank, number, gradient)

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """See `Server.handle`."""
        self.unheard.discard(peer)
        self.rule.gone.discard(peer)
        return super().handle(peer, message)

    def pull(self, rank: int, number: int) -> Tensor | None:
        """The weights, unless `rank` is too far ahead of the slowest that counts."""
        self.rule.clocks = self.clocks
        self.rule.gone |= self.ended
        return None if self.rule.pull(rank, number) is None else self.weights

    def on(self, event: object, now_s: float) -> Sequence[object]:
        """Log who has ended; after the lease, do without those who are not heard."""
        if isinstance(event, Started):
            return [WakeAt(now_s + self.lease_s)]
        if isinstance(event, Tick):
            self.rule.gone |= self.unheard
        elif isinstance(event, PeerGone) and event.peer not in self.ended:
            goodbye = pack_record(event.peer, 0, torch.empty(0, dtype=torch.float64))
            self.disk.append(LOG, goodbye)
            self.disk.sync(LOG)
            self.ended.add(event.peer)
        return []


class AcknowledgesFirst(DurableServer):
    """Planted: the reply is sent before this push is synced, by one push."""

    def push(self, rank: int, number: int, gradient: Tensor) -> None:
        """Sync what was appended before, and not what is appended now."""
        if number > self.clocks[rank]:
            self.disk.sync(LOG)
            self.disk.append(LOG, pack_record(rank, number, gradient))
            self.apply(rank, number, gradient)


def _zeros(plan: Plan) -> tuple[Tensor, int, float]:
    """Weights, workers, and the rate at which a push adds its gradient."""
    num_workers = len(plan["pushes"])
    weights = torch.zeros(num_elements(plan), dtype=torch.float64)
    return weights, num_workers, -float(num_workers)


def durable(context: ServiceContext, plan: Plan) -> DurableServer:
    """Asynchronous."""
    return DurableServer(*_zeros(plan), context.disk)


def bounded(context: ServiceContext, plan: Plan) -> BoundedServer:
    """SSP with the plan's bound."""
    return BoundedServer(*_zeros(plan), context.disk, plan["bound"], plan["lease_s"])


def acknowledges_first(context: ServiceContext, plan: Plan) -> AcknowledgesFirst:
    """The planted mistake."""
    return AcknowledgesFirst(*_zeros(plan), context.disk)
