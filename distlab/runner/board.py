"""Who waits for whom, worked out from the ranks' journals: a hang without a timer.

Every call is written down before it starts. So a rank that sits in a call whose
counterpart nobody has even started cannot go on by itself, and when that is true of
every rank that still runs, the run is deadlocked, however slow the machine:

    rank 0  send → 1 ─┐            channel (0→1): 1 send, 0 receives   unmatched
    rank 1  send → 2  ├─ nobody    channel (1→2): 1 send, 0 receives   unmatched
    rank 2  send → 0 ─┘  receives  channel (2→0): 1 send, 0 receives   unmatched

Messages of one channel (source, destination, tag) match in the order they were
started; the k-th collective of a group matches once all its members started theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from distlab.comm import ANY, COLLECTIVES, Event

Channel = tuple[int, int, int]  # source, destination, tag


@dataclass(frozen=True)
class _Need:
    """What one half of a call needs to complete: the `index`-th act of the others."""

    kind: str  # "send", "recv", "recv_any" or "collective"
    channel: Channel = (0, 0, 0)
    group: str = ""
    index: int = 0


class Board:
    """The state of all ranks of a run, kept up to date event by event."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._sends: Counter[Channel] = Counter()
        self._recvs: Counter[Channel] = Counter()
        self._waiting_any: dict[int, int] = {}  # rank -> tag it takes from anyone
        self._collectives: dict[str, dict[int, list[str]]] = defaultdict(dict)
        self._members: dict[str, list[int]] = {}
        self._needs: dict[tuple[int, int], list[_Need]] = {}
        self._calls: dict[tuple[int, int], Event] = {}
        self._blocked: dict[int, int] = {}  # rank -> number of the call it sits in

    def record(self, rank: int, event: Event) -> None:
        """Take in one journal event of `rank`."""
        kind, key = event["k"], (rank, event["n"])
        if kind in ("enter", "post"):
            self._calls[key] = event
            self._needs[key] = self._start(rank, event)
        if kind in ("enter", "wait") and key in self._calls:
            self._blocked[rank] = event["n"]
        if kind in ("exit", "error"):
            self._end(rank, event)

    def blocked_in(self, rank: int) -> Event | None:
        """The call that `rank` has entered and not left."""
        number = self._blocked.get(rank)
        return None if number is None else self._calls[rank, number]

    def stuck(self, alive: Iterable[int]) -> dict[int, tuple[int, ...]] | None:
        """For each rank of `alive` whom it waits for, if none of them can go on.

        None as long as any rank runs or has a call whose counterpart has started.
        """
        waits_for: dict[int, tuple[int, ...]] = {}
        for rank in alive:
            if rank not in self._blocked:
                return None
            unmet = [
                need
                for need in self._needs[rank, self._blocked[rank]]
                if not self._is_met(need)
            ]
            if not unmet:
                return None
            peers = {peer for need in unmet for peer in self._awaited(rank, need)}
            waits_for[rank] = tuple(sorted(peers))
        return waits_for or None

    def _start(self, rank: int, event: Event) -> list[_Need]:
        op = event["op"]
        if op in COLLECTIVES:
            return [self._start_collective(rank, event)]
        needs = []
        if op in ("send", "isend", "sendrecv"):
            channel = (rank, event["dst"], event["tag"])
            needs.append(_Need("send", channel, index=self._sends[channel]))
            self._sends[channel] += 1
        if op in ("recv", "irecv", "sendrecv"):
            needs.append(self._start_recv(rank, event))
        return needs

    def _start_recv(self, rank: int, event: Event) -> _Need:
        if event["src"] == ANY:
            self._waiting_any[rank] = event["tag"]
            return _Need("recv_any", (ANY, rank, event["tag"]))
        channel = (event["src"], rank, event["tag"])
        self._recvs[channel] += 1
        return _Need("recv", channel, index=self._recvs[channel] - 1)

    def _start_collective(self, rank: int, event: Event) -> _Need:
        group = event["group"]
        self._members[group] = event["members"]
        calls = self._collectives[group].setdefault(rank, [])
        calls.append(event["op"])
        return _Need("collective", group=group, index=len(calls) - 1)

    def _end(self, rank: int, event: Event) -> None:
        if self._blocked.get(rank) == event["n"]:
            del self._blocked[rank]
        call = self._calls.get((rank, event["n"]))
        if call and call["op"] == "recv" and call["src"] == ANY:
            self._waiting_any.pop(rank, None)
            if "src" in event:
                self._recvs[event["src"], rank, call["tag"]] += 1

    def _is_met(self, need: _Need) -> bool:
        if need.kind == "send":
            taken_by_anyone = self._waiting_any.get(need.channel[1])
            return (
                self._recvs[need.channel] > need.index
                or taken_by_anyone == need.channel[2]
            )
        if need.kind == "recv":
            return self._sends[need.channel] > need.index
        if need.kind == "recv_any":
            _, dst, tag = need.channel
            return any(
                count > self._recvs[channel]
                for channel, count in self._sends.items()
                if channel[1:] == (dst, tag)
            )
        calls = [self._collective(need, member) for member in self._members[need.group]]
        return None not in calls and len(set(calls)) == 1

    def _awaited(self, rank: int, need: _Need) -> list[int]:
        if need.kind == "send":
            return [need.channel[1]]
        if need.kind == "recv":
            return [need.channel[0]]
        if need.kind == "recv_any":
            return [r for r in range(self._world_size) if r != rank]
        mine = self._collective(need, rank)
        return [
            m for m in self._members[need.group] if self._collective(need, m) != mine
        ]

    def _collective(self, need: _Need, member: int) -> str | None:
        calls = self._collectives[need.group].get(member, [])
        return calls[need.index] if need.index < len(calls) else None


def find_cycle(waits_for: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """A circle of ranks each waiting for the next, smallest rank first; or ()."""
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in path and waits_for[rank]:
            path.append(rank)
            rank = waits_for[rank][0]
        if rank in path:
            circle = path[path.index(rank) :]
            least = circle.index(min(circle))
            return tuple(circle[least:] + circle[:least])
    return ()
