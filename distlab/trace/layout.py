"""Where the calls of a run stand in a picture: in logical time, from its journals.

Real times would make a poor picture of a hang: a thousandth of a second of messages,
then a long wait. So the calls are played again, and each takes one slot: a message
happens in the first slot in which both its ends have begun.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distlab.runner.pairs import pairs

if TYPE_CHECKING:
    from distlab.comm import Event
    from distlab.runner import RankRecord, Run

State = Literal["done", "waiting", "failed", "posted"]
Key = tuple[int, int]
"""A call: its rank, and its number on that rank."""

MAX_EVENTS = 4_000  # of all ranks: a picture of more is no picture
POST = 0.3  # slots that a call takes which returns at once
_SENDS = ("send", "isend", "sendrecv")
_RECEIVES = ("recv", "irecv", "sendrecv")
_ALONE = ("new_group",)  # made by every rank, waits for none


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A call on its rank's lane, from slot `start` to `end`."""

    rank: int
    start: float
    end: float
    state: State
    call: Event


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """A message that arrived: it leaves `src` in slot `start`."""

    src: int
    dst: int
    start: float
    call: Event


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All calls and messages; `length` in slots; `left_out` calls came earlier.

    `waits` are the waits for posted calls: each from where its rank began to wait.
    """

    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...]
    length: float
    left_out: int = 0
    waits: tuple[Bar, ...] = ()


def schedule(run: Run) -> Schedule:
    """Lay the calls of `run` out in logical time."""
    replay = _Replay(run)
    replay.play()
    bars = replay.bars()
    length = max([bar.end for bar in bars], default=1.0)
    bars = [_to_the_edge(bar, length + 1) for bar in bars]
    return Schedule(
        bars=tuple(bars),
        arrows=tuple(replay.arrows()),
        length=length + any(bar.state == "waiting" for bar in bars),
        left_out=replay.left_out,
        waits=tuple(_to_the_edge(bar, length + 1) for bar in replay.waits()),
    )


def _to_the_edge(bar: Bar, edge: float) -> Bar:
    if bar.state != "waiting":
        return bar
    return Bar(rank=bar.rank, start=bar.start, end=edge, state="waiting", call=bar.call)


class _Replay:
    """Plays the journals of all ranks against each other."""

    def __init__(self, run: Run) -> None:
        share = max(1, MAX_EVENTS // run.world_size)
        self.left_out = 0
        self._events: dict[int, list[Event]] = {}
        for record in run.ranks:
            kept = record.journal[-share:]
            self.left_out += len(record.calls())
            self._events[record.rank] = kept
        self._calls: dict[Key, Event] = {}
        self._ended: dict[Key, Event] = {}
        for rank, events in self._events.items():
            for event in events:
                key = (rank, event["n"])
                if event["k"] in ("enter", "post"):
                    self._calls[key] = event
                elif event["k"] in ("exit", "error"):
                    self._ended[key] = event
        self.left_out -= len(self._calls)
        self._messages = self._matched(run.ranks)
        self._partners = self._find_partners()
        self._queues = {
            rank: deque(e for e in events if self._is_step(rank, e))
            for rank, events in self._events.items()
        }
        self._clock = dict.fromkeys(self._events, 0.0)
        self._start: dict[Key, float] = {}
        self._end: dict[Key, float] = {}
        self._waited: dict[Key, tuple[float, float | None]] = {}

    def _is_step(self, rank: int, event: Event) -> bool:
        return event["k"] in ("enter", "post", "wait") and (
            (rank, event["n"]) in self._calls
        )

    # ── who belongs together ────────────────────────────────────────────────────────

    def _matched(self, records: tuple[RankRecord, ...]) -> list[tuple[Key, Key]]:
        """Sends and receives that met, if both are among what was kept."""
        met = (
            ((pair.src, pair.sent["n"]), (pair.dst, pair.received["n"]))
            for pair in pairs(records)
        )
        return [both for both in met if all(key in self._calls for key in both)]

    def _find_partners(self) -> dict[Key, set[Key]]:
        partners: dict[Key, set[Key]] = defaultdict(set)
        for sent, received in self._messages:
            partners[sent].add(received)
            partners[received].add(sent)
        counts: dict[tuple[int, str], int] = defaultdict(int)
        meetings: dict[tuple[str, int], list[Key]] = defaultdict(list)
        for (rank, number), call in self._calls.items():
            if call["op"] not in (*_SENDS, *_RECEIVES, *_ALONE):
                group = call["group"]
                meetings[group, counts[rank, group]].append((rank, number))
                counts[rank, group] += 1
        for met in meetings.values():
            whole = len(met) == len(self._calls[met[0]]["members"])
            for key in met if whole else ():
                partners[key] |= {*met} - {key}
        return partners

    # ── playing ─────────────────────────────────────────────────────────────────────

    def play(self) -> None:
        """Go on until no rank can, or all are done."""
        going = True
        while going:
            going = False
            for rank in self._queues:
                while self._step(rank):
                    going = True
            going = going or self._believe_the_journal()

    def _step(self, rank: int) -> bool:
        queue = self._queues[rank]
        if not queue:
            return False
        event = queue[0]
        key = (rank, event["n"])
        if event["k"] != "wait" and key not in self._start:
            self._start[key] = self._clock[rank]
            if event["k"] == "post":
                self._clock[rank] += POST
                queue.popleft()
            return True
        end = self._when_done(key)
        if event["k"] == "wait":
            self._waited[key] = self._clock[rank], end
        if end is None:
            return False
        self._end[key] = end
        self._clock[rank] = max(self._clock[rank], end)
        queue.popleft()
        return True

    def _when_done(self, key: Key) -> float | None:
        if key in self._end:
            return self._end[key]
        call, ended = self._calls[key], self._ended.get(key, {})
        both = (key, *self._partners[key])
        starts = [self._start[k] for k in both if k in self._start]
        if ended.get("k") == "error" or (call["op"] in _ALONE and key in self._start):
            return self._start[key] + 1
        alone = len(both) == 1 and call["members"] != [key[0]]
        return None if alone or len(starts) < len(both) else max(starts) + 1

    def _believe_the_journal(self) -> bool:
        """End one call whose partner never came: the journal says that it ended."""
        stuck = [
            (self._ended[rank, queue[0]["n"]].get("t", 0), rank)
            for rank, queue in self._queues.items()
            if queue and (rank, queue[0]["n"]) in self._ended
        ]
        if not stuck:
            return False
        _, rank = min(stuck)
        self._end[rank, self._queues[rank][0]["n"]] = self._clock[rank] + 1
        return True

    # ── what is drawn ───────────────────────────────────────────────────────────────

    def bars(self) -> list[Bar]:
        """Every call that began; those that wait end where they began."""
        found = []
        for key, start in self._start.items():
            end = self._end.get(key, self._when_done(key))
            found.append(
                Bar(
                    rank=key[0],
                    start=start,
                    end=start if end is None else end,
                    state=self._state(key),
                    call=self._calls[key],
                )
            )
        return found

    def waits(self) -> list[Bar]:
        """Every wait for a posted call."""
        return [
            Bar(
                rank=key[0],
                start=start,
                end=start if end is None else max(start, end),
                state="done" if key in self._ended else "waiting",
                call=self._calls[key],
            )
            for key, (start, end) in self._waited.items()
        ]

    def _state(self, key: Key) -> State:
        if self._ended.get(key, {}).get("k") == "error":
            return "failed"
        if self._calls[key]["k"] == "post" and key in self._ended:
            return "posted"
        return "done" if key in self._ended else "waiting"

    def arrows(self) -> list[Arrow]:
        """Every message that has both its ends, in the slot in which it travels."""
        return [
            Arrow(
                src=sent[0],
                dst=received[0],
                start=max(self._start[sent], self._start[received]),
                call=self._calls[sent],
            )
            for sent, received in self._messages
            if sent in self._start and received in self._start
        ]
