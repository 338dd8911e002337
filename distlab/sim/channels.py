"""The channels of a simulated group, in which messages wait for their match.

A message has two ends. However small it is, it starts only when both have been posted,
because gloo has no other way to send. When it arrives, both ends are finished. Ends of
one channel (source, destination, tag) match in the order in which they were posted. A
receive from anyone takes the send that was posted first.

A ring of 1,024 ranks calls this code two million times, which is why it takes a few
shortcuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from distlab.comm import ANY
from distlab.sim.collectives import Collectives, HoldsBack
from distlab.sim.kernel import Fiber, Flight, GaveUp, Kernel
from distlab.sim.messages import Fields, Message, deliver, move
from distlab.sim.net.links import Ports, Wires
from distlab.sim.payload import Sized

__all__ = ["Channel", "End", "Group", "Message"]


class _Moving(Flight):
    """The fields that change with every message, kept together for the caches' sake.

    `address` is the address of the tensor's first byte and `num_bytes` is its size, if
    they were looked up, and 0 otherwise.
    """

    __slots__ = ("address", "met", "num_bytes", "other", "posted", "step", "tensor")


class End(_Moving):
    """One end of a message: the rank that posted it, its peer, and the tensor."""

    __slots__ = (
        *("channel", "dropped", "group", "op", "owner", "parcel", "peer", "source"),
        "tag",
    )

    def __init__(
        self,
        group: Group,
        op: str,
        owner: int,
        peer: int,
        tag: int,
        tensor: Tensor | Sized | None,
        step: int,
    ) -> None:
        self.done = self.met = self.dropped = False
        self.error: Exception | None = None
        self.waiter: Fiber | None = None
        self.group, self.op, self.step = group, op, step
        self.owner, self.peer, self.tag, self.tensor = owner, peer, tag, tensor
        self.address = self.num_bytes = 0
        self.posted = 0  # its number among the ends of the group that had to wait
        self.source = peer
        self.channel: Any = None  # of a receive, as soon as it has met its send
        self.other: End | None = None
        self.parcel: Any = None  # what was sent before anyone received it

    def awaited(self) -> tuple[int, ...]:
        """Implement `Flight.awaited`."""
        if self.met and not self.dropped:
            return ()
        members = self.group.members
        if self.peer == ANY:
            return tuple(r for i, r in enumerate(members) if i != self.owner)
        return (members[self.peer],)

    @property
    def one_is_enough(self) -> bool:
        """Implement `Flight.one_is_enough`."""
        return self.peer == ANY and not self.met

    def call(self) -> dict[str, Any]:
        """Implement `Flight.call`."""
        peer = ANY if self.peer == ANY else self.group.members[self.peer]
        tensor = self.tensor if isinstance(self.tensor, Tensor) else None
        return {
            "n": self.step,
            "op": self.op,
            "dst": peer if self.op == "send" else None,
            "src": peer if self.op == "recv" else None,
            "tag": self.tag,
            "shape": None if tensor is None else list(tensor.shape),
            "dtype": None if tensor is None else str(tensor.dtype)[len("torch.") :],
        }

    def arrive(self) -> None:
        """Finish a receive, because its message has arrived."""
        send, self.other = self.other, None
        assert send is not None
        if type(self.tensor) is not Sized:
            self.error = deliver(send.tensor, self.tensor)
        kernel = self.group.kernel
        kernel.end(send)
        kernel.end(self, self.error)


class Arrivals(list[End]):
    """Receives whose messages arrive directly after each other, at the same instant."""

    def __call__(self) -> None:
        """Call `End.arrive` for each of them, because all have arrived."""
        wake = self[0].group.kernel.ready.append
        for receive in self:
            send: Any = receive.other
            receive.other = None
            if receive.address and send.address and send.num_bytes <= receive.num_bytes:
                move(receive.address, send.address, send.num_bytes)
            elif (into := receive.tensor) is not None and type(into) is not Sized:
                receive.error = deliver(send.tensor, into)
            send.done = receive.done = True
            if send.waiter is not None:
                wake(send.waiter)
                send.waiter = None
            if receive.waiter is not None:
                wake(receive.waiter)
                receive.waiter = None


def arrive(kernel: Kernel, receives: list[End], when_ps: int) -> None:
    """Schedule these messages to arrive at `when_ps`.

    They join the last event that is planned for that time if it is also an arrival.
    """
    planned = kernel.events.get(when_ps)
    if planned and type(planned[-1]) is Arrivals:
        planned[-1] += receives
    else:
        kernel.at(when_ps, Arrivals(receives))


class Channel:
    """The ends from one member to another with one tag that wait for their match."""

    __slots__ = ("dst", "num_started", "receives", "sends", "src", "tag")

    def __init__(self, src: int, dst: int, tag: int) -> None:
        self.src, self.dst, self.tag = src, dst, tag  # ranks of the world
        self.sends: deque[End] = deque()
        self.receives: deque[End] = deque()
        self.num_started = 0


class Rules(HoldsBack, Protocol):
    """The rules for messages that aren't plain ones: see `Conditions`."""

    def post(self, group: Group, channel: Channel, send: End) -> bool:
        """Send it if it is small enough; return False if it must wait for its match."""

    def start(self, group: Group, channel: Channel, send: End, receive: End) -> None:
        """Send the message, because both ends have been posted."""


