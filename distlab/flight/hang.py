"""Find why a job hung: the first disagreement in the ranks' records.

The k-th collectives of a group's members belong together, and so do the k-th send from
one rank to another and the k-th recv there. We look for three things in this order:

1. Calls that belong together but differ in operation, dtype, size or root. The earliest
   one explains all that came later.
2. A call that waits for a rank that waits nowhere. That rank has finished, has failed,
   or is busy with something else.
3. Ranks that wait for each other in a circle, for example because they entered two
   groups in opposite order.

If a buffer has lost its first calls, counting sends from the start is impossible, so we
only pair those that are still under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distlab.comm import ANY
from distlab.flight.records import Call, Group, Records, elements
from distlab.recorder.agreement import ANY_SIZE, BY_OUTPUTS
from distlab.runner.autopsy import place
from distlab.terminal import ranks_in_words

Kind = Literal["mismatch", "absent", "circle", "no-dump", "apart", "agree", "finished"]
_ROOTED = ("gather", "scatter")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The finding. `calls` are those that the sentence speaks of, by rank.

    `absent` are ranks that never made the call, and `differ` says in what the calls
    differ: operation, dtype, size, root or tag.
    """

    kind: Kind
    sentence: str
    calls: dict[int, Call]
    absent: tuple[int, ...] = ()
    differ: str = ""


@dataclass(frozen=True)
class _Wait:
    """Ranks that wait in one call, and those that have not made it."""

    waiting: dict[int, Call]
    absent: tuple[int, ...]

    @property
    def since(self) -> int:
        return min(call.created_ns for call in self.waiting.values())


def find_hang(records: Records) -> Hang:
    """The first disagreement between the ranks, or that there is none."""
    unlike = [*_unlike_collectives(records), *_unlike_messages(records)]
    if unlike:
        return min(unlike, key=_since)
    waits = sorted(_waits(records), key=lambda wait: wait.since)
    blocked = {rank for wait in waits for rank in wait.waiting}
    known = set(records.dumps)
    for is_cause, made in (
        (known - blocked, _absent),
        (set(records.missing), _without_dump),
    ):
        for wait in waits:
            guilty = [rank for rank in wait.absent if rank in is_cause]
            if guilty:
                return made(records, wait, guilty)
    circle = _circle(waits)
    if circle:
        return _in_circle(records, circle)
    return _agreement(records, waits)


def have_met_apart(records: Records, hang: Hang) -> bool:
    """Return True if ranks have met to different ends, as in new_group()."""
    groups = {call.group[0] for call in hang.calls.values()}
    return hang.kind == "mismatch" and groups <= records.titles.keys()


def current_call(records: Records, rank: int) -> Call | None:
    """The call in which a rank waits, or else its last one."""
    if rank in records.waits:
        return records.waits[rank]
    calls = records.dumps[rank].calls
    under_way = [call for call in calls if not call.done]
    if under_way:
        return min(under_way, key=lambda call: call.created_ns)
    return max(calls, key=lambda call: call.created_ns, default=None)


def tensor_of(call: Call) -> str:
    """`[3] float32`, or nothing."""
    return "" if call.shape is None else f"{list(call.shape)} {call.dtype}"


def spot(call: Call) -> str:
    """`train.py:20`, or nothing."""
    return place(call.place).rpartition("/")[2]


def operation(call: Call) -> str:
    """`all_reduce`, or `recv from rank 2`."""
    if call.op not in ("send", "recv"):
        return call.op
    peer = f"rank {call.dst if call.op == 'send' else call.src}"
    peer = "any rank" if ANY in (call.src, call.dst) else peer
    return f"{call.op} {'to' if call.op == 'send' else 'from'} {peer}"


def _described(call: Call, note: str = "") -> str:
    where = spot(call)
    note = note or (f"with tag {call.tag}" if call.tag else "")
    parts = [operation(call), tensor_of(call), note, f"({where})" if where else ""]
    return " ".join(filter(None, parts))


# ── calls that differ ───────────────────────────────────────────────────────────────


