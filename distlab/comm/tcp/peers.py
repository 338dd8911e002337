"""Keep track of the lines to the peers, and of what is lost when one leaves.

A peer leaves in one of three ways. It may give up a group (CLOSE), so that only
operations in that group are lost. It may end properly (BYE), after doing its part of
everything. Or its line may simply end. Then no collective of a group with that peer can
finish, not even on ranks that weren't waiting for the peer itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from distlab.comm.tcp.flights import (
    Channel,
    Flight,
    Key,
    LostPeer,
    Membership,
    Schedule,
    Transfer,
)
from distlab.comm.tcp.frames import Frame, FrameError, Kind, header
from distlab.comm.tcp.line import Line


class Peer:
    """Another rank, with the line to it and the channels on that line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.channels: defaultdict[Key, Channel] = defaultdict(Channel)
        self.pending = 0  # transfers that have not landed
        self.arriving: Transfer | None = None
        self.said_bye = False
        self.lost: LostPeer | None = None


class Peers:
    """The other ranks that are still connected."""

    def __init__(self, rank: int, lines: Iterable[Line]) -> None:
        self.rank = rank
        self.pending = 0  # transfers that have not landed, of all peers
        self.peers = {line.peer: Peer(line) for line in lines}
        self.on_blocked: Callable[[Line], None] = lambda line: None
        self.on_lost: Callable[[Line], None] = lambda line: None
        self._groups: dict[int, Membership] = {}
        self._closed_early: defaultdict[int, set[int]] = defaultdict(set)
        self._from_anyone: defaultdict[Key, deque[Transfer]] = defaultdict(deque)
        self._ready: deque[Schedule] = deque()
        self._unsent: deque[Peer] = deque()  # something has been put on their lines
        self._broken: deque[tuple[Peer, Exception]] = deque()

    def add_group(self, group: Membership) -> None:
        """Add a new group, which members may have left before we made it."""
        self._groups[group.id] = group
        group.gone |= self._closed_early.pop(group.id, set())

    def flush(self, peer: Peer) -> None:
        """Send as much of the waiting data as there is room for."""
        if peer.lost:
            return
        try:
            peer.line.flush(self)
        except OSError as error:
            self._broken.append((peer, error))
        else:
            if peer.line.outbox:
                self.on_blocked(peer.line)

    def read(self, peer: Peer) -> None:
        """Read what has arrived from `peer`."""
        if peer.lost:
            return
        try:
            peer.line.read(self)
        except (OSError, EOFError, FrameError) as error:
            self._broken.append((peer, error))

    def begin(self, line: Line, frame: Frame) -> memoryview | None:
        """Implement `Reader.begin`."""
        raise NotImplementedError

    def end(self, line: Line) -> None:
        """Implement `Reader.end`."""
        raise NotImplementedError

    def sent(self, owner: object) -> None:
        """Implement `Reader.sent`."""
        raise NotImplementedError

    def leave(self, group: Membership) -> None:
        """Give up a group, and lose everything waiting in it, here and elsewhere."""
        if self.rank in group.gone:
            return
        group.gone.add(self.rank)
        for member in group.members:
            if member != self.rank and not self.peers[member].lost:
                self._close(self.peers[member], group)
                self._put(self.peers[member], header(Kind.CLOSE, group.id))
        self._abandon(group, LostPeer("this rank has given the group up"))

    def bye(self) -> None:
        """Tell all peers that this rank is ending properly."""
        for peer in self.peers.values():
            if not peer.lost:
                self._put(peer, header(Kind.BYE, 0))

    def part(self) -> None:
        """Close all lines, and lose everything that is still in progress."""
        for peer in self.peers.values():
            self._bury(peer, LostPeer("this rank has closed it"))

    # ── landing ─────────────────────────────────────────────────────────────────────

    def _put(
        self,
        peer: Peer,
        head: bytes,
        payload: memoryview | None = None,
        owner: Transfer | None = None,
    ) -> None:
        peer.line.put(head, payload, owner)
        if peer not in self._unsent:
            self._unsent.append(peer)

    def _land(self, transfer: Transfer, error: Exception | None) -> None:
        """Finish a transfer that was entered."""
        self.peers[transfer.peer].pending -= 1
        self.pending -= 1
        self._landed(transfer, error)

    def _landed(self, transfer: Transfer, error: Exception | None) -> None:
        transfer.land(error)
        owner = transfer.owner
        if owner is None:
            return
        if error is not None:
            self._end(owner, error)
            return
        owner.remaining -= 1
        if not owner.remaining:
            self._ready.append(owner)

    def _end(self, schedule: Schedule, error: Exception | None) -> None:
        if schedule.done:
            return
        schedule.group.schedules.discard(schedule)
        schedule.land(error)
        if error is None:  # its channels have served; after an error, late frames come
            for peer in self.peers.values():
                peer.channels.pop(schedule.key, None)

    def _is_lost(self, transfer: Transfer) -> bool:
        group, lost = transfer.group, self.peers[transfer.peer].lost
        if lost is None and self.rank in group.gone:
            lost = LostPeer("this rank has given the group up")
        if lost is None and transfer.peer in group.gone:
            lost = LostPeer(f"rank {transfer.peer} has given the group up")
        if lost is not None:
            self._landed(transfer, lost)
        return lost is not None

    # ── leaving and losing ──────────────────────────────────────────────────────────

    def _left_by(self, member: int, group_id: int) -> None:
        group = self._groups.get(group_id)
        if group is None:
            self._closed_early[group_id].add(member)
            return
        group.gone.add(member)
        self._close(self.peers[member], group)
        self._abandon(group, LostPeer(f"rank {member} has given the group up"))

    def _abandon(self, group: Membership, lost: LostPeer) -> None:
        """Fail the group's collectives, and the receives that can no longer end."""
        for schedule in list(group.schedules):
            self._end(schedule, lost)
        if self._nobody_left(group):
            for queue in self._from_anyone.values():
                for transfer in [t for t in queue if t.group is group]:
                    queue.remove(transfer)
                    transfer.land(lost)

    def _nobody_left(self, group: Membership) -> bool:
        gone = group.gone
        return self.rank in gone or all(
            m in gone or self.peers[m].lost for m in group.members if m != self.rank
        )

    def _close(self, peer: Peer, group: Membership) -> None:
        """End a group's channels with one peer.

        If part of a message has already been sent, it can't be taken back, so we then
        give up the whole line.
        """
        lost = LostPeer("the group was given up")
        for channel in peer.channels.values():
            if channel.group is group:
                channel.closed = True
                self._land_all([*channel.unsent, *channel.expecting], lost)
                channel.unsent.clear()
                channel.expecting.clear()
        for parcel in list(peer.line.outbox):
            if isinstance(parcel.owner, Flight) and parcel.owner.group is group:
                if parcel.begun:
                    self._broken.append((peer, lost))
                else:
                    peer.line.outbox.remove(parcel)
                    self._land_all([parcel.owner], lost)
        if peer.arriving is not None and peer.arriving.group is group:
            self._broken.append((peer, lost))

    def _land_all(self, flights: Iterable[Flight], lost: LostPeer) -> None:
        for flight in flights:
            if isinstance(flight, Transfer) and not flight.done:
                self._land(flight, lost)

    def _bury(self, peer: Peer, error: Exception) -> None:
        """Handle the end of a line: keep what arrived before, and lose all else."""
        if peer.lost:
            return
        if isinstance(error, OSError):  # found out by sending
            self.read(peer)
        peer.lost = LostPeer(f"the line to rank {peer.line.peer} ended: {error}")
        self.on_lost(peer.line)
        under_way = [*peer.channels.values()]
        flights: list[Flight] = [
            t for channel in under_way for t in (*channel.unsent, *channel.expecting)
        ]
        flights += [p.owner for p in peer.line.outbox if isinstance(p.owner, Flight)]
        flights += [peer.arriving] if peer.arriving else []
        peer.line.outbox.clear()
        peer.channels.clear()
        self._land_all(flights, peer.lost)
        for group in self._groups.values():
            if peer.line.peer in group.members:
                self._mourn(group, peer)

    def _mourn(self, group: Membership, peer: Peer) -> None:
        """Handle a proper end; that peer has done its part of every collective."""
        assert peer.lost is not None
        if not peer.said_bye or self._nobody_left(group):
            self._abandon(group, peer.lost)
