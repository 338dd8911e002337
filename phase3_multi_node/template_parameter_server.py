"""A parameter server, to which workers push gradients and from which they pull weights.

Guide: phase3_multi_node/guide/parameter_server.md.
Source: M. Li et al., Scaling Distributed Machine Learning with the Parameter Server
(OSDI 2014), sections 3 and 4; Q. Ho et al., More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server (NIPS 2013), section 2.
Symbols: n = num_workers; S = the bytes of the weights; k = the number of servers.
Cost: a worker sends and receives S per step, about half of a ring. A server receives
and sends n S / k, so with k = 1 it is the star of 1.4.

    worker 0   push 1 ─┐        ┌─> weights     A pull names how many pushes the worker
    worker 1   push 1 ─┼ server ┼─> weights     has made. The server answers it, or
    worker 2   push 1 ─┘        └─> weights     returns None: not yet.

A server here is a plain object with `handle(peer, message)`, without a socket, a
process or a thread. Whoever carries the messages offers one that got None again
after each later message. `peer` is the worker's rank, 0 … n - 1. The format of messages
and of the log's records is given in distlab/given/parameter_server.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm import Disk
from distlab.comm.services import PeerGone
from distlab.given.parameter_server import (
    LOG,
    PUSH,
    WEIGHTS,
    decode,
    encode,
    pack_record,
    read_records,
)

# ── servers ─────────────────────────────────────────────────────────────────────────


def assign_tensors(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Assign each tensor to a server; return the number of the server for each.

    Given: `sizes` are bytes, in any order. There may be no tensor, or fewer tensors
    than servers.

    C1 Each tensor is assigned to one server, numbered from 0 to num_servers - 1, and
       every rank returns the same list.
    C2 The loads are balanced by bytes, so moving any one tensor from the fullest server
       to the emptiest would not make them more even.
    In torch.distributed: nothing; ZeroRedundancyOptimizer assigns parameters like this
    Example: sizes 2 2 2 3 3 on 2 servers → loads 6 and 6, or 5 and 7. Not 4 and 8
    Cost: none, nothing is sent. Check: distlab check 3.19
    """
    # TODO(parameter_server.sync)
    # which tensor is the hardest to place, and which server should take it?
    raise NotImplementedError("parameter_server.sync")


class Server(ABC):
    """The servers' common fields, and `handle`, which calls push and pull; given."""

    def __init__(self, weights: Tensor, num_workers: int, lr: float) -> None:
        self.weights = weights.clone()
        self.num_workers, self.lr = num_workers, lr

    @abstractmethod
    def push(self, rank: int, number: int, gradient: Tensor) -> None:
        """Take the gradient of `rank`'s `number`-th push, even with inf or nan."""

    @abstractmethod
    def pull(self, rank: int, number: int) -> Tensor | None:
        """Return `rank`'s weights after its `number` pushes; None means not yet."""

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """Answer a push at once, and a pull when `pull` has the weights."""
        kind, number, values = decode(message)
        if kind == PUSH:
            self.push(peer, number, values)
            return b"ok"
        weights = self.pull(peer, number)
        return None if weights is None else encode(WEIGHTS, number, weights)


class SyncServer(Server):
    """Keeps all workers in the same step by waiting for the gradient of each."""

    def __init__(self, weights: Tensor, num_workers: int, lr: float) -> None:
        super().__init__(weights, num_workers, lr)
        self.num_steps = 0
        self.gradients: dict[int, Tensor] = {}  # by rank: those of the current step

    def push(self, rank: int, number: int, gradient: Tensor) -> None:
        """Keep the gradient; the last one of a step completes that step.

        Given: each worker pushes once in a step, and pulls before it pushes again.

        C3 Once all n workers have pushed, `weights` changes a single time, by -lr times
           the mean of their gradients. Until then, it doesn't change.
        In torch.distributed: dist.all_reduce(gradient, op=AVG), then optimizer.step()
        Example: weights 10, lr 1; pushes 1, 3 and 2 → weights 8
        Check: distlab check 3.19
        """
        # TODO(parameter_server.sync)
        # when is the step complete, and what has to be ready for the next one?
        raise NotImplementedError("parameter_server.sync")

    def pull(self, rank: int, number: int) -> Tensor | None:
        """Return the weights after `number` steps, or None until they are computed.

        C4 The server answers a pull as soon as the step that it waits for has been
           taken, and not before.
        Example: 2 workers; worker 0 has pushed once and pulls: None. Worker 1 pushes:
        now the same pull returns the weights
        Check: distlab check 3.19
        """
        # TODO(parameter_server.sync)
        # how many steps must have been taken, and how many have been?
        raise NotImplementedError("parameter_server.sync")