class Group:
    """The channels of one group, and the members that have given it up."""

    def __init__(
        self,
        kernel: Kernel,
        wires: Wires,
        trace: list[Fields] | None,
        members: Sequence[int],
        conditions: Rules | None = None,
    ) -> None:
        self.kernel, self.wires, self.trace = kernel, wires, trace
        self.members = tuple(members)  # ranks of the world
        self.conditions = conditions
        self.subgroups: dict[object, Group] = {}
        self.gone: set[int] = set()
        self.collectives = Collectives(
            kernel, wires, self.members, self.gone, conditions
        )
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._any: dict[tuple[int, int], deque[End]] = {}  # by destination and tag
        self.num_posted = 0
        # Nothing but plain messages so far: no faults, nobody gone, no ANY.
        self.is_plain = kernel.hands_over and conditions is None
        self.dropped: deque[End] = deque()  # receives whose message was lost

    def subgroup(self, key: object, members: Sequence[int]) -> Group:
        """Return the same object for every member that asks with the same `key`."""
        if key not in self.subgroups:
            outer = [self.members[member] for member in members]
            self.subgroups[key] = Group(
                self.kernel, self.wires, self.trace, outer, self.conditions
            )
        return self.subgroups[key]

    def channel(self, src: int, dst: int, tag: int) -> Channel:
        """Return the channel between two members of the group with this tag."""
        channel = self._channels.get((src, dst, tag))
        if channel is None:
            channel = Channel(self.members[src], self.members[dst], tag)
            self._channels[src, dst, tag] = channel
        return channel

    def send(self, end: End) -> None:
        """Post the sender's end."""
        self.post_send(self.channel(end.owner, end.peer, end.tag), end)

    def receive(self, end: End) -> None:
        """Post the receiver's end; its peer may be ANY."""
        if end.peer == ANY:
            self._receive_any(end)
        else:
            self.post_receive(self.channel(end.peer, end.owner, end.tag), end)

    def post_send(self, channel: Channel, end: End) -> None:
        """Do what `send` does, for a caller that keeps its channels."""
        if self.gone and self._is_lost(end):
            return
        if self.conditions is not None and self.conditions.post(self, channel, end):
            return
        end.num_bytes = end.tensor.nbytes  # type: ignore[union-attr]
        receive = self.take_receive(channel, end)
        if receive is not None:
            self.start(channel, end, receive)
        else:
            self.queue(channel.sends, end)

    def post_receive(self, channel: Channel, end: End) -> None:
        """Do what `receive` does, for a caller that keeps its channels."""
        if self.gone and self._is_lost(end):
            return
        end.channel = channel
        if channel.sends:
            self.start(channel, channel.sends.popleft(), end)
        else:
            self.queue(channel.receives, end)

    def leave(self, rank: int) -> None:
        """Close a member's connections, so that everything waiting for it is lost."""
        self.gone.add(rank)
        self.is_plain = False
        self.collectives.leave()
        queues = [*self._any.values(), self.dropped]
        for channel in self._channels.values():
            queues += [channel.sends, channel.receives]
        for queue in queues:
            for end in [end for end in queue if rank in (end.owner, end.peer)]:
                queue.remove(end)
                if not end.done:  # an eager send is through, whatever happens to it
                    self.kernel.end(end, GaveUp())

    def reap(self, rank: int) -> None:
        """Remove a dead rank of the world from this group and all subgroups."""
        if rank in self.members:
            self.leave(self.members.index(rank))
        for group in self.subgroups.values():
            group.reap(rank)

    # ── how ─────────────────────────────────────────────────────────────────────────

    def _is_lost(self, end: End) -> bool:
        if end.owner in self.gone or end.peer in self.gone:
            self.kernel.end(end, GaveUp())
            return True
        return False

    def take_receive(self, channel: Channel, send: End) -> End | None:
        """Return the receive that has waited longest for such a message, if any."""
        receives = channel.receives
        if self._any:
            anyone = self._any.get((send.peer, send.tag))
            if anyone and not (receives and receives[0].posted < anyone[0].posted):
                receive = anyone.popleft()
                receive.source, receive.channel = send.owner, channel
                return receive
        return receives.popleft() if receives else None

    def _receive_any(self, end: End) -> None:
        self.is_plain = False
        if self.gone and self._is_lost(end):
            return
        waiting = [
            channel
            for src in range(len(self.members))
            if (channel := self._channels.get((src, end.owner, end.tag)))
            and channel.sends
        ]
        if waiting:
            channel = min(waiting, key=lambda channel: channel.sends[0].posted)
            send = channel.sends.popleft()
            end.source, end.channel = send.owner, channel
            self.start(channel, send, end)
        else:
            self.queue(self._any.setdefault((end.owner, end.tag), deque()), end)

    def queue(self, queue: deque[End], end: End) -> None:
        """Let an end wait for its match."""
        end.posted = self.num_posted = self.num_posted + 1
        queue.append(end)

    def start(self, channel: Channel, send: End, receive: End) -> None:
        """Send the message of two posted ends: it sets off with all of this instant."""
        send.met = receive.met = True
        receive.other = send
        if self.conditions is not None:
            self.conditions.start(self, channel, send, receive)
            return
        self.kernel.met.append(receive)

    def depart(self) -> None:
        """Send all messages, in any group, whose ends were matched at this instant."""
        kernel = self.kernel
        if not kernel.met:
            return
        receives = kernel.met.copy()
        kernel.met.clear()
        if self.trace is None and isinstance(self.wires, Ports):
            ends = self.wires.messages(receives, kernel.now_ps)
        else:
            ends = [self.book(end.channel, end.other) for end in receives]
        if ends.count(ends[0]) == len(ends):
            arrive(kernel, receives, ends[0])
        else:
            for receive, end_ps in zip(receives, ends, strict=True):
                arrive(kernel, [receive], end_ps)

    def book(self, channel: Channel, send: End) -> int:
        """Put a message on its way; return the time when it arrives."""
        num_bytes = send.tensor.nbytes  # type: ignore[union-attr]
        src, dst = channel.src, channel.dst
        start, end = self.wires.message(src, dst, num_bytes, self.kernel.now_ps)
        if self.trace is not None:
            self.trace.append((src, dst, num_bytes, start, end, channel.tag))
        return end
