"""Find the ranks that hold each other up, when they wait for all or any of several.

A rank that waits for *all* of several is held up by any one of them. A rank that waits
for *any* of them (`recv(ANY)`) is held up only by all of them together:

    0 recv ← any of 1, 2        1 recv ← 0        2 recv ← 0        a knot: nobody moves
    0 recv ← any of 1, 2        1 recv ← 0        2 has finished    no knot: it is 2 who
                                                                    could have freed all

Source: E. Knapp, "Deadlock detection in distributed databases" (1987), section 3: the
AND model looks for a cycle, the OR model for a knot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distlab.runner.board import find_cycle

Waits = Mapping[int, tuple[int, ...]]


def tied_up(waits_for: Waits, any_of: Collection[int]) -> set[int]:
    """Return the ranks that would be stuck forever even if all others continued.

    The others are ranks that don't wait, or that wait for something else.
    """
    tied = set(waits_for)
    while True:
        free = {
            rank for rank in tied if not _is_held(rank, waits_for[rank], any_of, tied)
        }
        if not free:
            return tied
        tied -= free


def find_knot(waits_for: Waits, any_of: Collection[int]) -> tuple[int, ...]:
    """Return a circle of ranks that hold each other up, or an empty tuple."""
    tied = tied_up(waits_for, any_of)
    inside = {
        rank: tuple(peer for peer in waits_for[rank] if peer in tied) for rank in tied
    }
    return find_cycle(dict(sorted(inside.items())))


def _is_held(
    rank: int, peers: tuple[int, ...], any_of: Collection[int], tied: set[int]
) -> bool:
    held = [peer in tied for peer in peers]
    return bool(held) and (all(held) if rank in any_of else any(held))
