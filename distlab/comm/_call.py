"""A record of a call on a communicator, and the base class of all wrappers.

A wrapper is a Comm around a Comm. Each method of `Wrapper` describes the call as a
`Call` and passes it to `_around`, so a new wrapper only needs one method:

    learner ──▶ PointToPointOnly ──▶ Journal ──▶ ByteMeter ──▶ TorchComm ──▶ gloo
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from distlab.comm._protocol import ANY, SUM, Comm, ReduceOp, Work

T = TypeVar("T")

COLLECTIVES = frozenset(
    {
        "barrier",
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "new_group",
    }
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A record of a call on the communicator, without the data itself."""

    op: str
    dst: int | None = None
    src: int | None = None
    tag: int = 0
    root: int | None = None  # the one special rank of a broadcast or reduce
    reduce_op: ReduceOp | None = None
    sent: Tensor | None = None
    received: Tensor | None = None
    blocking: bool = True
    group: tuple[int, ...] = ()  # the members, for new_group only
    timeout_s: float | None = None


class Wrapper:
    """A Comm that passes every call on through `_around`."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        """Handle `call`; `proceed()` performs it."""
        raise NotImplementedError

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        """Wrap a subgroup just created, so that the wrapper sees its calls too."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Implement `Comm.rank`."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Implement `Comm.world_size`."""
        return self._inner.world_size

    @property
    def local_rank(self) -> int:
        """Implement `Comm.local_rank`."""
        return self._inner.local_rank

    @property
    def device(self) -> torch.device:
        """Implement `Comm.device`."""
        return self._inner.device

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.send`."""
        self._around(
            Call(op="send", dst=dst, tag=tag, sent=tensor, timeout_s=timeout_s),
            lambda: self._inner.send(tensor, dst, tag, timeout_s=timeout_s),
        )

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Implement `Comm.recv`."""
        return self._around(
            Call(op="recv", src=src, tag=tag, received=tensor, timeout_s=timeout_s),
            lambda: self._inner.recv(tensor, src, tag, timeout_s=timeout_s),
        )

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Implement `Comm.isend`."""
        return self._around(
            Call(op="isend", dst=dst, tag=tag, sent=tensor, blocking=False),
            lambda: self._inner.isend(tensor, dst, tag),
        )

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Implement `Comm.irecv`."""
        return self._around(
            Call(op="irecv", src=src, tag=tag, received=tensor, blocking=False),
            lambda: self._inner.irecv(tensor, src, tag),
        )

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
        self._around(
            Call(
                op="sendrecv",
                dst=dst,
                src=src,
                sent=send_tensor,
                received=recv_tensor,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.sendrecv(
                send_tensor, dst, recv_tensor, src, timeout_s=timeout_s
            ),
        )

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Implement `Comm.barrier`."""
        self._around(
            Call(op="barrier", timeout_s=timeout_s),
            lambda: self._inner.barrier(timeout_s=timeout_s),
        )

    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.broadcast`."""
        self._around(
            Call(
                op="broadcast",
                root=src,
                sent=tensor,
                received=tensor,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.broadcast(tensor, src, timeout_s=timeout_s),
        )

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Implement `Comm.all_reduce`."""
        return self._around(
            Call(
                op="all_reduce",
                reduce_op=op,
                sent=tensor,
                received=tensor,
                blocking=not async_op,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.all_reduce(tensor, op, async_op, timeout_s=timeout_s),
        )

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Implement `Comm.reduce`."""
        self._around(
            Call(
                op="reduce",
                root=dst,
                reduce_op=op,
                sent=tensor,
                received=tensor,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.reduce(tensor, dst, op, timeout_s=timeout_s),
        )

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Implement `Comm.all_gather`."""
        return self._around(
            Call(
                op="all_gather",
                sent=input,
                received=output,
                blocking=not async_op,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.all_gather(
                output, input, async_op, timeout_s=timeout_s
            ),
        )

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Implement `Comm.reduce_scatter`."""
        return self._around(
            Call(
                op="reduce_scatter",
                reduce_op=op,
                sent=input,
                received=output,
                blocking=not async_op,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.reduce_scatter(
                output, input, op, async_op, timeout_s=timeout_s
            ),
        )

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Implement `Comm.all_to_all`."""
        return self._around(
            Call(
                op="all_to_all",
                sent=input,
                received=output,
                blocking=not async_op,
                timeout_s=timeout_s,
            ),
            lambda: self._inner.all_to_all(
                output, input, async_op, timeout_s=timeout_s
            ),
        )

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Implement `Comm.new_group`."""
        group = self._around(
            Call(op="new_group", group=tuple(ranks)),
            lambda: self._inner.new_group(ranks),
        )
        return None if group is None else self._wrap_group(group, ranks)

    def time(self) -> float:
        """Implement `Comm.time`."""
        return self._inner.time()

    def abort(self) -> None:
        """Implement `Comm.abort`."""
        self._inner.abort()
