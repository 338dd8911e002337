"""Where the loops over an epoch begin, and how far they have come.

    state loaded: 3 batches are done       the next loop begins with batch 3
    a look at a batch                      3
    the loop that trains                   3 4 5, to the end of the epoch
    the next loop                          0 1 2 …

Only a loop that reaches its end uses the loaded position up. A look at a batch, or a
loop that a `break` ends, leaves it alone: the next loop begins where this one began, on
every rank, even if only one of them has looked.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")


class Loop:
    """One loop over an epoch: how many of its items were drawn for it, and returned."""

    def __init__(self, begin: int) -> None:
        self.drawn = begin  # counted from the epoch's start
        self.has_drawn_all = self.was_left = False

    @property
    def returned(self) -> int:
        """How many of the epoch's items the caller's loop has had."""
        return self.drawn

    @property
    def has_all(self) -> bool:
        """Whether that is the whole epoch."""
        return self.has_drawn_all

    @property
    def is_running(self) -> bool:
        """Whether the caller's loop may be in its body."""
        return not self.has_drawn_all and not self.was_left


class EpochLoops:
    """Base of a loader or sampler with a position that it can resume from.

    `num_delivered` counts the items of this epoch that its newest loop has returned,
    including those before a loaded position. Save it at any time: inside a loop, after
    one that ended early, or at the end of an epoch, where it is the number of all
    items. If a loop runs inside another and is left early, the one that is further on
    counts: a look at a batch doesn't hide the training around it.
    """

    # vars() has the settings and the position, not what follows the loops.
    __slots__ = ("__dict__", "_begin", "_loops", "_newest")
    epoch: int
    num_delivered: int

    def __init__(self) -> None:
        self.epoch = self.num_delivered = 0
        self._begin = 0  # items of this epoch that the next loop leaves out
        self._newest = Loop(0)
        self._loops: list[Loop] = []  # begun since the position was last set

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`; call it before each epoch, on every rank.

        A new epoch starts at its first item. If it is this epoch already, the next loop
        begins where it would have begun without the call.
        """
        self.settle()
        epoch = operator.index(epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.begin_at(0)
        self._note(Loop(self._begin))

    def begin_at(self, number: int) -> None:
        """Begin the next loop after `number` items of this epoch."""
        self._begin, self._loops = number, []
        self._note(Loop(number))

    def follow(self, items: Iterable[Item], loop: Loop | None = None) -> Iterator[Item]:
        """Yield `items`, those of the epoch after `_begin`, and keep the position."""
        loops, loop = self._loops, loop or Loop(self._begin)
        loops.append(loop)
        self._note(loop)
        try:
            for item in items:
                loop.drawn += 1
                if loops is self._loops:  # else the position was set since
                    self._note(loop)
                yield item
            loop.has_drawn_all = True
        finally:
            loop.was_left = not loop.has_drawn_all
            if loops is self._loops:
                self.settle()

    def settle(self) -> None:
        """Use a loaded position up, if a loop had the whole rest of its epoch."""
        self._note(self.current())
        if any(loop.has_all for loop in self._loops):
            self._begin = 0
        self._loops[:] = [loop for loop in self._loops if loop.is_running]

    def current(self) -> Loop:
        """The loop whose position counts: the newest, or one around it."""
        newest = self._newest
        if newest.is_running or newest.has_all:
            return newest
        around = [loop for loop in self._loops if loop.is_running]
        return max([newest, *around], key=lambda loop: loop.returned)

    def _note(self, loop: Loop) -> None:
        self._newest, self.num_delivered = loop, loop.returned


def check_state(
    owner: object,
    state: Mapping[str, Any],
    settings: Iterable[str],
    more: Iterable[str],
) -> None:
    """Require that `state` has `settings` and `more`, and the settings of `owner`.

    Raises:
        ValueError: a name is missing, or a setting differs.
    """
    missing = [name for name in (*settings, *more) if name not in state]
    if missing:
        raise ValueError(f"not a state of a {type(owner).__name__}: no {missing}")
    for name in settings:
        own, saved = getattr(owner, name), state[name]
        if own != saved:
            raise ValueError(f"{name} is {own} here, but {saved} in the state")
