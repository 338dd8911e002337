"""What the tables hold of one call: numbers for its names, its bytes, its line."""

from __future__ import annotations

import linecache
import math
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from distlab.paths import shown
from distlab.trace.model import NONE, Site

if TYPE_CHECKING:
    from distlab.comm import Event


class Names:
    """Strings, or whatever can be a key, as numbers in order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        """The number of `name`."""
        return self.numbers.setdefault(name, len(self.numbers))


def columns(trace: Any) -> Any:
    """A simulation's messages as an array, shape [messages, 6]."""
    rows = getattr(trace, "rows", trace)  # as plain tuples, where there are any
    values = np.fromiter(chain.from_iterable(rows), np.int64, count=6 * len(trace))
    return values.reshape(-1, 6)


def rank_number(rank: int | None) -> int:
    """A rank, or NONE."""
    return NONE if rank is None else rank


def bytes_of(call: Event) -> int:
    """What is sent; of a receive, what there is room for."""
    if call.get("bytes"):
        return int(call["bytes"])
    dtype = str(call.get("into_dtype") or call.get("dtype") or "")
    bits = "".join(c for c in dtype if c.isdigit())
    shape = call.get("into_shape") or call.get("shape") or []
    return math.prod(shape) * int(bits or 8) // 8 if shape else 0


def site_of(file: str, line: int) -> Site:
    """A place, with what stands there now."""
    linecache.checkcache(file)  # it may have been edited since the last picture
    text = linecache.getline(file, line).strip() if file else ""
    return Site(file=shown(file) if file else "", line=line, text=text[:200])
