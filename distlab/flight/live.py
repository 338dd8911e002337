"""Judge a running job by what its ranks have posted: is it a hang, and which one?

    posts ──▶ Board.stuck     no rank that is alive can go on: this is the proof
          ──▶ find_hang       what they disagree about: this is the sentence

A post is true of the moment at which its rank stood still, and the counts in it only
ever grow. So one reading of all posts is enough, although they were written at
different times: if a rank had moved on since, then a counterpart of its call would have
been started before, by a rank whose post lists it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from distlab.comm import Event
from distlab.flight.hang import (
    Hang,
    by_number,
    disagreement,
    find_hang,
    groups_of,
    have_met_apart,
    size_of,
)
from distlab.flight.records import Call, Dump, Group, Records, Sizes, dump_of
from distlab.runner.asking import ASKS
from distlab.runner.board import Board

Post = Mapping[str, Any]
"""What `distlab.recorder.recorder` writes."""

_STORE = "store"
_COMPARED = ("collective", "backward")  # calls that a rank may hold back
_UNKNOWN = "?"  # a call before the first that is on record


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on a job, with the posts that it rests on."""

    status: Literal["deadlock", "mismatch"]
    hang: Hang
    records: Records
    posts: Mapping[int, Post]

    @property
    def ranks(self) -> list[int]:
        """The ranks that the sentence names."""
        return sorted({*self.hang.calls, *self.hang.absent})


@dataclass(frozen=True)
class Quiet:
    """No rank has made a call for this long; nothing is proved."""

    seconds: float
    posts: Mapping[int, Post]
    world_size: int


def find(
    posts: Mapping[int, Post], world_size: int, *, is_late: bool = False
) -> Finding | None:
    """Return the hang if the posts prove one.

    A rank that holds back a call because others have called something else is proof
    enough. The sentence is better once all ranks stand still, so we wait for that until
    `is_late`.
    """
    if any(post["state"] == "failed" for post in posts.values()):
        return None  # the launcher tells, and the job ends
    alive = [rank for rank in range(world_size) if _state(posts, rank) != "ended"]
    are_still = all(_state(posts, rank) == "still" for rank in alive)
    held_back = [post for post in posts.values() if holds_back(post)]
    if held_back and (are_still or is_late):
        return _at_the_call(posts, held_back[0], world_size)
    if held_back or not alive or not (are_still or _are_lost(posts, alive)):
        return None
    records = records_of(posts, world_size)
    is_proved = are_still and _Proof(posts, records).holds(alive)
    hang = find_hang(records)
    # Torch numbers the groups, so unlike groups share a name, and what their ranks say
    # to each other is lost: they wait in calls that all members have made.
    if not (is_proved or have_met_apart(records, hang) or _is_failure(posts, hang)):
        return None
    return Finding(
        status="mismatch" if hang.kind == "mismatch" else "deadlock",
        hang=hang,
        records=records,
        posts=posts,
    )


def _are_lost(posts: Mapping[int, Post], alive: list[int]) -> bool:
    """Return True if each rank has failed in a call, or has destroyed its groups."""
    return all(
        rank in posts and (posts[rank]["has_left"] or _has_failed(posts[rank]))
        for rank in alive
    )


def _has_failed(post: Post) -> bool:
    """Return True if the rank is about to end with an error from its call."""
    return post["state"] == "still" and any(act["failed"] for act in _acts(post))


def _is_failure(posts: Mapping[int, Post], hang: Hang) -> bool:
    """Return True if a rank has left before a call that failed on the others."""
    return hang.kind == "absent" and all(
        _has_failed(posts[rank]) for rank in hang.calls if rank in posts
    )


def records_of(posts: Mapping[int, Post], world_size: int) -> Records:
    """Return the posts of ranks that stand still or have ended, as dumps."""
    groups: dict[str, Any] = {}  # a rank that has destroyed one forgets its members
    for post in posts.values():
        groups |= post["dump"]["pg_config"] if "dump" in post else {}
    dumps = {
        rank: _dump(post, groups) for rank, post in posts.items() if "dump" in post
    }
    names = {key: name for dump in dumps.values() for key, name in dump.names.items()}
    return Records(
        dict(sorted(dumps.items())),
        world_size,
        names,
        titles={
            _STORE: "the store",
            **{
                act["group"]: act["op"].partition("(")[0]
                for post in posts.values()
                for act in _meetings(post)
            },
        },
        ended=frozenset(r for r, p in posts.items() if p["state"] == "ended"),
        waits={r: c for r in dumps if (c := _waits_in(posts[r], dumps[r])) is not None},
        is_live=True,
    )


def _state(posts: Mapping[int, Post], rank: int) -> str:
    return str(posts[rank]["state"]) if rank in posts else ""


def _acts(post: Post) -> list[dict[str, Any]]:
    """The calls in which the rank's threads wait."""
    return [t["act"] for t in post["threads"] if t["act"] is not None]


