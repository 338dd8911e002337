"""Messages over NCCL: none is launched alone that may have to wait for another.

    isend ─┐ noted                     rank 0   send → 1 ┐     rank 1   send → 0 ┐
    irecv ─┤ noted                              recv ← 1 ┘              recv ← 0 ┘
    wait  ─┴─▶ one launch of all                 one group               one group

Source: NCCL user guide, "Point-to-point communication"; torch's `batch_isend_irecv`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from torch import Tensor

from distlab.comm._protocol import CommRefusedError


class NcclMessages:
    """The sends and receives of a rank that were started and not yet launched.

    NCCL connects two ranks when the first message between them is launched, and the
    launch waits for that: two ranks that both send first would wait for each other. So
    a start is only noted. Whoever has to wait, for a message or in a collective,
    launches all that is noted as one group, whose members run side by side.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._noted: list[NcclMessage] = []

    def note(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int
    ) -> NcclMessage:
        """Start a message; it is under way from the next launch on.

        Raises:
            CommRefusedError: it has a tag. NCCL matches messages by their order.
        """
        if tag:
            raise CommRefusedError(f"{kind} with tag {tag}: NCCL knows no tags")
        message = NcclMessage(self, kind, tensor, peer)
        self._noted.append(message)
        return message

    def launch(self) -> None:
        """Hand all that is noted to NCCL, as one group."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        self._group._start_coalescing()
        for message in noted:
            getattr(self._group, message.kind)([message.tensor], message.peer, 0)
        work = self._group._end_coalescing()
        for message in noted:
            message.work = work


class NcclMessage:
    """One of them: to `TorchWork` what torch's Work is."""

    def __init__(
        self,
        messages: NcclMessages,
        kind: Literal["send", "recv"],
        tensor: Tensor,
        peer: int,
    ) -> None:
        self._messages = messages
        self.kind, self.tensor, self.peer = kind, tensor, peer
        self.work: Any = None

    def wait(self, timeout: timedelta) -> None:
        """Until the group that it was launched in is over."""
        if self.work is None:
            self._messages.launch()
        self.work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the group that it was launched in is over."""
        return self.work is not None and bool(self.work.is_completed())
