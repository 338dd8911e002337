"""The fate of messages under faults, or if small ones are sent early.

Two things can differ from the normal case: small messages may be sent before anyone
receives them (`eager_bytes`), and there may be faults. A run with neither doesn't use
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.sim.faults import Faults, Luck, Node
from distlab.sim.kernel import Kernel
from distlab.sim.messages import deliver
from distlab.sim.net.links import Metered, Wires, picoseconds
from distlab.sim.payload import Sized

if TYPE_CHECKING:
    from distlab.sim.channels import Channel, End, Group


class Loss(NamedTuple):
    """A message that vanished: ranks of the world, picoseconds, its number there."""

    src: int
    dst: int
    tag: int
    number: int
    at_ps: int

    def __str__(self) -> str:
        tag = f" with tag {self.tag}" if self.tag else ""
        return (
            f"message {self.number}{tag} from rank {self.src} to rank {self.dst} was "
            f"lost at {self.at_ps * 1e-6:.2f} µs"
        )


class Parcel:
    """A message that was sent early, with a copy of the tensor at that time."""

    __slots__ = ("arrived", "content", "receive")

    def __init__(self, tensor: Any) -> None:
        is_sized = type(tensor) is Sized
        self.content = tensor if is_sized else tensor.detach().clone()
        self.arrived = False
        self.receive: End | None = None

    def require_unchanged(self, send: End) -> None:
        """Require that the tensor of an isend didn't change before its wait.

        Raises:
            RuntimeError: it has changed.
        """
        if type(self.content) is Sized or _bytes(self.content) == _bytes(send.tensor):
            return
        raise RuntimeError(
            f"the tensor of call #{send.step} (isend → {send.peer}) was changed before "
            "wait: what arrives is then up to chance"
        )


class Conditions:
    """The faults of one run and its limit for eager messages; counts what happens."""

    def __init__(self, kernel: Kernel, faults: Faults, eager_bytes: int) -> None:
        self._kernel, self._eager_bytes = kernel, eager_bytes
        self.luck = Luck(faults)
        self.lost: list[Loss] = []
        self.num_duplicates = 0
        self._cuts = [
            (frozenset(nodes), picoseconds(from_s), picoseconds(to_s))
            for nodes, from_s, to_s in faults.partitions
        ]

    def is_cut(self, nodes: Sequence[Node], now_ps: int) -> bool:
        """Return True if some of these nodes can't reach the others now."""
        return self.together_ps(nodes, now_ps) > now_ps

    def together_ps(self, nodes: Sequence[Node], now_ps: int) -> int:
        """Return when these nodes can reach each other: now, or after partitions."""
        heal_ps = [
            to_ps
            for side, from_ps, to_ps in self._cuts
            if from_ps <= now_ps < to_ps and len({node in side for node in nodes}) == 2
        ]
        return self.together_ps(nodes, max(heal_ps)) if heal_ps else now_ps

    def post(self, group: Group, channel: Channel, send: End) -> bool:
        """Send it if it is small enough; return False if it must wait for its match."""
        if send.tensor is None or send.tensor.nbytes > self._eager_bytes:
            return False
        send.parcel = parcel = Parcel(send.tensor)
        send.met = True
        self._kernel.end(send)
        receive = group.take_receive(channel, send)
        if receive is not None:
            receive.met, parcel.receive = True, receive
        else:
            group.queue(channel.sends, send)
        self._depart(group, channel, send, lambda: self._land(parcel))
        return True

    def start(self, group: Group, channel: Channel, send: End, receive: End) -> None:
        """Send the message, because both ends have been posted."""
        if send.parcel is None:
            send.other = receive
            self._depart(group, channel, send, receive.arrive)
            return
        send.parcel.receive = receive
        if send.dropped:
            self._miss(group, receive)
        elif send.parcel.arrived:
            self._land(send.parcel)

    def _land(self, parcel: Parcel) -> None:
        parcel.arrived = True
        receive = parcel.receive
        if receive is not None and not receive.done:
            error = None
            if type(parcel.content) is not Sized:
                error = deliver(parcel.content, receive.tensor)
            self._kernel.end(receive, error)

    def _depart(
        self, group: Group, channel: Channel, send: End, arrive: Callable[[], None]
    ) -> None:
        kernel = self._kernel
        if self.is_cut((channel.src, channel.dst), kernel.now_ps):
            heals_ps = self.together_ps((channel.src, channel.dst), kernel.now_ps)
            kernel.at(heals_ps, self._depart, group, channel, send, arrive)
            return
        channel.num_started += 1
        end_ps = group.book(channel, send)
        if self.luck.doubles():
            # The second copy takes its time too, and is known by its number.
            self.num_duplicates += 1
            src, dst, size = channel.src, channel.dst, send.tensor.nbytes  # type: ignore[union-attr]
            group.wires.message(src, dst, size, kernel.now_ps)
        if self.luck.loses():
            self._lose(group, channel, send, end_ps)
        else:
            kernel.at(end_ps, arrive)

    def _lose(self, group: Group, channel: Channel, send: End, end_ps: int) -> None:
        now_ps, number = self._kernel.now_ps, channel.num_started
        self.lost.append(Loss(channel.src, channel.dst, channel.tag, number, now_ps))
        send.dropped = True
        receive = send.parcel.receive if send.parcel else send.other
        if receive is not None:
            self._miss(group, receive)
        if not send.done:  # it has left; nobody tells the sender what became of it
            self._kernel.at(end_ps, self._kernel.end, send)

    def _miss(self, group: Group, receive: End) -> None:
        receive.dropped = True
        group.dropped.append(receive)


class SlowWires:
    """A network on which every byte from or to a straggler takes longer."""

    def __init__(self, wires: Wires, factors: dict[int, float]) -> None:
        self._wires, self._factors = wires, factors

    def message(
        self, src: int, dst: int, num_bytes: int, now_ps: int
    ) -> tuple[int, int]:
        """Implement `Wires.message`."""
        return self._wires.message(src, dst, self._slow((src, dst), num_bytes), now_ps)

    def collective(
        self, op: str, n: int, num_bytes: int, members: Sequence[int] = ()
    ) -> int:
        """Implement `Wires.collective`."""
        slow = self._slow(members, num_bytes)
        return self._wires.collective(op, n, slow, members)

    def usage(self) -> dict[str, int]:
        """Implement `Metered.usage`."""
        return self._wires.usage() if isinstance(self._wires, Metered) else {}

    def _slow(self, ranks: Sequence[int], num_bytes: int) -> int:
        factors = [self._factors.get(rank, 1.0) for rank in ranks]
        return round(num_bytes * max(factors, default=1.0))


def _bytes(tensor: Any) -> bytes:
    from torch import uint8

    return tensor.detach().view(-1).view(uint8).numpy().tobytes()  # type: ignore[no-any-return]