class StaleServer(Server):
    """Lets workers wait only for a worker that is too far behind.

    `bound` is how many pushes a worker may be ahead of the slowest worker when it
    pulls. With None it never waits (asynchronous), and with 0 all workers go in step.
    """

    def __init__(
        self, weights: Tensor, num_workers: int, lr: float, bound: int | None = None
    ) -> None:
        super().__init__(weights, num_workers, lr)
        self.bound = bound
        self.clocks = [0] * num_workers  # by rank: the number of its last push
        self.gone: set[int] = set()  # ranks whose process has ended

    def push(self, rank: int, number: int, gradient: Tensor) -> None:
        """Apply the gradient at once, and note the clock of `rank`.

        C1 Each push changes `weights` at once, by -lr / n times its gradient. Here n is
           always num_workers, even when some workers are gone.
        Example: weights 10, lr 1, 2 workers; worker 0 pushes 4 → weights 8
        Check: distlab check 3.20
        """
        # TODO(parameter_server.staleness)
        # n pushes together move the weights as far as one step of the SyncServer
        raise NotImplementedError("parameter_server.staleness")

    def pull(self, rank: int, number: int) -> Tensor | None:
        """Return the current weights, or None while `rank` is too far ahead.

        C2 A pull waits only while its worker is more than `bound` pushes ahead of the
           slowest worker. If `bound` is None, a pull never waits.
        C3 A worker that is gone no longer counts, so the other workers can continue.
        Example: bound 1, clocks 3 1 2 → worker 1 and worker 2 get the weights, worker 0
        gets None, until worker 1 has pushed again, or is gone
        Check: distlab check 3.20
        """
        # TODO(parameter_server.staleness)
        # which worker decides how long this pull has to wait?
        raise NotImplementedError("parameter_server.staleness")

    def on(self, event: object, now_s: float) -> list[object]:
        """Note whose process has ended; then waiting requests are offered again."""
        if isinstance(event, PeerGone):
            self.gone.add(event.peer)
        return []


# ── a server that may die ───────────────────────────────────────────────────────────


class DurableServer(Server):
    """Counts each push once, and keeps every acknowledged push across a restart.

    A message or its reply can get lost, and the worker then sends the push again
    with the same number. A message can also arrive twice, and the copy late. The
    process can be killed at any time, and the next one has only `disk`.
    """

    def __init__(
        self, weights: Tensor, num_workers: int, lr: float, disk: Disk
    ) -> None:
        super().__init__(weights, num_workers, lr)
        self.disk = disk
        self.clocks = [0] * num_workers  # by rank: the number of its last push
        self.recover()

    def apply(self, rank: int, number: int, gradient: Tensor) -> None:
        """Apply one push to the weights, in memory only."""
        self.weights -= self.lr / self.num_workers * gradient
        self.clocks[rank] = number

    def push(self, rank: int, number: int, gradient: Tensor) -> None:
        """Apply a new push once it is in the log; the caller then replies "ok".

        Given: a worker sends push `number` + 1 only after it was told that push
        `number` is done. Also: pack_record, apply, disk.append, disk.sync.

        C1 Each push is applied exactly once, no matter how often and when it arrives.
        C2 By the time `push` returns, the push is in LOG, and LOG has been synced.
        Example: pushes 1, 1, 2, 1 of worker 0 → pushes 1 and 2 are applied once
        Check: distlab check 3.25
        """
        # TODO(parameter_server.exactly_once)
        # how do you know a push that was applied before? what must be on the disk
        # before the worker is told that it is done?
        raise NotImplementedError("parameter_server.exactly_once")

    def recover(self) -> None:
        """Apply the log's pushes, and prepare the log for the next push.

        Given: read_records, apply, and the disk: read, write, sync, rename,
        sync_folder, names. At the first start there is no LOG.

        C3 After a crash at any moment, the server has applied each acknowledged push
           exactly once. It may also have applied the one push that it had not
           acknowledged yet.
        C4 The same holds after a second crash, so be careful not to append anything
           behind a torn record.
        Example: a log of 2 records and a torn one → 2 pushes; the log has 2 records
        Check: distlab check 3.25
        """
        # TODO(parameter_server.exactly_once)
        # a crash can also come while you do this. which file is complete then?
        raise NotImplementedError("parameter_server.exactly_once")

    def pull(self, rank: int, number: int) -> Tensor | None:
        """Return the current weights, asynchronously."""
        return self.weights


# ── eight workers, one of them 5 times slower ───────────────────────────────────────


def clocks_after(
    bound: int | None, seconds: Sequence[float], end_s: float
) -> list[int]:
    """Count each worker's pushes in `end_s` seconds; worker r needs seconds[r] for one.

    Messages take no time here. A worker pushes, waits for its pull, then computes.
    """
    no_gradient = torch.zeros(1, dtype=torch.float64)
    server = StaleServer(no_gradient, len(seconds), 1.0, bound)
    ready = list(seconds)  # when each worker has its gradient; inf while it waits
    while (now := min(ready)) <= end_s:
        rank = ready.index(now)
        ready[rank] = math.inf
        server.push(rank, server.clocks[rank] + 1, no_gradient)
        for worker, when in enumerate(ready):
            if (
                when == math.inf
                and server.pull(worker, server.clocks[worker]) is not None
            ):
                ready[worker] = now + seconds[worker]
    return server.clocks


if __name__ == "__main__":
    try:
        for bound in (0, 3, None):
            clocks = clocks_after(bound, [5.0, *[1.0] * 7], 60.0)
            print(f"bound {bound!s:4}  clocks {clocks}  {sum(clocks)} pushes in 60 s")
    except NotImplementedError as missing:
        print(f"{missing} is not written yet")
