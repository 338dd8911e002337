"""Tell a data set which epoch it is, so it can draw new random crops, for example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tell_epoch(value: Any, epoch: int) -> None:
    """Call set_epoch of a data set, or of the data sets inside it, if they have it."""
    for one in _listeners(value):
        one.set_epoch(epoch)


def hears_epoch(value: Any) -> bool:
    """Return True if a data set, or one inside it, has set_epoch."""
    return any(True for _ in _listeners(value))


def _listeners(value: Any) -> Iterator[Any]:
    """Yield data sets with set_epoch, even inside torch's Subset and ConcatDataset."""
    if callable(getattr(value, "set_epoch", None)):
        yield value
        return
    inner = getattr(value, "dataset", None)
    for one in (inner, *(getattr(value, "datasets", None) or ())):
        if one is not None and one is not value:
            yield from _listeners(one)
