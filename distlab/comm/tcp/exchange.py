"""Match sends with receives, on one rank with a line to every other.

    receiver                          sender
    recv posted ── GRANT 0 ─────────▶ send posted: it may go
    tensor      ◀───────── DATA 0 ──  send is done

The receiver asks and the sender answers, at every size. No message is therefore ever
stored outside of a tensor, and a send ends only when its receive exists. A receive from
anyone doesn't know which rank to ask, so it tells all of them (WANTED). From then on,
senders on that channel that haven't been asked announce that they wait (ANNOUNCE).

Everything here happens at once and never waits; the caller holds the engine's lock.

Source: receiver-initiated rendezvous, as in MPI over RDMA and in gloo's pairs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from distlab.comm.tcp.flights import Channel, Key, LostPeer, Schedule, Step, Transfer
from distlab.comm.tcp.frames import Frame, FrameError, Kind, header
from distlab.comm.tcp.line import Line
from distlab.comm.tcp.peers import Peer, Peers


class Exchange(Peers):
    """The messages and collectives of one rank, for all groups together."""

    def __init__(self, rank: int, lines: Iterable[Line]) -> None:
        super().__init__(rank, lines)
        self._announced: defaultdict[Key, deque[tuple[int, int]]] = defaultdict(deque)
        self._control: dict[int, Callable[[Peer, Channel, Frame], None]] = {
            Kind.GRANT: self._granted,
            Kind.WANTED: self._be_wanted,
            Kind.ANNOUNCE: self._announce,
        }

    # ── posting ─────────────────────────────────────────────────────────────────────

    def send(self, transfer: Transfer, *, look: bool = False) -> None:
        """Post a send; if `look` is set, check first if its permission has arrived."""
        if self._is_lost(transfer):
            return
        peer, channel = self._enter(transfer)
        index = channel.posted
        channel.posted += 1
        if channel.grants > index:
            self._transmit(peer, transfer, index)
            return
        channel.unsent.append(transfer)
        announces = channel.wanted  # who is told so only now announces it at once
        if look:
            self.read(peer)
        if announces and channel.grants <= index and not transfer.done:
            self._put(peer, header(Kind.ANNOUNCE, *transfer.key, index))

    def receive(self, transfer: Transfer) -> None:
        """Post a receive from one peer."""
        if self._is_lost(transfer):
            return
        peer, channel = self._enter(transfer)
        index = channel.asked
        channel.asked += 1
        channel.expecting.append(transfer)
        self._put(peer, header(Kind.GRANT, *transfer.key, index))

    def receive_from_anyone(self, transfer: Transfer) -> None:
        """Post a receive from the rank that has been waiting longest to send."""
        if self._nobody_left(transfer.group):
            transfer.land(LostPeer("nobody is left in the group"))
            return
        if transfer.key not in self._announced:
            self._want(transfer)
        announced = self._announced[transfer.key]
        while announced:
            source, index = announced.popleft()
            if self._is_waiting(source, transfer.key, index):
                transfer.peer = source
                self.receive(transfer)
                return
        self._from_anyone[transfer.key].append(transfer)

    def start(self, schedule: Schedule) -> None:
        """Start a collective."""
        group = schedule.group
        group.schedules.add(schedule)
        lost = [m for m in group.members if m != self.rank and self.peers[m].lost]
        if group.gone or lost:
            self._end(
                schedule, LostPeer(f"{sorted(group.gone) or lost} left the group")
            )
        else:
            self._ready.append(schedule)

    def settle(self) -> None:
        """Do everything that has become possible; call it after any other method.

        We flush lines last, so that everything for one peer goes together.
        """
        while self._broken or self._ready or self._unsent:
            if self._broken:
                self._bury(*self._broken.popleft())
            elif self._ready:
                self._resume(self._ready.popleft())
            else:
                self.flush(self._unsent.popleft())

    def _want(self, transfer: Transfer) -> None:
        for member in transfer.group.members:
            if member != self.rank and not self.peers[member].lost:
                head = header(Kind.WANTED, *transfer.key)
                self._put(self.peers[member], head)

    def _enter(self, transfer: Transfer) -> tuple[Peer, Channel]:
        peer = self.peers[transfer.peer]
        channel = peer.channels[transfer.key]
        channel.group = transfer.group
        peer.pending += 1
        self.pending += 1
        return peer, channel

    def _is_waiting(self, source: int, key: Key, index: int) -> bool:
        """Return True if a send that was announced has not been requested since."""
        peer = self.peers[source]
        channel = peer.channels[key]
        return not peer.lost and not channel.closed and channel.asked <= index

    def _transmit(self, peer: Peer, transfer: Transfer, index: int) -> None:
        head = header(
            Kind.DATA,
            *transfer.key,
            index,
            dtype=transfer.dtype,
            elements=transfer.elements,
            length=len(transfer.view),
        )
        self._put(peer, head, transfer.view, transfer)

    def _resume(self, schedule: Schedule) -> None:
        if schedule.done:
            return
        try:
            steps = next(schedule.steps)
        except StopIteration:
            self._end(schedule, None)
        except Exception as error:  # of torch, say: two ranks' tensors differ
            self._end(schedule, error)
        else:
            schedule.remaining = len(steps)
            for step in steps:
                self._post(schedule, step)

    def _post(self, schedule: Schedule, step: Step) -> None:
        group = schedule.group
        peer = group.members[step.peer]
        transfer = Transfer(group, schedule.key, peer, step.tensor, schedule)
        if step.is_send:
            self.send(transfer)
        else:
            self.receive(transfer)

    # ── what arrives ────────────────────────────────────────────────────────────────

    def begin(self, line: Line, frame: Frame) -> memoryview | None:
        """Implement `Reader.begin`."""
        peer = self.peers[line.peer]
        kind = frame.kind
        if kind == Kind.CLOSE:
            self._left_by(line.peer, frame.space)
            return None
        if kind == Kind.BYE:
            peer.said_bye = True
            return None
        channel = peer.channels[frame.space, frame.tag]
        if kind == Kind.DATA:
            return self._arrive(peer, channel, frame)
        if not channel.closed:
            self._control[kind](peer, channel, frame)
        return None

    def end(self, line: Line) -> None:
        """Implement `Reader.end`."""
        peer = self.peers[line.peer]
        transfer, peer.arriving = peer.arriving, None
        if transfer is not None and not transfer.done:
            self._land(transfer, transfer.error)

    def sent(self, owner: object) -> None:
        """Implement `Reader.sent`."""
        if isinstance(owner, Transfer):
            self._land(owner, None)

    def _granted(self, peer: Peer, channel: Channel, frame: Frame) -> None:
        _check_sequence(frame, channel.grants)
        channel.grants += 1
        if channel.unsent:
            self._transmit(peer, channel.unsent.popleft(), frame.sequence)

    def _be_wanted(self, peer: Peer, channel: Channel, frame: Frame) -> None:
        channel.wanted = True
        for index in range(channel.grants, channel.posted):
            head = header(Kind.ANNOUNCE, frame.space, frame.tag, index)
            self._put(peer, head)

    def _announce(self, peer: Peer, channel: Channel, frame: Frame) -> None:
        if frame.sequence < channel.announced:
            _check_sequence(frame, channel.announced)
        channel.announced = frame.sequence + 1
        if frame.sequence < channel.asked:
            return  # our grant and its announcement have crossed
        key, source = (frame.space, frame.tag), peer.line.peer
        if self._from_anyone.get(key):
            transfer = self._from_anyone[key].popleft()
            transfer.peer = source
            self.receive(transfer)
            return
        announced = self._announced[key]
        while announced and not self._is_waiting(announced[0][0], key, announced[0][1]):
            announced.popleft()
        announced.append((source, frame.sequence))

    def _arrive(self, peer: Peer, channel: Channel, frame: Frame) -> memoryview | None:
        if channel.closed:
            return None
        _check_sequence(frame, channel.arrived)
        if not channel.expecting:
            raise FrameError("a message came that nobody had asked for")
        channel.arrived += 1
        transfer = peer.arriving = channel.expecting.popleft()
        transfer.error = transfer.misfit(frame.length)
        return None if transfer.error else transfer.view[: frame.length]


def _check_sequence(frame: Frame, expected: int) -> None:
    if frame.sequence != expected:
        raise FrameError(
            f"{Kind(frame.kind).name} number {frame.sequence} came "
            f"where {expected} was due"
        )
