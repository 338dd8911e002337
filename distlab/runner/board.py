"""Who waits for whom, by the ranks' journals: a deadlock proved without a timeout.

Every call is written down before it starts. So a rank that sits in a call whose
counterpart nobody has even started cannot go on by itself, and when that is true of
every rank that still runs, the run is deadlocked, however slow the machine:

    rank 0  send → 1 ─┐            channel (0→1): 1 send, 0 receives   unmatched
    rank 1  send → 2  ├─ nobody    channel (1→2): 1 send, 0 receives   unmatched
    rank 2  send → 0 ─┘  receives  channel (2→0): 1 send, 0 receives   unmatched

Messages of one channel (group, source, destination, tag) match in the order they were
started; the k-th collective of a group matches once all its members started theirs.
A call to a service that said "not yet" is answered after another message to it only:
if every rank waits, there is none.
Whatever is not certain (a call that failed, one that will give up by itself, a thread
that is elsewhere) counts as able to go on. One thing the journals cannot show: on some
transports a broadcast is done on some ranks before all have joined, or a call without
data needs nobody. The supervisor therefore also asks whether the ranks sleep.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from distlab.comm import ANY, Event
from distlab.runner.asking import ASKS

Channel = tuple[str, int, int, int]  # group, source, destination, tag
Act = tuple[str, int | None, object]  # which collective, its root, what it moves
_MESSAGES = frozenset({"send", "isend", "recv", "irecv", "sendrecv"})


@dataclass(frozen=True)
class _Need:
    """What one half of a call needs to complete: the `index`-th act of the others."""

    kind: str  # "send", "recv", "recv_any" or "collective"
    channel: Channel = ("", 0, 0, 0)
    group: str = ""
    index: int = 0


@dataclass(frozen=True)
class _Seat:
    """Where one thread of a rank waits: in which call, and whether for good."""

    number: int
    gives_up: bool


class Board:
    """The state of all ranks of a run, kept up to date event by event.

    `limit_s` is how long the run may take: a call that gives up later than that is
    taken to wait for good.
    """

    def __init__(self, world_size: int, limit_s: float = float("inf")) -> None:
        self._limit_s = limit_s
        self._sends: Counter[Channel] = Counter()
        self._recvs: Counter[Channel] = Counter()
        # Calls that failed may or may not have taken part in the matching.
        self._failed_sends: Counter[Channel] = Counter()
        self._failed_recvs: Counter[Channel] = Counter()
        self._failed_groups: set[str] = set()
        self._waiting_any: Counter[Channel] = Counter()  # with ANY as the source
        self._collectives: dict[str, dict[int, list[Act]]] = defaultdict(dict)
        self._members: dict[str, list[int]] = {"world": list(range(world_size))}
        self._needs: dict[tuple[int, int], list[_Need]] = {}
        self._calls: dict[tuple[int, int], Event] = {}
        self._blocked: dict[int, dict[int, _Seat]] = defaultdict(dict)  # by thread
        self._num_threads: dict[int, int] = {}
        self._asking: dict[int, dict[int, Event]] = defaultdict(dict)  # by thread

    def record(self, rank: int, event: Event) -> None:
        """Take in one journal event of `rank`."""
        kind, key = event["k"], (rank, event["n"])
        if kind in ("enter", "post"):
            self._calls[key] = event
            self._needs[key] = self._start(rank, event)
        if kind in ("enter", "wait") and key in self._calls:
            self._sit_down(rank, event)
        if kind in ("exit", "error"):
            self._end(rank, event)

    def ask(self, rank: int, event: Event) -> None:
        """A service has told `rank` "not yet" (asks), or that call is over."""
        seats = self._asking[rank]
        for thread in [t for t, call in seats.items() if call["n"] == event["n"]]:
            del seats[thread]
        if event["k"] == ASKS:
            seats[event["thread"]] = event
            self._num_threads[rank] = event["threads"]

    def asking(self, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Which calls to services wait now, as (rank, number): the same ones later?"""
        return [(r, call["n"]) for r in ranks for call in self._asking[r].values()]

    def forget(self, rank: int) -> None:
        """This rank's process has ended, and another one takes its place."""
        self._blocked.pop(rank, None)
        self._asking.pop(rank, None)

    def blocked_in(self, rank: int) -> Event | None:
        """The call that `rank` has entered and not left (the first, if several)."""
        for seat in self._blocked[rank].values():
            return self._calls[rank, seat.number]
        return next(iter(self._asking[rank].values()), None)

    def stuck(self, alive: Iterable[int]) -> dict[int, tuple[int, ...]] | None:
        """For each rank of `alive` whom it waits for, if none of them can go on.

        None as long as any rank runs or has a call whose counterpart has started.
        """
        waits_for: dict[int, tuple[int, ...]] = {}
        for rank in alive:
            seats, asking = self._blocked[rank].values(), self._asking[rank].values()
            num_seats = len(seats) + len(asking)
            if not num_seats or num_seats < self._num_threads[rank]:
                return None
            if any(call["timeout_s"] < self._limit_s for call in asking):
                return None
            peers: set[int] = set()
            for seat in seats:
                needs = self._needs[rank, seat.number]
                unmet = [need for need in needs if not self._is_met(need)]
                if seat.gives_up or not unmet:
                    return None
                peers.update(p for need in unmet for p in self._awaited(rank, need))
            waits_for[rank] = tuple(sorted(peers))
        return waits_for or None

    def _sit_down(self, rank: int, event: Event) -> None:
        timeout_s = event.get("timeout_s")
        gives_up = timeout_s is not None and timeout_s < self._limit_s
        self._blocked[rank][event.get("thread", 0)] = _Seat(event["n"], gives_up)
        self._num_threads[rank] = event.get("threads", 1)

    def _start(self, rank: int, event: Event) -> list[_Need]:
        op, group = event["op"], event["group"]
        self._members[group] = event["members"]
        if op not in _MESSAGES:
            return [self._start_collective(rank, event)]
        needs = []
        if op in ("send", "isend", "sendrecv"):
            channel = (group, rank, event["dst"], event["tag"])
            needs.append(_Need("send", channel, index=self._sends[channel]))
            self._sends[channel] += 1
        if op in ("recv", "irecv", "sendrecv"):
            needs.append(self._start_recv(rank, event))
        return needs

    def _start_recv(self, rank: int, event: Event) -> _Need:
        channel = (event["group"], event["src"], rank, event["tag"])
        if event["src"] == ANY:
            self._waiting_any[channel] += 1
            return _Need("recv_any", channel)
        self._recvs[channel] += 1
        return _Need("recv", channel, index=self._recvs[channel] - 1)

    def _start_collective(self, rank: int, event: Event) -> _Need:
        group = event["group"]
        calls = self._collectives[group].setdefault(rank, [])
        # Of tensors that do not fit, a transport may still deliver something: then the
        # ranks go on, and are not found stuck here.
        calls.append((event["op"], event["root"], _moved(event)))
        return _Need("collective", group=group, index=len(calls) - 1)

    def _end(self, rank: int, event: Event) -> None:
        number = event["n"]
        for thread, seat in list(self._blocked[rank].items()):
            if seat.number == number:
                del self._blocked[rank][thread]
        call = self._calls.pop((rank, number), None)
        for need in self._needs.pop((rank, number), []):
            if need.kind == "recv_any":
                self._waiting_any[need.channel] -= 1
            if event["k"] == "error":
                self._take_back(rank, need, was_refused=event["refused"])
        if call and call["src"] == ANY and "src" in event:
            self._recvs[call["group"], event["src"], rank, call["tag"]] += 1

    def _take_back(self, rank: int, need: _Need, *, was_refused: bool) -> None:
        """Forget a call that was refused; remember one that failed as uncertain."""
        if need.kind == "send":
            self._sends[need.channel] -= was_refused
            self._failed_sends[need.channel] += not was_refused
        elif need.kind == "recv":
            self._recvs[need.channel] -= was_refused
            self._failed_recvs[need.channel] += not was_refused
        elif need.kind == "collective" and was_refused:
            self._collectives[need.group][rank].pop()
        elif need.kind == "collective":
            self._failed_groups.add(need.group)

    def _is_met(self, need: _Need) -> bool:
        channel = need.channel
        group, _, dst, tag = channel
        if need.kind == "send":
            index = need.index - self._failed_sends[channel]
            by_anyone = self._waiting_any[group, ANY, dst, tag] > 0
            return by_anyone or self._recvs[channel] > index
        if need.kind == "recv":
            return self._sends[channel] > need.index - self._failed_recvs[channel]
        if need.kind == "recv_any":
            return any(
                self._sends[group, src, dst, tag]
                > self._recvs[group, src, dst, tag]
                - self._failed_recvs[group, src, dst, tag]
                for src in self._members[group]
            )
        acts = {self._collective(need, member) for member in self._members[need.group]}
        return need.group in self._failed_groups or (None not in acts and len(acts) < 2)

    def _awaited(self, rank: int, need: _Need) -> list[int]:
        if need.kind == "send":
            return [need.channel[2]]
        if need.kind == "recv":
            return [need.channel[1]]
        if need.kind == "recv_any":
            return [r for r in self._members[need.channel[0]] if r != rank]
        mine = self._collective(need, rank)
        return [
            m for m in self._members[need.group] if self._collective(need, m) != mine
        ]

    def _collective(self, need: _Need, member: int) -> Act | None:
        calls = self._collectives[need.group].get(member, [])
        return calls[need.index] if need.index < len(calls) else None


def _moved(event: Event) -> object:
    """What must be the same on all ranks of a collective, as far as it is known."""
    shape, dtype = event.get("shape"), event.get("dtype")
    return None if shape is None else (math.prod(shape), dtype)


def find_cycle(waits_for: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """A circle of ranks each waiting for the next, smallest rank first; or ()."""
    for start in sorted(waits_for):
        # Breadth first: the shortest way back to `start`.
        paths: list[tuple[int, ...]] = [(start,)]
        seen = {start}
        while paths:
            path = paths.pop(0)
            for peer in waits_for.get(path[-1], ()):
                if peer == start:
                    least = path.index(min(path))
                    return path[least:] + path[:least]
                if peer not in seen:
                    seen.add(peer)
                    paths.append((*path, peer))
    return ()
