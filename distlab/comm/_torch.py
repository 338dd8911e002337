"""Implement Comm on torch.distributed, with gloo on CPUs and NCCL on GPUs.

It creates its own process group instead of using torch's default one. So it sets up
nothing global, and two runs in one process can't meet by accident. To join the default
group of a launcher such as torchrun, use `TorchComm.from_default`.

Guide: `Comm` documents the contract of each call; this module only implements it.
Source: torch.distributed.ProcessGroup (2.11 to 2.14) for the calls underneath.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distlab.comm import _process_groups as groups
from distlab.comm._nccl import NcclMessages
from distlab.comm._plain import plain
from distlab.comm._protocol import ANY, SUM, Comm, CommRefusedError, PeerLost, ReduceOp
from distlab.comm._refusals import Refusals
from distlab.comm._started import later_or_now
from distlab.comm._torch_work import TorchWork, says_peer_is_gone

DEFAULT_TIMEOUT_S = 1800.0  # torch's own default; the runner's watchdog is far quicker

_REDUCE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,  # divided afterwards: not every backend averages
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class TorchComm:
    """A rank's communicator over one torch.distributed process group.

    Limits on gloo: if a send or recv exceeds its `timeout_s`, this rank's connections
    to the whole group close. Every later call then raises PeerLost, here and on the
    ranks that wait for this one. A collective that times out closes nothing. torch's
    reduce_scatter ignores `timeout_s` on gloo, so it waits as long as the group's limit
    allows.

    Limits on NCCL: it has no tags and can't receive from just anyone, so we refuse
    both. An isend starts only with the next call that waits, a time limit doesn't apply
    to the first contact between two ranks, and only the runner notices a dead peer.
    """

    def __init__(
        self,
        group: Any,
        *,
        store: Any = None,
        device: torch.device | None = None,
        local_rank: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str = groups.LOOPBACK,
    ) -> None:
        self._group = group
        self.store, self._host = store, host
        self._device = device or torch.device("cpu")
        self._rank = int(group.rank())
        self._world_size = int(group.size())
        self._local_rank = self._rank if local_rank is None else local_rank
        self._timeout_s = timeout_s
        self._step = self._num_groups = 0
        self._refuse = Refusals(self._rank, self._world_size)
        # A transfer whose Work is dropped would be lost, and a group that is dropped
        # closes its sockets while the slower members still read: both are kept here.
        self._under_way: set[TorchWork] = set()
        self._nccl = NcclMessages(group) if self._device.type == "cuda" else None
        self._groups: list[TorchComm] = []

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str = groups.LOOPBACK,
        local_rank: int | None = None,
    ) -> TorchComm:
        """Meet the other ranks through `store` and form a group; collective.

        On gloo, `host` is this machine's address by which the other ranks reach it.
        Without a `local_rank`, we treat all ranks as ranks of one machine.

        Raises:
            ValueError: the backend is neither gloo nor nccl.
        """
        device = None
        if backend == "gloo":
            group = groups.make_gloo_group(store, rank, world_size, timeout_s, host)
        elif backend == "nccl":
            group = groups.make_nccl_group(store, rank, world_size, timeout_s)
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            raise ValueError(f"backend is {backend!r}; there are 'gloo' and 'nccl'")
        return cls(
            group,
            store=store,
            device=device,
            local_rank=local_rank,
            timeout_s=timeout_s,
            host=host,
        )

    @classmethod
    def from_default(cls) -> TorchComm:
        """Use the default group of a job that a launcher such as torchrun started."""
        group = dist.group.WORLD
        if group is None:
            raise CommRefusedError("call torch.distributed.init_process_group first")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = torch.device("cuda", local_rank)
            group = groups.connected(group, device)
        return cls(
            group,
            store=c10d._get_default_store(),
            device=device,
            local_rank=local_rank,
        )

    @property
    def rank(self) -> int:
        """Implement `Comm.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Implement `Comm.world_size`."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """Implement `Comm.local_rank`."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """Implement `Comm.device`."""
        return self._device

    @property
    def timeout_s(self) -> float:
        """Return the default time limit of a call that waits."""
        return self._timeout_s

    # ── point to point ──────────────────────────────────────────────────────────────

    @plain
    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.send`."""
        self.isend(tensor, dst, tag).wait(timeout_s)

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
        if src != ANY:
            self.irecv(tensor, src, tag).wait(timeout_s)
            return src
        self._refuse.tensor(tensor, "recv")
        if self._nccl is not None:
            raise CommRefusedError(
                f"rank {self._rank} receives from anyone, which NCCL cannot: name src"
            )
        work = self._work(lambda: self._group.recv_anysource([tensor], tag), None)
        work.wait(timeout_s)
        return work.source()

    @plain
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> TorchWork:
        """Implement `Comm.isend`."""
        self._refuse.peer(dst, "sends to")
        self._refuse.tensor(tensor, "send")
        return self._message("send", tensor, dst, tag)

    @plain
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> TorchWork:
        """Implement `Comm.irecv`."""
        self._refuse.peer(src, "receives from")
        self._refuse.tensor(tensor, "recv")
        return self._message("recv", tensor, src, tag)

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
        if dst == src == self._rank:  # one rank alone: its own neighbor on both sides
            self._refuse.unlike(send_tensor, recv_tensor)
            recv_tensor.view(-1).copy_(send_tensor.view(-1))
            return
        self._refuse.peer(dst, "sends to")
        self._refuse.peer(src, "receives from")
        sending = self.isend(send_tensor, dst)
        receiving = self.irecv(recv_tensor, src)
        receiving.wait(timeout_s)
        sending.wait(timeout_s)

    # ── collectives ─────────────────────────────────────────────────────────────────

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Implement `Comm.barrier`."""
        self._work(self._group.barrier, None).wait(timeout_s)

    @plain
    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.broadcast`."""
        self._refuse.rank(src, "broadcasts from")
        self._refuse.tensor(tensor, "broadcast")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        work = self._work(lambda: self._group.broadcast([tensor], options), None)
        work.wait(timeout_s)

    @plain
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TorchWork | None:
        """Implement `Comm.all_reduce`."""
        self._refuse.limit("all_reduce", async_op, timeout_s)
        self._refuse.tensor(tensor, "all_reduce")
        finish = self._averager(tensor, op)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[op]
        work = self._work(
            lambda: self._group.allreduce([tensor], options), None, finish
        )
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
        finish = self._averager(tensor, op)
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = _REDUCE[op], dst, 0
        work = self._work(
            lambda: self._group.reduce([tensor], options),
            None,
            finish if self._rank == dst else None,
        )
        work.wait(timeout_s)

    @plain
    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TorchWork | None:
        """Implement `Comm.all_gather`."""
        self._refuse.limit("all_gather", async_op, timeout_s)
        self._refuse.gathered(output, input, "all_gather")
        parts = list(_numbers(output).view(self._world_size, -1).unbind(0))
        own = _numbers(input)
        work = self._work(lambda: self._group.allgather([parts], [own]), None)
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
    ) -> TorchWork | None:
        """Implement `Comm.reduce_scatter`."""
        self._refuse.limit("reduce_scatter", async_op, timeout_s)
        self._refuse.chunks(output, input, "reduce_scatter")
        finish = self._averager(output, op)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE[op]
        parts = list(input.view(self._world_size, -1).unbind(0))
        work = self._work(
            lambda: self._group.reduce_scatter([output.view(-1)], [parts], options),
            None,
            finish,
        )
        return later_or_now(work, async_op, timeout_s)

    @plain
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> TorchWork | None:
        """Implement `Comm.all_to_all`."""
        self._refuse.limit("all_to_all", async_op, timeout_s)
        self._refuse.exchanged(output, input, "all_to_all")
        both = _numbers(output), _numbers(input)
        work = self._work(lambda: self._group.alltoall_base(*both, [], []), None)
        return later_or_now(work, async_op, timeout_s)

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Implement `Comm.new_group`."""
        members = list(ranks)
        self._refuse.group(members)
        name = f"group{self._num_groups}:{members}"
        self._num_groups += 1
        self.barrier()  # like torch's: every rank calls it, members or not
        if self._rank not in members:
            return None
        store = c10d.PrefixStore(name, self.store)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        group = TorchComm.from_store(
            store,
            members.index(self._rank),
            len(members),
            backend=backend,
            timeout_s=self._timeout_s,
            host=self._host,
            local_rank=self._local_rank,
        )
        self._groups.append(group)
        return group

    def time(self) -> float:
        """Implement `Comm.time`."""
        return time.monotonic()

    def abort(self) -> None:
        """Implement `Comm.abort`."""
        for group in (self, *self._groups):
            group._close()

    def close(self) -> None:
        """End gloo's threads; you can't use the communicator afterwards.

        After the last collective, a thread of gloo still has to drop its tensors, and
        to do so it needs the interpreter's lock. If the interpreter is already shutting
        down, Python ends that thread, and the whole process dies with SIGABRT.
        """
        self._under_way.clear()
        for group in self._groups:
            group.close()
        if self._device.type == "cpu":
            self._group = _Closed()  # the last reference: torch waits for the threads

    def _close(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()
        elif self._world_size > 1:
            groups.close_gloo_group(self._group)

    def _averager(self, tensor: Tensor, op: ReduceOp) -> Callable[[], object] | None:
        if op is not ReduceOp.AVG:
            return None
        self._refuse.whole_average(tensor)
        return lambda: tensor.div_(self._world_size)

    def _work(
        self,
        start: Callable[[], Any],
        peer: int | None,
        finish: Callable[[], object] | None = None,
    ) -> TorchWork:
        if self._nccl is not None:
            self._nccl.launch()
        self._step += 1
        try:
            work = start()
        except RuntimeError as error:  # gloo says so at once when the peer is long gone
            if not says_peer_is_gone(str(error)):
                raise
            raise PeerLost(self._rank, self._step, peer, 0.0) from error
        return TorchWork(work, self._rank, self._step, peer, self._timeout_s, finish)

    def _message(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int
    ) -> TorchWork:
        if self._nccl is None:
            start = partial(getattr(self._group, kind), [tensor], peer, tag)
            work = self._work(start, peer)
        else:
            self._step += 1
            noted = self._nccl.note(kind, tensor, peer, tag)
            place = self._rank, self._step, peer
            work = TorchWork(noted, *place, self._timeout_s, None)
        self._under_way.add(work)
        work.finish = partial(self._under_way.discard, work)
        return work


def _numbers(tensor: Tensor) -> Tensor:
    """Flatten a tensor for gloo, which moves complex numbers as pairs of real ones."""
    is_complex = tensor.is_complex()
    return (torch.view_as_real(tensor) if is_complex else tensor).view(-1)


class _Closed:
    """Stands for a group that was closed, and refuses every call."""

    def __getattr__(self, name: str) -> Any:
        raise CommRefusedError(f"{name}: the group of this communicator is closed")
