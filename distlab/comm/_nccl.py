"""Launch NCCL's messages in groups, so that none waits for another to be launched.

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
    """Holds a rank's sends and receives that have started but aren't launched yet.

    NCCL connects two ranks when the first message between them is launched, and the
    launch waits for the connection. If both ranks launched their sends first, they
    would wait for each other. We therefore only take note of a message when it starts.
    As soon as the rank has to wait, for a message or in a collective, we launch all of
    these as one group, whose members run side by side.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._noted: list[NcclMessage] = []

    def note(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int
    ) -> NcclMessage:
        """Start a message, which the next launch will send.

        Raises:
            CommRefusedError: the message has a tag, but NCCL matches messages by their
                order.
        """
        if tag:
            raise CommRefusedError(f"{kind} with tag {tag}: NCCL knows no tags")
        message = NcclMessage(self, kind, tensor, peer)
        self._noted.append(message)
        return message

    def launch(self) -> None:
        """Pass all messages that have started to NCCL, as one group."""
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
    """A message with the interface of torch's Work, for `TorchWork`."""

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
        """Wait until the message's group has finished."""
        if self.work is None:
            self._messages.launch()
        self.work.wait(timeout)

    def is_completed(self) -> bool:
        """Return True if the message's group has finished."""
        return self.work is not None and bool(self.work.is_completed())
