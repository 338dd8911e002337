"""A group that costs nothing to create: some ranks of a Comm, for messages only.

`new_group` is a collective, which takes a while on a thousand ranks. If you don't call
library collectives in the group, it's enough to renumber the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from distlab.comm import ANY, Call, Comm, CommRefusedError, Work, Wrapper

T = TypeVar("T")


class Members(Wrapper):
    """The ranks `members` of `inner`, numbered from 0 in this order.

    This rank must be one of them. If two groups share two ranks, only the tags tell
    their messages apart.
    """

    def __init__(self, inner: Comm, members: Sequence[int]) -> None:
        super().__init__(inner)
        self.members = list(members)
        self._place = self.members.index(inner.rank)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._place

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return len(self.members)

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Implement `Comm.send`."""
        self._inner.send(tensor, self._outer(dst), tag, timeout_s=timeout_s)

    def recv(
        self,
        tensor: Tensor,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Implement `Comm.recv`, but only from a rank that you name."""
        self._inner.recv(tensor, self._outer(src), tag, timeout_s=timeout_s)
        return src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Implement `Comm.isend`."""
        return self._inner.isend(tensor, self._outer(dst), tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Implement `Comm.irecv`."""
        return self._inner.irecv(tensor, self._outer(src), tag)

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
        self._inner.sendrecv(
            send_tensor,
            self._outer(dst),
            recv_tensor,
            self._outer(src),
            timeout_s=timeout_s,
        )

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        raise CommRefusedError(
            f"comm.{call.op} is not available in this group, only send, recv, isend, "
            "irecv and sendrecv"
        )

    def _outer(self, rank: int) -> int:
        is_number = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_number or not 0 <= rank < len(self.members):
            raise CommRefusedError(
                f"{rank!r} is no rank of this group: it has the ranks 0 to "
                f"{len(self.members) - 1}"
            )
        return self.members[rank]
