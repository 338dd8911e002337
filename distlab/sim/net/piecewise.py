"""A table of measured times instead of a formula: size in bytes → seconds.

    seconds │                  ╱      beyond the last size: on in the same direction
            │              ╱•
            │         _ - •
            │ •–––•–                  below the first size: the first time
            └──────────────────────▶ bytes

Two parameters can't describe a real link, because buffers, protocols and caches bend
the line. `distlab calibrate` measures the table of this machine.

The file may have more columns, for messages in other patterns than one way (see
`measured`), and for adding two tensors of that size.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.sim.net.links import PS, Ports, Wires
from distlab.sim.net.measured import MeasuredPorts

_FORMAT = "distlab link table 1"
_Rows = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Every pair has an equal link; between two sizes of the table, time is linear.

    `table` has pairs (size in bytes, seconds) with rising sizes. We take the time of
    the smallest size as latency, which messages share, while the rest keeps both ends
    busy.

    The other columns are optional and have seconds for each of these sizes: for a
    message that goes back and forth, half the round trip; for two messages that cross,
    one of them; and for `a += b` with such tensors, which a run charges if you ask for
    it (see `charge`).

    Raises:
        ValueError: the table is empty, its sizes don't rise, or its times are
            impossible.
    """

    table: tuple[tuple[float, float], ...]
    back_and_forth_s: tuple[float, ...] = ()
    both_ways_s: tuple[float, ...] = ()
    adding_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # Also of lists, as JSON has them.
        rows = tuple((size, seconds) for size, seconds in self.table)
        object.__setattr__(self, "table", rows)
        if not self.table:
            raise ValueError("the table of the link is empty: it needs a size and time")
        _require_rows(self.table)
        for name in _COLUMNS:
            column = tuple(getattr(self, name))
            object.__setattr__(self, name, column)
            if len(column) not in (0, len(rows)):
                raise ValueError(
                    f"the table has {len(rows)} sizes and {len(column)} times in {name}"
                )
            _require_rows(self._rows(column))

    def wires(self, world_size: int) -> Wires:
        """Return the state of a network on which no message is in flight yet."""
        first_s = self.table[0][1]

        def cost(num_bytes: float) -> tuple[float, float]:
            whole_s = self.message_s(num_bytes)
            latency_s = min(first_s, whole_s)
            return (whole_s - latency_s) * PS, latency_s * PS

        if not (self.back_and_forth_s or self.both_ways_s):
            return Ports(cost, world_size)
        return MeasuredPorts(
            cost,
            lambda num_bytes: self._column_s(self.back_and_forth_s, num_bytes),
            lambda num_bytes: self._column_s(self.both_ways_s, num_bytes),
            world_size,
        )

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds for one message on an empty network."""
        return _between(self.table, num_bytes)

    def operation_s(self, num_bytes: float) -> float:
        """Return the seconds of an operation on this many bytes; 0 if not measured."""
        return _between(self._rows(self.adding_s), num_bytes) if self.adding_s else 0.0

    def _column_s(self, column: Sequence[float], num_bytes: float) -> float:
        return _between(self._rows(column) if column else self.table, num_bytes)

    def _rows(self, seconds: Sequence[float]) -> _Rows:
        return [(size, s) for (size, _), s in zip(self.table, seconds, strict=False)]

    def save(self, path: str | Path, **notes: Any) -> None:
        """Write the table as JSON; `notes` say where it comes from.

        Raises:
            ValueError: the file can't be written.
        """
        sizes, seconds = zip(*self.table, strict=True)
        facts = {"format": _FORMAT, "size_bytes": sizes, "seconds": seconds}
        more = {name: getattr(self, name) for name in _COLUMNS}
        facts |= {name: column for name, column in more.items() if column}
        text = json.dumps({**notes, **facts}, indent=1) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Piecewise:
        """Read a table that `save` wrote.

        Raises:
            ValueError: the file can't be read, or isn't such a table.
        """
        try:
            facts = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:  # neither JSON nor, perhaps, text
            raise ValueError(f"{path} is not JSON, so it is no link table") from None
        if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
            raise ValueError(f'{path} is no link table: "format" is not "{_FORMAT}"')
        sizes, seconds = map(_numbers, (facts.get("size_bytes"), facts.get("seconds")))
        if sizes is None or seconds is None or len(sizes) != len(seconds):
            raise ValueError(
                f"{path} is broken: size_bytes and seconds must be two lists of "
                "numbers, equally long"
            )
        more = {name: _numbers(facts.get(name, [])) for name in _COLUMNS}
        for name, column in more.items():
            if column is None:
                raise ValueError(f"{path} is broken: {name} must be a list of numbers")
        try:
            return cls(table=tuple(zip(sizes, seconds, strict=True)), **more)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


_COLUMNS = ("back_and_forth_s", "both_ways_s", "adding_s")


def _between(rows: _Rows, num_bytes: float) -> float:
    """Return the time of a size by interpolation, or extrapolation beyond the table."""
    sizes = [size for size, _ in rows]
    if num_bytes <= sizes[0] or len(sizes) == 1:
        return rows[0][1]
    right = min(bisect_right(sizes, num_bytes), len(sizes) - 1)
    (size, seconds), (next_size, next_seconds) = rows[right - 1 : right + 1]
    slope = (next_seconds - seconds) / (next_size - size)
    if num_bytes > sizes[-1]:
        slope = max(slope, 0.0)  # noise at the end must not make more bytes faster
        size, seconds = next_size, next_seconds
    return seconds + (num_bytes - size) * slope


def _require_rows(rows: _Rows) -> None:
    last: float = -1
    for size, seconds in rows:
        if not (0 <= size < math.inf and size == int(size)):
            raise ValueError(f"the table has a size of {size} bytes")
        if size <= last:
            raise ValueError(
                f"the table's sizes must rise, but {size} comes after {last}"
            )
        if not 0 <= seconds < math.inf:
            raise ValueError(f"the table says {seconds} seconds for {size} bytes")
        last = size


def _numbers(values: Any) -> list[float] | None:
    """Return a list that contains only numbers, or None."""
    if not isinstance(values, list) or any(
        isinstance(value, bool) or not isinstance(value, int | float)
        for value in values
    ):
        return None
    return values
