"""What the members of one simulated group share: messages that wait for their match.

A message has two ends. It starts when both are there, however small it is (gloo sends
no other way), and both are through when it has arrived. Ends of one channel (source,
destination, tag) match in the order in which they were posted; a receive from anyone
takes the end that was posted first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.comm import ANY
from distlab.sim.collectives import Collectives
from distlab.sim.kernel import Flight, Kernel, Lost
from distlab.sim.links import Wires

Channel = tuple[int, int, int]  # source, destination, tag; numbers of the group


class Message(NamedTuple):
    """One message that arrived; ranks are those of the world, times picoseconds."""

    src: int
    dst: int
    num_bytes: int
    start_ps: int
    end_ps: int
    tag: int


class End(Flight):
    """One end of a message: who posted it, for whom, and the tensor."""

    __slots__ = (
        *("group", "met", "op", "owner", "peer", "posted", "source", "step", "tag"),
        "tensor",
    )

    def __init__(
        self,
        group: Group,
        op: str,
        owner: int,
        peer: int,
        tag: int,
        tensor: Tensor,
        step: int,
    ) -> None:
        super().__init__()
        self.op, self.step = op, step
        self.group, self.owner, self.peer, self.tag = group, owner, peer, tag
        # Not the tensor itself: a message is no operation that autograd should see.
        self.tensor = tensor.data
        self.met = False
        self.posted = 0  # its number among all ends of the group
        self.source = peer

    def awaited(self) -> tuple[int, ...]:
        """See `Flight.awaited`."""
        if self.met:
            return ()
        members = self.group.members
        if self.peer == ANY:
            return tuple(r for i, r in enumerate(members) if i != self.owner)
        return (members[self.peer],)

    def call(self) -> dict[str, Any]:
        """See `Flight.call`."""
        peer = ANY if self.peer == ANY else self.group.members[self.peer]
        return {
            "n": self.step,
            "op": self.op,
            "dst": peer if self.op == "send" else None,
            "src": peer if self.op == "recv" else None,
            "tag": self.tag,
            "shape": list(self.tensor.shape),
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
        }


class Group:
    """The channels of one group, and which members have given it up."""

    def __init__(
        self, kernel: Kernel, wires: Wires, trace: list[Message], members: Sequence[int]
    ) -> None:
        self.kernel, self.wires, self.trace = kernel, wires, trace
        self.members = tuple(members)  # ranks of the world
        self.subgroups: dict[object, Group] = {}
        self.gone: set[int] = set()
        self.collectives = Collectives(kernel, wires, self.members, self.gone)
        self._sends: defaultdict[Channel, deque[End]] = defaultdict(deque)
        self._receives: defaultdict[Channel, deque[End]] = defaultdict(deque)
        self._posted = 0

    def subgroup(self, key: object, members: Sequence[int]) -> Group:
        """The same object for every member that asks with the same `key`."""
        if key not in self.subgroups:
            outer = [self.members[member] for member in members]
            self.subgroups[key] = Group(self.kernel, self.wires, self.trace, outer)
        return self.subgroups[key]

    def send(self, end: End) -> None:
        """Post the sender's end."""
        if self._is_lost(end):
            return
        channel = (end.owner, end.peer, end.tag)
        receive = _first(
            self._receives[channel], self._receives[ANY, end.peer, end.tag]
        )
        if receive is None:
            self._sends[channel].append(end)
        else:
            self._start(end, receive)

    def receive(self, end: End) -> None:
        """Post the receiver's end; its peer may be ANY."""
        if self._is_lost(end):
            return
        n = len(self.members)
        sources = range(n) if end.peer == ANY else (end.peer,)
        waiting = [
            queue
            for src in sources
            if (queue := self._sends.get((src, end.owner, end.tag)))
        ]
        send = _first(*waiting)
        if send is None:
            self._receives[end.peer, end.owner, end.tag].append(end)
        else:
            self._start(send, end)

    def leave(self, rank: int) -> None:
        """Close a member's connections: all that waits for it, and itself, is lost."""
        self.gone.add(rank)
        self.collectives.leave()
        for queues in (self._sends, self._receives):
            for queue in queues.values():
                for end in [end for end in queue if rank in (end.owner, end.peer)]:
                    queue.remove(end)
                    self.kernel.end(end, Lost())

    def _is_lost(self, end: End) -> bool:
        end.posted = self._posted = self._posted + 1
        if end.owner in self.gone or end.peer in self.gone:
            self.kernel.end(end, Lost())
            return True
        return False

    def _start(self, send: End, receive: End) -> None:
        send.met = receive.met = True
        receive.source = send.owner
        src, dst = self.members[send.owner], self.members[receive.owner]
        num_bytes = send.tensor.nbytes
        kernel = self.kernel
        start, end = self.wires.message(src, dst, num_bytes, kernel.now_ps)
        self.trace.append(Message(src, dst, num_bytes, start, end, send.tag))
        kernel.at(end, partial(self._arrive, send, receive))

    def _arrive(self, send: End, receive: End) -> None:
        error = deliver(send.tensor, receive.tensor)
        self.kernel.end(send)
        self.kernel.end(receive, error)


def deliver(sent: Tensor, received: Tensor) -> Exception | None:
    """Copy what was sent into the receiver's tensor, in place, as a wire would.

    Bytes know no dtype: the two ends need not be alike, as on gloo. The journals show
    that they were not; only what does not fit is an error.
    """
    if sent.dtype == received.dtype and sent.shape == received.shape:
        received.copy_(sent)
        return None
    if sent.nbytes > received.nbytes:
        return RuntimeError(
            f"{sent.nbytes} bytes arrived for a tensor of {received.nbytes} bytes"
        )
    if sent.numel():
        into = received.view(-1).view(torch.uint8)
        into[: sent.nbytes] = sent.view(-1).view(torch.uint8)
    return None


def _first(*queues: deque[End]) -> End | None:
    """The end posted first in these queues, taken out of its own."""
    full = [queue for queue in queues if queue]
    if not full:
        return None
    return min(full, key=lambda queue: queue[0].posted).popleft()