def _meetings(post: Post) -> list[dict[str, Any]]:
    return list(post.get("meetings", ()))


def holds_back(post: Post) -> bool:
    """Return True if the rank has a call that it hasn't started."""
    return post["state"] == "still" and any(act["others"] for act in _acts(post))


# ── posts as dumps ──────────────────────────────────────────────────────────────────


def _dump(post: Post, groups: Mapping[str, Any]) -> Dump:
    rank = int(post["rank"])
    value = {**post["dump"], "pg_config": {**groups, **post["dump"]["pg_config"]}}
    dump = dump_of(Path(f"rank_{rank}"), rank, value)
    calls = list(dump.calls)
    calls += [_of_act(rank, act) for act in _meetings(post)]
    for log in (*post["sends"], *post["recvs"]):
        calls += [_of_act(rank, act) for act in log["newest"]]
    for act in _acts(post):
        if act["kind"] in _COMPARED and not act["number"]:  # not started yet
            calls.append(_of_act(rank, act, _last(dump, act["group"]) + 1))
        elif act["kind"] == _STORE:
            calls.append(_of_act(rank, act))
    inside = [t["place"] for t in post["threads"] if _is_inside_torch(t) and t["place"]]
    if inside:  # backward(), for example: torch has started these calls by itself
        where = (inside[0][0], inside[0][1])
        calls = [
            replace(call, place=where) if not (call.done or call.place) else call
            for call in calls
        ]
    return replace(dump, calls=tuple(calls), whole=True)


def _waits_in(post: Post, dump: Dump) -> Call | None:
    """The call of the rank's main thread; None if it is none of those on record."""
    act = next((t["act"] for t in post["threads"] if t["main"]), None)
    if act is None or act["kind"] == "unfinished" or post["state"] != "still":
        return None
    mine = _of_act(int(post["rank"]), act)
    if not mine.number and act["kind"] in _COMPARED:
        mine = replace(mine, number=_last(dump, act["group"]))
    same = (mine.group, mine.number, mine.op, mine.src, mine.dst, mine.tag)
    for call in dump.calls:
        if (call.group, call.number, call.op, call.src, call.dst, call.tag) == same:
            return replace(call, place=call.place or mine.place)
    return None


def _is_inside_torch(thread: Mapping[str, Any]) -> bool:
    return thread["act"] is not None and thread["act"]["kind"] == "unfinished"


def _last(dump: Dump, group: str) -> int:
    """The number of the last collective of a group."""
    return max(
        (c.number for c in dump.calls if c.group[0] == group and c.src is None),
        default=0,
    )


def _of_act(rank: int, act: Mapping[str, Any], number: int | None = None) -> Call:
    kind, group = act["kind"], (act["group"], tuple(act["members"]))
    op, src, dst, tag = act["op"], None, None, 0
    if kind == _STORE:
        op, group = f'{act["op"]}("{act["group"]}")', (_STORE, (rank,))
    if act["channel"]:
        _, src, dst, tag = act["channel"]
    place = act["place"]
    return Call(
        rank=rank,
        group=group,
        number=act["number"] if number is None else number,
        op=op,
        src=src,
        dst=dst,
        inputs=_sizes(act["inputs"]),
        outputs=_sizes(act["outputs"]),
        dtype=act["dtype"],
        done=bool(act["done"]),
        created_ns=act["created_ns"],
        place=(place[0], place[1]) if place else None,
        tag=tag,
        root=act["root"],
        reduce_op=act["reduce_op"] or None,
        takes=tuple(act["takes"]),
        gives=tuple(act["gives"]),
    )


def _sizes(value: Any) -> Sizes:
    return tuple(tuple(map(int, size)) for size in value)


# ── the proof ───────────────────────────────────────────────────────────────────────


