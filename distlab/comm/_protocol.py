"""The communicator that your code sees, with torch.distributed's names.

Source: torch.distributed for the names; MPI for the object form (a rank receives its
communicator and never uses a global one).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

ANY = -1
"""Pass it as `src` to `recv` to take the first message that arrives from any rank."""


class ReduceOp(Enum):
    """The operation with which a reduction combines the ranks' tensors, elementwise.

    Example:
        assert ReduceOp.AVERAGE is ReduceOp.AVG
    """

    SUM = "sum"
    AVG = "avg"
    AVERAGE = "avg"  # noqa: PIE796 - the same member under its other usual name
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


SUM = ReduceOp.SUM


class CommRefusedError(ValueError):
    """Raised for a call that can never succeed, before anything is sent.

    A program can find the reason in `kind`: "no such rank", "itself", "collective" (not
    available here), or "call" for anything else.
    """

    def __init__(self, message: str, kind: str = "call") -> None:
        super().__init__(message)
        self.kind = kind


class PeerLost(RuntimeError):  # noqa: N818 - it names an event, as ConnectionReset does
    """Raised if a peer died, or didn't answer a rank within the time limit."""

    def __init__(
        self, rank: int, step: int, peer: int | str | None, waited_s: float
    ) -> None:
        self.rank, self.step, self.peer, self.waited_s = rank, step, peer, waited_s
        whom = "its peers" if peer is None else f"rank {peer}"
        if isinstance(peer, str):  # a service that is no rank
            whom = f'the service "{peer}"'
        super().__init__(
            f"rank {rank} lost {whom} in call #{step} after waiting {waited_s:.2f} s"
        )


class Work(Protocol):
    """A transfer in progress; don't touch its tensor until `wait` returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is done.

        Raises:
            PeerLost: the peer died, or `timeout_s` seconds passed.
        """

    def is_completed(self) -> bool:
        """Return True if `wait` would return at once, as far as the transport knows.

        gloo doesn't tell us this about messages, so for them it is False until `wait`
        has returned.
        """


class Comm(Protocol):
    """One rank's view of its group; all tensors are contiguous and on `device`.

    Every call that waits takes `timeout_s` in seconds (None means the transport's own
    limit). If the time is over before the peer has answered, it raises `PeerLost`.

    With `async_op`, a collective returns its Work at once. Don't touch its inputs and
    outputs until you have called `wait`, to which you can pass the time limit.
    """

    @property
    def rank(self) -> int:
        """This rank's number, 0 … world_size - 1."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""

    @property
    def local_rank(self) -> int:
        """This rank's number on its own machine."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors must be."""

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Send `tensor` to rank `dst`; return once `dst` is receiving it."""

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Receive into `tensor`, in place, from rank `src`; return the source rank."""

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start a send and return at once; don't touch `tensor` until `wait`."""

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start a receive and return at once; `wait` fills `tensor`."""

    def sendrecv(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send to `dst` and receive from `src` at the same time, so this can't hang."""

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank of the group has called it; collective."""

    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Copy rank `src`'s `tensor` to every rank, in place; collective."""

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place; collective."""

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Reduce `tensor` in place on `dst`; undefined on other ranks; collective."""

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Gather every rank's `input` in `output` (world_size × input); collective.

        In torch.distributed, this is `all_gather_into_tensor`.
        """

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Reduce `input`, and put this rank's chunk of it in `output`; collective."""

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send chunk i of `input` to rank i, and receive into `output`; collective."""

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Create a Comm for `ranks`; collective over this group.

        Returns None on ranks that aren't in `ranks`.
        """

    def time(self) -> float:
        """Return seconds on a clock that never goes back (virtual in a simulation)."""

    def abort(self) -> None:
        """Give up on this group, so that waiting peers get an error, not silence."""
