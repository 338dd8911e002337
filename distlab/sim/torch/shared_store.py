"""What all ranks of a run see: the values of their stores, and who waits for which."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from distlab.sim.kernel import Flight


class Awaited(Flight):
    """A rank waits until someone has set a key."""

    __slots__ = ("key", "others")

    def __init__(self, key: str, others: tuple[int, ...]) -> None:
        super().__init__()
        self.key, self.others = key, others

    def awaited(self) -> tuple[int, ...]:
        """See `Flight.awaited`."""
        return self.others

    def call(self) -> dict[str, Any]:
        """See `Flight.call`."""
        return {"n": 0, "op": f"store.wait({self.key!r})"}


class Contribution(NamedTuple):
    """What a rank brings to a collective."""

    rank: int
    op: str
    num_elements: int
    dtype: str
    shape: list[int]


class SharedStore:
    """What the ranks of a run have put where all see it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: defaultdict[str, list[Awaited]] = defaultdict(list)
        self.named: defaultdict[str, SharedStore] = defaultdict(SharedStore)
        self.first_parts: dict[tuple[object, int], Contribution] = {}
