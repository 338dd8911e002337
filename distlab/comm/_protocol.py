"""The communicator as learner code sees it: names and meanings of torch.distributed.

Source: torch.distributed for the names; MPI for the object form (a rank is handed its
communicator and never reaches for a global one).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

ANY = -1
"""As `src` of a `recv`: take the first message that arrives, from whichever rank."""


class ReduceOp(Enum):
    """How a reduction combines the ranks' tensors, element by element.

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
    """A call that can never succeed, refused before anything is sent.

    `kind` says why, for programs: "no such rank", "itself", "collective" (not available
    here), or "call" for all else.
    """

    def __init__(self, message: str, kind: str = "call") -> None:
        super().__init__(message)
        self.kind = kind


class PeerLost(RuntimeError):  # noqa: N818 - it names an event, as ConnectionReset does
    """A rank waited for a peer that died or did not answer within the time limit."""

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
    """A transfer under way; its tensor is the transport's until `wait` returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is done.

        Raises:
            PeerLost: the peer died, or `timeout_s` seconds passed.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, as far as the transport tells.

        gloo does not tell it of messages: False until `wait` has returned.
        """


class Comm(Protocol):
    """One rank's view of its group. All tensors are contiguous and on `device`.

    Every wait takes `timeout_s` (seconds; None is the transport's own limit) and raises
    `PeerLost` when it ends without the peer.

    With `async_op` a collective returns its Work at once; what goes in and what comes
    out belong to the transport until `wait`, which is where the limit is given.
    """

    @property
    def rank(self) -> int:
        """This rank's number, 0 … world_size - 1."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def local_rank(self) -> int:
        """This rank's number on its own machine."""

    @property
    def device(self) -> torch.device:
        """Where tensors to be sent must live."""

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Send `tensor` to rank `dst`; returns once `dst` is receiving it."""

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Receive into `tensor`, in place, from rank `src`; returns the source rank."""

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start a send and return at once; leave `tensor` alone until `wait`."""

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start a receive and return at once; `tensor` is filled after `wait`."""

    def sendrecv(
        self,
        send_tensor: Tensor,
        dst: int,
        recv_tensor: Tensor,
        src: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send to `dst` and receive from `src` at the same time, which cannot hang."""

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Collective: wait until every rank of the group has come this far."""

    def broadcast(
        self, tensor: Tensor, src: int, *, timeout_s: float | None = None
    ) -> None:
        """Collective: in place, every rank's `tensor` becomes that of rank `src`."""

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Collective: in place, `tensor` becomes the reduction over all ranks."""

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = SUM,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Collective: on `dst`, in place, the reduction; undefined on other ranks."""

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collective: `output` (world_size × input) holds every rank's `input`."""

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collective: `output` is this rank's chunk of the reduction of `input`."""

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collective: chunk i of `input` goes to rank i; `output` holds what came."""

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """Collective over this group: a Comm of `ranks`; None on ranks outside it."""

    def time(self) -> float:
        """Seconds on a clock that never goes back (virtual in a simulated cluster)."""

    def abort(self) -> None:
        """Give up on this group: waiting peers get an error instead of silence."""