class _Proof:
    """Feeds a Board with the posts, as if they were journals."""

    def __init__(self, posts: Mapping[int, Post], records: Records) -> None:
        self._posts, self._records = posts, records
        self._board = Board(records.world_size)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._num_events: dict[int, int] = defaultdict(int)

    def holds(self, alive: list[int]) -> bool:
        """Return True if none of these ranks can go on."""
        for group in groups_of(self._records):
            self._feed_collectives(group)
        self._feed_messages()
        return all(map(self._seat, alive)) and bool(self._board.stuck(alive))

    def _record(self, rank: int, key: tuple[Any, ...], **facts: Any) -> None:
        self._num_events[rank] += 1
        number = self._numbers[rank, *key] = self._num_events[rank]
        absent = dict.fromkeys(("root", "src", "dst", "shape", "dtype"))
        event: Event = {"k": "post", "n": number, "tag": 0, **absent, **facts}
        self._board.record(rank, event)

    def _feed_collectives(self, group: Group) -> None:
        members, numbers = self._records.members(group), by_number(self._records, group)
        last = {
            rank: max((n for n, calls in numbers.items() if rank in calls), default=0)
            for rank in members
        }
        for number in range(max(1, min(last.values()) - 1), max(last.values()) + 1):
            calls = {rank: own[0] for rank, own in numbers.get(number, {}).items()}
            knows_roots = all(call.root is not None for call in calls.values())
            for rank in members:
                if number > last[rank]:
                    continue
                call = calls.get(rank)
                self._record(
                    rank,
                    (group[0], number),
                    op=call.op if call else _UNKNOWN,
                    root=call.root if call and knows_roots else None,
                    group=repr(group),
                    members=members,
                    **({} if call is None else _moved(call)),
                )

    def _feed_messages(self) -> None:
        logs: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {
            "send": {},
            "recv": {},
        }
        for post in self._posts.values():
            for op, key in (("send", "sends"), ("recv", "recvs")):
                for log in post.get(key, ()):
                    logs[op][tuple(log["channel"])] = log
        waited = [act for p in self._posts.values() for act in _acts(p)]
        sides = [log for by_channel in logs.values() for log in by_channel.values()]
        newest = [act for log in sides for act in log["newest"]]
        members = {act["group"]: act["members"] for act in newest}
        everyone = list(range(self._records.world_size))
        for channel in {*logs["send"], *logs["recv"]}:
            counts = {op: logs[op].get(channel, {}).get("count", 0) for op in logs}
            waiting = [
                act["number"]
                for act in waited
                if act["channel"] and tuple(act["channel"]) == channel
            ]
            first = min(*counts.values(), *(number - 1 for number in waiting))
            group, src, dst, tag = channel
            for op, end in (("send", src), ("recv", dst)):
                for number in range(first + 1, counts[op] + 1):
                    self._record(
                        end,
                        (channel, op, number),
                        op=op,
                        group=group,
                        members=members.get(group, everyone),
                        src=src,
                        dst=dst,
                        tag=tag,
                    )

    def _seat(self, rank: int) -> bool:
        """Sit the rank's threads down in their calls; False if one isn't known."""
        acts = _acts(self._posts[rank])
        seats = [seat for act in acts for seat in self._seats_of(rank, act)]
        if not seats or None in seats:
            return False
        for thread, seat in enumerate(filter(None, seats)):
            event = {"n": -1 - thread, **seat, "thread": thread, "threads": len(seats)}
            if seat["k"] == ASKS:
                self._board.ask(rank, event)
            else:
                self._board.record(rank, event)
        return True

    def _seats_of(self, rank: int, act: Mapping[str, Any]) -> Iterator[Event | None]:
        """What a thread waits for, as events; None for what the board doesn't know."""
        if act["kind"] == _STORE:
            yield {"k": ASKS, "timeout_s": 0.0 if act["gives_up"] else math.inf}
            return
        for key in self._keys(rank, act):
            number = self._numbers.get((rank, *key))
            timeout_s = 0.0 if act["gives_up"] else None
            known = number is not None
            yield {"k": "wait", "n": number, "timeout_s": timeout_s} if known else None

    def _keys(self, rank: int, act: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """The calls that a thread waits for, as the board knows them."""
        dump = self._records.dumps[rank]
        if act["kind"] in ("send", "recv"):
            yield (tuple(act["channel"]), act["kind"], act["number"])
        elif act["kind"] == "meeting":
            yield (act["group"], act["number"])
        elif act["kind"] == "unfinished":
            under_way = [c for c in dump.calls if c.src is None and not c.done]
            for call in under_way:
                if call.group[0] not in self._records.titles:
                    yield (call.group[0], call.number)
            if not under_way:
                yield ()
        elif act["number"]:
            yield (act["group"], act["number"] if not act["done"] else 0)
        elif act["issued"]:
            yield ()  # torch hasn't recorded it
        else:
            last = [c for c in dump.calls if c.group[0] == act["group"] and not c.done]
            yield (act["group"], max((c.number for c in last), default=0))


def _moved(call: Call) -> dict[str, Any]:
    size = size_of(call)
    return {"shape": (size,), "dtype": call.dtype} if size else {}


# ── a call held back ────────────────────────────────────────────────────────────────


def _at_the_call(
    posts: Mapping[int, Post], post: Post, world_size: int
) -> Finding | None:
    """The verdict on a call that its rank has compared before it started it."""
    act = next(act for act in _acts(post) if act["others"])
    rank = int(post["rank"])
    records = records_of(posts, world_size)
    number = _last(records.dumps[rank], act["group"])  # the call that is held back
    calls = {rank: _of_act(rank, act, number)}
    for other in act["others"]:
        calls[other["rank"]] = _of_act(other["rank"], {**act, **other}, number)
    for other_rank, dump in records.dumps.items():
        for call in dump.calls:
            is_same = call.group == calls[rank].group and call.number == number
            if is_same and other_rank not in calls and not call.gives:
                calls[other_rank] = call
    hang = disagreement(records, dict(sorted(calls.items())))
    if hang is None:
        return None
    return Finding(status="mismatch", hang=hang, records=records, posts=posts)
