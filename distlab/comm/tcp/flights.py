"""The transfers and collectives in progress on a rank, and their groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from threading import Event
from typing import NamedTuple

from torch import Tensor

from distlab.comm.tcp.frames import code_of, memory_of

Key = tuple[int, int]
"""A channel with one peer: space and tag."""


class LostPeer(Exception):  # noqa: N818 - like PeerLost, which it becomes
    """Raised if the peer of a flight is gone, or one of the two gave up the group."""


class Membership:
    """A group as its members know it: `members` are ranks of the world."""

    def __init__(self, name: str, members: Sequence[int], rank: int) -> None:
        self.name, self.members, self.rank = name, tuple(members), rank
        self.id = _number(name)
        self.gone: set[int] = set()  # members that have given it up
        self.schedules: set[Schedule] = set()  # collectives under way
        self._num_collectives = 0
        self._spaces: dict[str, int] = {}

    def collective_key(self, op: str) -> Key:
        """Return the channel of this group's next collective, which is called `op`.

        Members that call different collectives get different channels and never meet.
        """
        if op not in self._spaces:
            self._spaces[op] = _number(f"{self.name} {op}")
        self._num_collectives += 1
        return self._spaces[op], self._num_collectives


class Flight:
    """An operation that will finish or fail; the engine's lock guards all of it."""

    __slots__ = ("bell", "done", "error", "group")

    def __init__(self, group: Membership) -> None:
        self.group = group
        self.done = False
        self.error: Exception | None = None
        self.bell: Event | None = None  # rung for who waits without driving

    def land(self, error: Exception | None) -> None:
        """Finish, with an error if the operation failed."""
        self.error = error
        self.done = True
        if self.bell is not None:
            self.bell.set()


class Transfer(Flight):
    """One end of a message; `peer` is a rank of the world, or ANY until we find one."""

    __slots__ = (
        "dtype",
        "elements",
        "exact",
        "key",
        "owner",
        "peer",
        "storage",
        "view",
    )

    def __init__(
        self,
        group: Membership,
        key: Key,
        peer: int,
        tensor: Tensor,
        owner: Schedule | None = None,
    ) -> None:
        # Not by way of super(): this is the one object that every message costs.
        self.group, self.done, self.error, self.bell = group, False, None, None
        self.key, self.peer, self.owner = key, peer, owner
        self.view, self.storage = memory_of(tensor)
        self.dtype = code_of(tensor.dtype)
        self.elements = tensor.numel() if self.dtype else len(self.view)
        self.exact = owner is not None  # in a collective, sizes must be the same

    def misfit(self, length: int) -> Exception | None:
        """Say why we can't receive a message of `length` bytes here, if we can't."""
        if length > len(self.view) or (self.exact and length != len(self.view)):
            return RuntimeError(
                f"{length} bytes arrived for a tensor of {len(self.view)} bytes"
            )
        return None


class Step(NamedTuple):
    """One message of a collective's schedule; `peer` is a rank of the group."""

    is_send: bool
    peer: int
    tensor: Tensor


class Schedule(Flight):
    """A collective, which posts each list of `steps` once the previous one is done."""

    __slots__ = ("key", "remaining", "steps")

    def __init__(self, group: Membership, op: str, steps: Iterator[list[Step]]) -> None:
        super().__init__(group)
        self.key = group.collective_key(op)
        self.steps = steps
        self.remaining = 0


class Channel:
    """Both directions of a key with one peer, which count their messages."""

    __slots__ = (
        *("announced", "arrived", "asked", "closed", "expecting", "grants", "group"),
        *("posted", "unsent", "wanted"),
    )

    def __init__(self) -> None:
        self.group: Membership | None = None
        self.closed = False
        self.wanted = False  # the peer receives from anyone: it must be told
        self.posted = self.grants = 0  # our sends, and the peer's leave to send them
        self.unsent: deque[Transfer] = deque()  # posted, and not granted yet
        self.asked = self.arrived = self.announced = 0  # our receives, its sends
        self.expecting: deque[Transfer] = deque()  # granted, and not arrived yet


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
