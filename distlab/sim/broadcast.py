"""Pass a broadcast down a tree, as far as its members have arrived.

A member that has a copy can leave the call once it has passed the copy on to all
members below it, even if others never arrive. A program therefore stops on the same
lines as with gloo, which uses the same tree:

    0 ──▶ 1 ──▶ 3        places, counted from the root; the parent of a place is the
    └───▶ 2              place without its highest bit
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from distlab.sim.payload import Sized


class Tree:
    """Tracks which of `n` members have received what `root` sent."""

    def __init__(self, n: int, root: int) -> None:
        self._n, self._root = n, root
        self._copied = {root}

    def hand_down(self, tensors: Mapping[int, Tensor | Sized]) -> None:
        """Fill the tensors of arrived members that can be reached, in place."""
        for place in range(1, self._n):  # parents before their children
            member = self._member(place)
            parent = self._member(place - (1 << place.bit_length() - 1))
            if member not in self._copied and {member, parent} <= tensors.keys():
                if parent not in self._copied:
                    continue
                _copy(tensors[parent], tensors[member])
                self._copied.add(member)

    def through(self, come: Collection[int]) -> list[int]:
        """Return the members of `come` that have their copy and have passed it on."""
        return [
            member
            for place in range(self._n)
            if (member := self._member(place)) in come
            and member in self._copied
            and all(child in come for child in self._children(place))
        ]

    def _children(self, place: int) -> list[int]:
        reach, children = 1 << place.bit_length(), []
        while place + reach < self._n:
            children.append(self._member(place + reach))
            reach *= 2
        return children

    def _member(self, place: int) -> int:
        return (self._root + place) % self._n


def _copy(sent: Tensor | Sized, received: Tensor | Sized) -> None:
    if not (isinstance(sent, Tensor) and isinstance(received, Tensor)):
        return  # of one there is only the size
    if (sent.numel(), sent.dtype) == (received.numel(), received.dtype):
        received.copy_(sent)  # or else nothing happens, and the journals show why