def by_number(records: Records, group: Group) -> dict[int, dict[int, list[Call]]]:
    """The group's collectives: number, then rank, then calls (several if coalesced)."""
    found: dict[int, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, dump in records.dumps.items():
        for call in dump.calls:
            if call.group == group and call.src is None:
                found[call.number][rank].append(call)
        if not dump.whole:  # of its oldest call some parts may be lost
            oldest = min((n for n, ranks in found.items() if rank in ranks), default=0)
            found.get(oldest, {}).pop(rank, None)
    return {number: ranks for number, ranks in sorted(found.items()) if ranks}


def groups_of(records: Records) -> Iterator[Group]:
    """The groups in which a collective is on record."""
    calls = (call for dump in records.dumps.values() for call in dump.calls)
    yield from dict.fromkeys(call.group for call in calls if call.src is None)


def size_of(call: Call) -> int:
    """The number of elements that must be the same on all ranks, or 0."""
    if call.op in ANY_SIZE:
        return 0
    return elements(call.outputs if call.op in BY_OUTPUTS else call.inputs)


_ASPECTS: tuple[tuple[str, Callable[[Call], Any]], ...] = (
    ("operation", lambda call: call.op),
    ("dtype", lambda call: call.dtype),
    ("size", size_of),
    ("root", lambda call: call.root),
    ("reduce op", lambda call: call.reduce_op),
)


def _unlike_collectives(records: Records) -> Iterator[Hang]:
    """The first call of each group in which its members do not take part alike."""
    for group in groups_of(records):
        for ranks in by_number(records, group).values():
            for parts in _parts(ranks):
                differ = _differ(parts, records.members(group))
                if differ:
                    yield _mismatch(records, group, parts, *differ)
                    break
            else:
                continue
            break


def _parts(ranks: dict[int, list[Call]]) -> Iterator[dict[int, Call]]:
    for index in range(max(map(len, ranks.values()))):
        yield {r: calls[index] for r, calls in ranks.items() if index < len(calls)}


def _differ(
    calls: dict[int, Call], members: Sequence[int]
) -> tuple[str, Callable[[Call], Any]] | None:
    for aspect, of in _ASPECTS:
        if len({of(call) for call in calls.values()} - {None}) > 1:
            return aspect, of
    some = next(iter(calls.values()))
    complete = some.op in _ROOTED and size_of(some) > 0 and set(members) <= calls.keys()
    if complete and sum(map(_is_root, calls.values())) != 1:
        return "root", _is_root
    return None


def disagreement(records: Records, calls: dict[int, Call]) -> Hang | None:
    """What these calls of one number of a group differ in; None if they agree."""
    group = next(iter(calls.values())).group
    differ = _differ(calls, ())
    if differ:
        return _mismatch(records, group, calls, *differ)
    for rank, call in calls.items():
        for other, its in calls.items():
            given, taken = _given(call, other, group), _taken(its, rank, group)
            if given != taken:
                text = (
                    f"rank {rank} gives rank {other} {given} elements in "
                    f"{_described(call)}, but rank {other} takes {taken} in "
                    f"{_described(its)}"
                )
                number = f"call {call.number} of {records.name(group)}"
                return Hang(
                    kind="mismatch",
                    sentence=f"{number}: {text}",
                    calls={rank: call, other: its},
                    differ="size",
                )
    return None


def _given(call: Call, other: int, group: Group) -> int | None:
    return call.gives[group[1].index(other)] if call.gives else None


def _taken(call: Call, other: int, group: Group) -> int | None:
    return call.takes[group[1].index(other)] if call.takes else None


def _is_root(call: Call) -> bool:
    """Only the root of a gather has outputs, and only that of a scatter inputs."""
    return elements(call.outputs if call.op == "gather" else call.inputs) > 0


def _mismatch(
    records: Records,
    group: Group,
    calls: dict[int, Call],
    differ: str,
    of: Callable[[Call], Any],
) -> Hang:
    absent = tuple(r for r in records.members(group) if r not in calls)
    sides: dict[Any, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        sides[of(call)].append(rank)
    told = []
    for ranks in sides.values():
        call = calls[ranks[0]]
        note = ""
        if differ == "reduce op":
            note = f"with {call.reduce_op}"
        elif differ == "root" and call.root is not None:
            note = f"with root {call.root}"
        elif of is _is_root and _is_root(call):
            note = "as the root"
        told.append((ranks, _described(call, note)))
    text = _sides(told, calls)
    if of is _is_root and not any(map(_is_root, calls.values())):
        text += ", and no rank is the root"
    number = next(iter(calls.values())).number
    return Hang(
        kind="mismatch",
        sentence=f"call {number} of {records.name(group)}: {text}"
        + _and_absent(records, absent),
        calls=calls,
        absent=absent,
        differ=differ,
    )


def _sides(sides: Iterable[tuple[list[int], str]], calls: dict[int, Call]) -> str:
    """`rank 0 is in barrier (train.py:18), ranks 1–3 in all_reduce (train.py:20)`."""
    texts: list[str] = []
    last = ""
    for ranks, described in sides:
        under_way = any(not calls[rank].done for rank in ranks)
        verb = "in" if under_way else "called"
        shown = verb
        if under_way and last != verb:
            shown = "is in" if len(ranks) == 1 else "are in"
        texts.append(f"{ranks_in_words(ranks)} {shown} {described}")
        last = verb
    return ", ".join(texts)


def _and_absent(records: Records, absent: Sequence[int]) -> str:
    """What is known of members that did not make the call."""
    silent = [rank for rank in absent if rank in records.dumps]
    lost = [rank for rank in absent if rank not in records.dumps]
    lost = [] if records.is_live else lost
    text = f", {ranks_in_words(silent)} never called it" if silent else ""
    return text + (f", {ranks_in_words(lost)} left no dump" if lost else "")


# ── messages ────────────────────────────────────────────────────────────────────────

_Pair = tuple[Group, int, int, int]  # the last is the tag


def _messages(records: Records) -> Iterator[tuple[_Pair, Call | None, Call | None]]:
    """Each send with the recv that belongs to it, where both ends left a dump."""
    ends: dict[_Pair, dict[str, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for dump in records.dumps.values():
        for call in dump.calls:
            if call.src is not None and call.dst is not None:
                ends[call.group, call.src, call.dst, call.tag][call.op].append(call)
    for pair, by_op in ends.items():
        _, src, dst, _ = pair
        both = [records.dumps[rank] for rank in (src, dst) if rank in records.dumps]
        sends, recvs = by_op["send"], by_op["recv"]
        if not all(dump.whole for dump in both):
            sends, recvs = ([c for c in e if not c.done] for e in (sends, recvs))
        for index in range(max(len(sends), len(recvs))):
            yield (
                pair,
                sends[index] if index < len(sends) else None,
                recvs[index] if index < len(recvs) else None,
            )


def _unlike_messages(records: Records) -> Iterator[Hang]:
    for (_, src, dst, _), send, recv in _messages(records):
        if send is None or recv is None:
            continue
        sent = elements(send.inputs or send.outputs), send.dtype
        received = elements(recv.outputs or recv.inputs), recv.dtype
        if sent != received:
            yield Hang(
                kind="mismatch",
                sentence=f"a message from rank {src} to rank {dst}: "
                f"rank {src} sends {_tensor_at(send)}, but rank {dst} receives into "
                f"{_tensor_at(recv)}",
                calls={src: send, dst: recv},
                differ="size" if sent[1] == received[1] else "dtype",
            )


def _tensor_at(call: Call) -> str:
    where = spot(call)
    return tensor_of(call) + (f" ({where})" if where else "")


# ── ranks that wait ─────────────────────────────────────────────────────────────────


def _waits(records: Records) -> Iterator[_Wait]:
    """Every call that is under way on some rank and that another has not made."""
    for group in groups_of(records):
        numbers = by_number(records, group)
        last = {
            rank: max((n for n, ranks in numbers.items() if rank in ranks), default=0)
            for rank in records.members(group)
        }
        for number, ranks in numbers.items():
            waiting = {
                rank: calls[0]
                for rank, calls in ranks.items()
                if any(not call.done for call in calls)
            }
            absent = tuple(rank for rank, n in last.items() if n < number)
            if waiting and absent:
                yield _Wait(waiting, absent)
                break
    for (_, src, dst, _), send, recv in _messages(records):
        if send is not None and recv is None and not send.done:
            yield _Wait({src: send}, (dst,))
        if recv is not None and send is None and not recv.done:
            others = [r for r in records.members(recv.group) if r != dst]
            yield _Wait({dst: recv}, tuple(others) if src == ANY else (src,))


def _call_title(records: Records, call: Call) -> str:
    if call.src is not None:
        source = "any rank" if call.src == ANY else f"rank {call.src}"
        return f"a message from {source} to rank {call.dst}"
    return f"call {call.number} of {records.name(call.group)}"


def _waiting_text(records: Records, wait: _Wait) -> str:
    first = next(iter(wait.waiting.values()))
    sides = _sides([(list(wait.waiting), _described(first))], wait.waiting)
    return f"{_call_title(records, first)}: {sides}"


def _absent(records: Records, wait: _Wait, guilty: list[int]) -> Hang:
    first = next(iter(wait.waiting.values()))
    never = "never called it"
    if first.op in ("send", "recv"):
        never = f"never called {'recv' if first.op == 'send' else 'send'}"
    text = f"{_waiting_text(records, wait)}, {ranks_in_words(guilty)} {never}"
    if len(guilty) > 1 and records.ended.issuperset(guilty):
        text += " and have ended"
    if len(guilty) == 1:
        text += f" and {_last_text(records, guilty[0], first.group)}"
    lost = [rank for rank in wait.absent if rank not in records.dumps]
    text += f"; {ranks_in_words(lost)} left no dump" if lost else ""
    return Hang(
        kind="absent", sentence=text, calls=dict(wait.waiting), absent=tuple(guilty)
    )


def _last_text(records: Records, rank: int, group: Group) -> str:
    """What a rank did last, with the group unless the sentence has named it."""
    last = current_call(records, rank)
    if rank in records.ended:
        return "has ended" + (f"; its last call was {_described(last)}" if last else "")
    if last is None:
        return "has no call on record"
    title = ""
    if last.src is None and last.number and last.group[0] not in records.titles:
        known = last.group == group
        title = f"call {last.number}, " if known else f"{_call_title(records, last)}, "
    return f"{'last made' if last.done else 'is in'} {title}{_described(last)}"


def _without_dump(records: Records, wait: _Wait, guilty: list[int]) -> Hang:
    return Hang(
        kind="no-dump",
        sentence=f"{_waiting_text(records, wait)}, {ranks_in_words(guilty)} left no "
        "dump and may have died",
        calls=dict(wait.waiting),
        absent=tuple(guilty),
    )


def _circle(waits: Sequence[_Wait]) -> list[tuple[int, _Wait]]:
    """Ranks with their waits, each of which waits for the next."""
    waits_of: dict[int, list[_Wait]] = defaultdict(list)
    for wait in waits:
        for rank in wait.waiting:
            waits_of[rank].append(wait)
    for start in sorted(waits_of):
        path: list[tuple[int, _Wait]] = []
        rank = start
        while rank in waits_of and rank not in (seen for seen, _ in path):
            wait = waits_of[rank][0]
            path.append((rank, wait))
            rank = next((r for r in wait.absent if r in waits_of), -1)
        ranks = [seen for seen, _ in path]
        if rank in ranks:
            circle = path[ranks.index(rank) :]
            first = min(range(len(circle)), key=lambda index: circle[index][0])
            return circle[first:] + circle[:first]
    return []


def _tags_apart(records: Records, circle: list[tuple[int, _Wait]]) -> Hang | None:
    """A send and a recv between the same ranks that have different tags."""
    calls = [wait.waiting[rank] for rank, wait in circle]
    if len(calls) != 2 or calls[0].src is None:
        return None
    one, other = sorted(calls, key=lambda call: call.op, reverse=True)
    if (one.op, other.op) != ("send", "recv") or one.tag == other.tag:
        return None
    if (one.src, one.dst) != (other.src, other.dst):
        return None
    text = (
        f"rank {one.rank} is in {_described(one, f'with tag {one.tag}')}, but rank "
        f"{other.rank} is in {_described(other, f'with tag {other.tag}')}"
    )
    return Hang(
        kind="mismatch",
        sentence=f"{_call_title(records, one)}: {text}",
        calls={call.rank: call for call in calls},
        differ="tag",
    )


def _in_circle(records: Records, circle: list[tuple[int, _Wait]]) -> Hang:
    if tags := _tags_apart(records, circle):
        return tags
    ranks = sorted(rank for rank, _ in circle)
    told = []
    for index, (rank, wait) in enumerate(circle):
        call = wait.waiting[rank]
        after = circle[(index + 1) % len(circle)][0]
        title = f" in {_call_title(records, call)},"
        if call.src is not None or call.group[0] in records.titles:
            title = ""
        which = f", and rank {after} has not made its side of it"
        told.append(f"rank {rank} is{title} in {_described(call)}{which}")
    return Hang(
        kind="circle",
        sentence=f"{ranks_in_words(ranks)} wait for each other: {'; '.join(told)}",
        calls={rank: wait.waiting[rank] for rank, wait in circle},
    )


def _agreement(records: Records, waits: Sequence[_Wait]) -> Hang:
    current = {rank: current_call(records, rank) for rank in records.dumps}
    open_calls = {r: c for r, c in current.items() if c is not None and not c.done}
    if not open_calls:
        lost = records.missing
        left = f"; {ranks_in_words(lost)} left no dump" if lost else ""
        return Hang(
            kind="finished",
            sentence=f"no rank waits: every call on record has finished{left}",
            calls={},
        )
    first = min(open_calls.values(), key=lambda call: call.created_ns)
    apart = [call for call in open_calls.values() if not _same_call(call, first)]
    if apart:
        told = (
            f"rank {rank} in {_call_title(records, call)}, {_described(call)}"
            for rank, call in open_calls.items()
        )
        return Hang(
            kind="apart",
            sentence=f"the ranks wait in different calls: {'; '.join(told)}",
            calls=open_calls,
        )
    same = {r: c for r, c in open_calls.items() if _same_call(c, first)}
    sides = _sides([(list(same), _described(first))], same)
    return Hang(
        kind="agree",
        sentence=f"{_call_title(records, first)}: {sides}, and no rank on record "
        "disagrees",
        calls=same,
    )


def _same_call(one: Call, other: Call) -> bool:
    if one.src is not None:
        return (one.group, one.src, one.dst) == (other.group, other.src, other.dst)
    return (one.group, one.number, one.src) == (other.group, other.number, other.src)


def _since(hang: Hang) -> int:
    return min(call.created_ns for call in hang.calls.values())
