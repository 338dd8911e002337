"""A data set that draws anew in each epoch, random crops say, is told which it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tell_epoch(value: Any, epoch: int) -> None:
    """Call set_epoch of a data set, or of those within it, if they have one."""
    for one in _listeners(value):
        one.set_epoch(epoch)


def hears_epoch(value: Any) -> bool:
    """Whether a data set, or one within it, has set_epoch."""
    return any(True for _ in _listeners(value))


def _listeners(value: Any) -> Iterator[Any]:
    """The data set itself, or what torch's Subset and ConcatDataset are made of."""
    if callable(getattr(value, "set_epoch", None)):
        yield value
        return
    inner = getattr(value, "dataset", None)
    for one in (inner, *(getattr(value, "datasets", None) or ())):
        if one is not None and one is not value:
            yield from _listeners(one)
