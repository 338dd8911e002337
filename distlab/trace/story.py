"""Why no rank can continue, for a reader who has not seen the code: a few sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distlab.comm import ANY
from distlab.runner.autopsy import RECEIVES, SENDS

if TYPE_CHECKING:
    from distlab.runner import RankRecord, Run

_FEW = 6  # ranks that are told one by one
_LOST = " It was sent, but the message was lost on its way."


def story(run: Run) -> list[str]:
    """Sentences on a run in which ranks wait forever; none on any other run."""
    waiting = [record for record in run.ranks if record.status == "waiting"]
    if run.outcome != "deadlock" or not waiting:
        return []
    if run.cycle:
        return _circle(run)
    told = [_wait(run, record) for record in waiting if not _behind(run, record)]
    behind = len(waiting) - len(told)
    lines = told[:_FEW]
    if len(told) > _FEW:
        lines.append(f"{len(told) - _FEW} more ranks wait in the same way.")
    if behind:
        who = "1 more rank waits" if behind == 1 else f"{behind} more ranks wait"
        lines.append(f"{who} for one of these, and so cannot go on either.")
    return lines


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A message that is waited for and never gets on: `given`, but never taken."""

    waiter: int
    peer: int
    given: bool
    in_cycle: bool

    @property
    def ends(self) -> tuple[int, int]:
        """Who would send it, and who would receive it."""
        both = (self.waiter, self.peer)
        return both if self.given else both[::-1]


def missing(run: Run) -> list[Missing]:
    """The messages for want of which a run stands still.

    Those of the circle, or those whose other side does not wait itself: the ranks
    that wait for a waiting one follow from these.
    """
    calls = {r.rank: r.waiting for r in run.ranks if r.status == "waiting"}
    waits = [
        Missing(
            waiter=rank,
            peer=peer,
            given=(calls[rank] or {}).get("op") in SENDS,
            in_cycle=rank in run.cycle,
        )
        for rank, peers in run.waits_for.items()
        for peer in peers[:1]
        if rank in calls and peer != rank and 0 <= peer < run.world_size
    ]
    guilty = [
        wait
        for wait in waits
        if (wait.in_cycle and wait.peer in run.cycle)
        or (not run.cycle and wait.peer not in calls)
    ]
    return guilty or waits


def _behind(run: Run, record: RankRecord) -> bool:
    """Whether all that a rank waits for wait themselves, and nothing was lost."""
    peers = [p for p in run.waits_for.get(record.rank, ()) if 0 <= p < run.world_size]
    if _was_lost(run, record):
        return False
    return bool(peers) and all(run.ranks[peer].status == "waiting" for peer in peers)


def _circle(run: Run) -> list[str]:
    ranks = [run.ranks[rank] for rank in run.cycle]
    ops = {record.waiting["op"] for record in ranks if record.waiting}
    told = ranks if len(ranks) <= _FEW else ranks[:3]
    lines = [
        f"Rank {record.rank} {_does(record, run.cycle[(index + 1) % len(ranks)])}."
        + (_LOST if _was_lost(run, record) else "")
        for index, record in enumerate(told)
    ]
    if len(told) < len(ranks):
        left = len(ranks) - len(told)
        lines.append(f"{left} more ranks do the same, round to rank {ranks[0].rank}.")
    lines.append(
        "That is a circle: each waits for the next, the last one waits for the first. "
        + (_at_odds(ranks) or _why(ops))
    )
    rest = [r.rank for r in run.ranks if r.status == "waiting" and r not in ranks]
    if rest:
        names = " and ".join(map(str, rest)) if len(rest) <= _FEW else str(len(rest))
        who = f"Rank {names} is" if len(rest) == 1 else f"Ranks {names} are"
        who = f"{names} other ranks are" if len(rest) > _FEW else who
        lines.append(f"{who} not in it, but can only go on after these.")
    return lines


def _at_odds(ranks: list[RankRecord]) -> str:
    """Of a circle: who sends to a rank that takes nothing from it just now."""
    for record, peer in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        call, other = record.waiting or {}, peer.waiting or {}
        if call.get("op") not in SENDS or other.get("op") not in RECEIVES:
            continue
        if other["src"] != record.rank:
            return (
                f"Rank {record.rank} sends to rank {peer.rank}, but rank {peer.rank} "
                f"receives from rank {other['src']}."
            )
        tags = call.get("tag", 0), other.get("tag", 0)
        if tags[0] != tags[1]:
            return (
                f"Rank {record.rank} sends with tag {tags[0]}, but rank {peer.rank} "
                f"receives with tag {tags[1]}."
            )
    return ""


def _why(ops: set[str]) -> str:
    if ops <= set(SENDS):
        return (
            "A send returns only when the other side receives. Every rank sends, and "
            "no rank reaches its recv."
        )
    if ops <= set(RECEIVES):
        return (
            "A recv returns only when the other side sends. Every rank receives, and "
            "no rank reaches its send."
        )
    return "None of these calls can return before another of them does."


def _was_lost(run: Run, record: RankRecord) -> bool:
    """Whether a simulated run's faults took what a rank waits for."""
    call = record.waiting or {}
    return any(
        (loss.dst, loss.tag) == (record.rank, call.get("tag", 0))
        and call.get("src") in (loss.src, ANY)
        for loss in getattr(run, "lost", ())
    )


def _does(record: RankRecord, peer: int | None = None) -> str:
    """What a rank does, and what it needs of `peer`, or of whom it names itself."""
    call = record.waiting or {}
    op, at = call.get("op", ""), _at(record)
    if op in SENDS:
        return f"is sending to rank {call['dst']}{at} and waits until that one receives"
    if op in RECEIVES:
        source = call.get("src") if peer is None else peer
        whom = "some rank" if source == ANY else f"rank {source}"
        return f"is receiving{at} and waits until {whom} sends"
    whom = "the others do their part" if peer is None else f"rank {peer} does its part"
    return f"is in {op or 'a call'}{at} and waits until {whom}"


def _at(record: RankRecord) -> str:
    call = record.waiting or {}
    file = str(call.get("file") or "").replace("\\", "/").rpartition("/")[2]
    return f" ({file}:{call['line']})" if file else ""


def _wait(run: Run, record: RankRecord) -> str:
    peers = [p for p in run.waits_for.get(record.rank, ()) if 0 <= p < run.world_size]
    gone = [peer for peer in peers if run.ranks[peer].status != "waiting"]
    head = f"Rank {record.rank} {_does(record)}"
    if _was_lost(run, record):
        return f"{head}.{_LOST}"
    if not gone:
        return f"{head}. No rank answers."
    if len(gone) > _FEW:
        return f"{head}. But {len(gone)} ranks have already ended and never will."
    names = " and ".join(map(str, gone))
    ranks, have = ("rank", "has") if len(gone) == 1 else ("ranks", "have")
    return f"{head}. But {ranks} {names} {have} already ended and never will."
