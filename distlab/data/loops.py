"""Track where each loop over an epoch begins, and how far it has come.

    after loading a state with 3 batches done     the next loop begins with batch 3
    peeking at a batch                            3
    the training loop                             3 4 5, to the end of the epoch
    the next loop                                 0 1 2 …

A loaded position is only used up by a loop that runs to the end of the epoch. If you
peek at a batch or `break` out of a loop, the next loop begins where that one began. So
all ranks stay in step, even if only one of them peeks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")

_POSITION = "position of the loops"


class Loop:
    """One loop over an epoch, which counts the items it has drawn and returned."""

    def __init__(self, begin: int) -> None:
        self.drawn = begin  # counted from the epoch's start
        self.has_drawn_all = self.was_left = False

    @property
    def returned(self) -> int:
        """The number of the epoch's items that the caller's loop has received."""
        return self.drawn

    @property
    def has_all(self) -> bool:
        """True if the loop has received the whole epoch."""
        return self.has_drawn_all

    @property
    def is_running(self) -> bool:
        """True if the caller may still be inside the loop."""
        return not self.has_drawn_all and not self.was_left


class EpochLoops:
    """Base class of a loader or sampler that can resume from a position.

    `num_delivered` counts the items of this epoch that its newest loop has returned,
    including those before a loaded position. You can save it at any time: inside a
    loop, after you left one early, or at the end of an epoch, when it counts all items.
    If you leave a loop early inside another one, we use the position of the loop that
    is further along, so peeking at a batch doesn't hide the training around it.
    """

    # Slots keep the loop tracking out of vars(), which has settings and position only.
    __slots__ = ("__dict__", "_begin", "_loops", "_newest")
    epoch: int
    num_delivered: int

    def __init__(self) -> None:
        self.epoch = self.num_delivered = 0
        self._begin = 0  # how many items of this epoch the next loop skips
        self._newest = Loop(0)
        self._loops: list[Loop] = []  # loops started since the position was last set

    def __getstate__(self) -> dict[str, Any]:
        """Return the position without the running loops, for a copy or a pickle."""
        self.settle()
        loop = self.current()
        is_over = loop.has_all and not loop.is_running
        position = {"begin": self._begin, "returned": loop.returned, "is_over": is_over}
        return {**vars(self), _POSITION: position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the position that `__getstate__` returned."""
        state = dict(state)
        position = state.pop(_POSITION)
        vars(self).update(state)
        self._begin, self._loops = position["begin"], []
        self._newest = Loop(position["returned"])
        self._newest.has_drawn_all = position["is_over"]
        self._newest.was_left = not position["is_over"]

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`; call this on every rank before each epoch.

        A new epoch starts at its first item. If `epoch` is already the current one, the
        call doesn't change where the next loop begins.
        """
        self.settle()
        epoch = operator.index(epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.begin_at(0)
        self._note(Loop(self._begin))

    def begin_at(self, number: int) -> None:
        """Let the next loop skip the first `number` items of this epoch."""
        self._begin, self._loops = number, []
        self._note(Loop(number))

    def follow(self, items: Iterable[Item], loop: Loop | None = None) -> Iterator[Item]:
        """Yield `items`, the epoch's items after `_begin`, and track the position."""
        loops, loop = self._loops, loop or Loop(self._begin)
        loops.append(loop)
        self._note(loop)
        try:
            for item in items:
                loop.drawn += 1
                if loops is self._loops:  # otherwise the position was set meanwhile
                    self._note(loop)
                yield item
            loop.has_drawn_all = True
        finally:
            loop.was_left = not loop.has_drawn_all
            if loops is self._loops:
                self.settle()

    def settle(self) -> None:
        """Drop the loaded position if a loop has run to the end of the epoch."""
        self._note(self.current())
        if any(loop.has_all for loop in self._loops):
            self._begin = 0
        self._loops[:] = [loop for loop in self._loops if loop.is_running]

    def current(self) -> Loop:
        """Return the loop whose position counts: the newest, or one around it."""
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
    """Require that `state` has all names, and the same settings as `owner`.

    Raises:
        ValueError: a name in `settings` or `more` is missing, or a setting differs.
    """
    missing = [name for name in (*settings, *more) if name not in state]
    if missing:
        raise ValueError(f"not a state of a {type(owner).__name__}: no {missing}")
    for name in settings:
        own, saved = getattr(owner, name), state[name]
        if own != saved:
            raise ValueError(f"{name} is {own} here, but {saved} in the state")


def saved_position(
    state: Mapping[str, Any], name: str, num_items: int
) -> tuple[int, int]:
    """Return the saved epoch, and how many of its `num_items` items to skip.

    Raises:
        ValueError: a value is impossible, such as a text, a negative number or more
            items than the epoch has.
    """
    found = []
    for key, largest in (("epoch", None), (name, num_items)):
        try:
            number = operator.index(state[key])
        except TypeError:
            number = -1
        if number < 0 or (largest is not None and number > largest):
            limit = "on" if largest is None else f"to {largest}"
            raise ValueError(
                f"not a state of this data: {key} is {state[key]!r}, must be a whole "
                f"number from 0 {limit}"
            )
        found.append(number)
    return found[0], found[1]
