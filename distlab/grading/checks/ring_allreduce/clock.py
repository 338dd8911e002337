"""Plans of all ranks of a ring, played by a clock: the sums, and how long they take.

A message starts when its isend and the irecv that it meets have both been called, and
the one before it has arrived. This knows nothing of the unit under judgement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Entry = tuple[str, int, int | None]
"""("irecv", "isend", "wait" or "add", segment, receive buffer or None)."""
Plans = list[list[Entry]]
"""By rank."""
Counts = tuple[int, ...]
"""How often each rank's values are in a segment."""
SENT = "isend"
RECEIVED = "irecv"


def named(entry: Entry) -> str:
    """`irecv 5 in buffer 0`, `isend 5`."""
    kind, segment, buffer = entry
    return f"{kind} {segment}" + (f" in buffer {buffer}" if buffer is not None else "")


# ── one rank's plan: what is in flight ──────────────────────────────────────────────


class Misuse(NamedTuple):
    """The operation's number in the plan, what it does, and the mistake's name."""

    number: int
    what: str
    slug: str


def misuses(plan: list[Entry]) -> Iterator[Misuse]:
    """Every operation on a buffer that is in flight; waits for nothing; no wait."""
    flying: dict[tuple[int | None, int | None], tuple[int, Entry]] = {}
    for index, entry in enumerate(plan):
        kind, segment, _ = entry
        here = _where(entry)
        what = f"operation {index}, `{named(entry)}`,"
        if kind == "wait":
            started = flying.pop(here, None)
            if not started or started[1][1] != segment:
                what = f"{what} waits for no message, expected one in flight"
                yield Misuse(index, what, "")
            continue
        used = {here, (segment, None)} if kind == "add" else {here}
        for place in used & set(flying):
            during = named(flying[place][1])
            early = f"{what} comes before the wait for `{during}`"
            early += ", expected the wait first"
            yield Misuse(index, early, "touched-in-flight")
        if kind != "add":
            flying[here] = index, entry
    for index, entry in flying.values():
        what = f"no wait follows operation {index}, `{named(entry)}`, expected one"
        yield Misuse(index, what, "never-waited")


def _where(entry: Entry) -> tuple[int | None, int | None]:
    _, segment, buffer = entry
    return (segment, None) if buffer is None else (None, buffer)


def adds_without(kind_in_flight: str, plan: list[Entry]) -> int:
    """How many additions have no irecv, or no isend, in flight meanwhile."""
    flying: set[tuple[int | None, int | None]] = set()
    count = 0
    for entry in plan:
        kind, here = entry[0], _where(entry)
        if kind == "add":
            count += not flying
        elif kind == kind_in_flight:
            flying.add(here)
        elif kind == "wait":
            flying.discard(here)
    return count


# ── all ranks' plans: what comes of them ────────────────────────────────────────────


@dataclass
class Link:
    """The messages from a rank to its right neighbor, and when each has arrived."""

    sent: list[tuple[int, Counts, float]] = field(default_factory=list)
    received: list[tuple[int, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def end(self, number: int, wire_s: float) -> float | None:
        """When message `number` has arrived; None if isend or irecv is missing."""
        both = min(len(self.sent), len(self.received))
        for k in range(len(self.ends), both):
            before = self.ends[-1] if self.ends else 0.0
            start = max(self.sent[k][2], self.received[k][1], before)
            self.ends.append(start + wire_s)
        return self.ends[number] if number < both else None


class Played:
    """What each rank holds after all plans, and when the last of them ends."""

    def __init__(
        self, plans: Plans, num_segments: int, wire_s: float = 0.0, add_s: float = 0.0
    ) -> None:
        n = len(plans)
        self._wire_s, self._add_s = wire_s, add_s
        self._plans, self.places = plans, [0] * n
        self._clocks = [0.0] * n
        zero: Counts = (0,) * n
        own = [tuple(int(r == rank) for r in range(n)) for rank in range(n)]
        self._held: list[dict[tuple[int | None, int | None], Counts]] = [
            {(s, None): own[rank] for s in range(num_segments)}
            | {(None, buffer): zero for buffer in range(2)}
            for rank in range(n)
        ]
        self._flying: list[dict[tuple[int | None, int | None], tuple[Entry, int]]]
        self._flying = [{} for _ in plans]
        self.links = [Link() for _ in plans]
        self.adds: list[list[float]] = [[] for _ in plans]
        """By rank, when each addition began."""
        self.crossed: tuple[int, int, int, int] | None = None
        """Sender, number of the message, segment that was sent, one that it is for."""
        while any(self._step(rank) for rank in range(n)):
            pass

    @property
    def time_s(self) -> float:
        """When the last rank is done."""
        return max(self._clocks)

    def stuck(self) -> list[tuple[int, Entry, str]]:
        """Ranks that wait forever: the wait, and isend or irecv."""
        found = []
        for rank, plan in enumerate(self._plans):
            if self.places[rank] < len(plan):
                entry = plan[self.places[rank]]
                found.append((rank, entry, self._flying[rank][_where(entry)][0][0]))
        return found

    def segments(self, rank: int) -> list[Counts]:
        """What each segment of a rank holds."""
        held = self._held[rank]
        return [counts for (s, _), counts in held.items() if s is not None]

    def idle_adds(self, rank: int) -> tuple[int, int]:
        """During how many additions no message moves to the rank, and none from it."""
        to, out = self.links[rank - 1], self.links[rank]
        return self._idle(rank, to), self._idle(rank, out)

    def _idle(self, rank: int, link: Link) -> int:
        link.end(len(link.sent) - 1, self._wire_s)
        return sum(
            not any(
                end - self._wire_s < began + self._add_s and began < end
                for end in link.ends
            )
            for began in self.adds[rank]
        )

    def _step(self, rank: int) -> bool:
        """Go on as far as this rank comes; whether it came any further."""
        began = self.places[rank]
        plan = self._plans[rank]
        while self.places[rank] < len(plan) and self._do(rank, plan[self.places[rank]]):
            self.places[rank] += 1
        return self.places[rank] > began

    def _do(self, rank: int, entry: Entry) -> bool:
        kind, segment, _ = entry
        held, here = self._held[rank], _where(entry)
        right, left = self.links[rank], self.links[rank - 1]
        if kind == SENT:
            self._flying[rank][here] = entry, len(right.sent)
            right.sent.append((segment, held[here], self._clocks[rank]))
        elif kind == RECEIVED:
            self._flying[rank][here] = entry, len(left.received)
            left.received.append((segment, self._clocks[rank]))
        elif kind == "add":
            pairs = zip(held[segment, None], held[here], strict=True)
            held[segment, None] = tuple(mine + other for mine, other in pairs)
            self.adds[rank].append(self._clocks[rank])
            self._clocks[rank] += self._add_s
        elif here in self._flying[rank]:
            return self._wait(rank, here)
        return True

    def _wait(self, rank: int, here: tuple[int | None, int | None]) -> bool:
        entry, number = self._flying[rank][here]
        is_send = entry[0] == SENT
        link = self.links[rank] if is_send else self.links[rank - 1]
        end = link.end(number, self._wire_s)
        if end is None:
            return False
        del self._flying[rank][here]
        self._clocks[rank] = max(self._clocks[rank], end)
        if not is_send:
            segment, counts, _ = link.sent[number]
            self._held[rank][here] = counts
            if segment != entry[1] and not self.crossed:
                sender = (rank - 1) % len(self._plans)
                self.crossed = sender, number, segment, entry[1]
        return True
