"""Schedules of all ranks, played by a clock: when each entry starts, and what is kept.

An entry starts when its rank is free and what it needs is there; messages take no time.
Everything is whole numbers, so two times are equal or they are not. This knows nothing
of the unit under judgement and has schedules of its own to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Entry = tuple[str, int, int]
"""("F" or "B", microbatch, chunk)."""
Schedules = list[list[Entry]]
"""By rank."""


@dataclass(frozen=True)
class Played:
    """How long all of it takes; and where ranks wait forever, (rank, entry, need)."""

    time: int
    stuck: tuple[tuple[int, Entry, str], ...] = ()


def play_schedules(
    schedules: Schedules, num_chunks: int, forward: int, backward: int
) -> Played:
    """Let all ranks go through their lists."""
    n = len(schedules)
    done: dict[tuple[str, int, int], int] = {}  # kind, microbatch, stage: when
    clocks, places = [0] * n, [0] * n
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while places[rank] < len(schedule):
                kind, number, chunk = schedule[places[rank]]
                needed = needs(schedule[places[rank]], rank, n, num_chunks)
                if needed and needed not in done:
                    break
                start = max(clocks[rank], done[needed] if needed else 0)
                clocks[rank] = start + (forward if kind == "F" else backward)
                done[kind, number, chunk * n + rank] = clocks[rank]
                places[rank] += 1
                moved = True
    stuck = []
    for rank, schedule in enumerate(schedules):
        if places[rank] < len(schedule):
            entry = schedule[places[rank]]
            needed = needs(entry, rank, n, num_chunks)
            assert needed
            kind, number, stage = needed
            name = named((kind, number, stage // n))
            stuck.append((rank, entry, f"{name} of rank {stage % n}"))
    return Played(max(clocks), tuple(stuck))


def needs(
    entry: Entry, rank: int, n: int, num_chunks: int
) -> tuple[str, int, int] | None:
    """What must be done before `entry` can start: kind, microbatch, stage."""
    kind, number, chunk = entry
    stage = chunk * n + rank
    if kind == "F":
        return ("F", number, stage - 1) if stage else None
    if stage == n * num_chunks - 1:
        return "F", number, stage
    return "B", number, stage + 1


def peak(schedule: Sequence[Entry]) -> int:
    """How many entries are forward and not yet backward, at most."""
    kept = most = 0
    for kind, _, _ in schedule:
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most


def lead(schedule: Sequence[Entry]) -> int:
    """How many forwards come before the first backward."""
    kinds = [kind for kind, _, _ in schedule]
    return kinds.index("B") if "B" in kinds else len(kinds)


def named(entry: Entry) -> str:
    """As in the drawings: F3, and F3' for chunk 1."""
    kind, number, chunk = entry
    return f"{kind}{number}" + "'" * chunk


def in_words(entry: Entry) -> str:
    """The same for a headline: "the forward of microbatch 3"."""
    kind, number, chunk = entry
    where = f" (chunk {chunk})" if chunk else ""
    return (
        f"the {'forward' if kind == 'F' else 'backward'} of microbatch {number}{where}"
    )


# ── schedules to run an executor with ───────────────────────────────────────────────


def all_then_all(n: int, m: int) -> Schedules:
    """GPipe's."""
    return [[(kind, number, 0) for kind in "FB" for number in range(m)]] * n


def unlike_orders(n: int, m: int) -> Schedules:
    """The same, but each second rank takes the microbatches in orders of its own.

    Slower, and right: each rank gets what it needs, in another order than it was sent.
    Forwards begin with the second microbatch, backwards with the last one.
    """
    schedules = all_then_all(n, m)
    for rank in range(1, n, 2):
        forwards, backwards = schedules[rank][:m], schedules[rank][m:]
        schedules[rank] = [*forwards[1:], forwards[0], *reversed(backwards)]
    return schedules


def in_turns(n: int, m: int, num_chunks: int = 1) -> Schedules:
    """1F1B; with several chunks its interleaved form, for m a multiple of n."""
    forwards = [
        ("F", start + place, chunk)
        for start in range(0, m, n)
        for chunk in range(num_chunks)
        for place in range(min(n, m - start))
    ]
    backwards = [("B", number, num_chunks - 1 - chunk) for _, number, chunk in forwards]
    schedules = []
    for rank in range(n):
        warmup = n - 1 - rank
        if num_chunks > 1:
            warmup = 2 * warmup + (num_chunks - 1) * n
        warmup = min(warmup, len(forwards))
        order = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards, strict=False):
            order += pair
        schedules.append(order + backwards[len(forwards) - warmup :])
    return schedules


def one_at_a_time(n: int, m: int) -> Schedules:
    """No pipeline: each microbatch forward and backward before the next."""
    return [[(kind, number, 0) for number in range(m) for kind in "FB"]] * n
