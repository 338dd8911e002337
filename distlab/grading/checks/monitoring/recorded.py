"""What ranks recorded, as plain numbers drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distlab.runner.autopsy import Evidence

NAN, INF = math.nan, math.inf
BITS = 32


class Row(NamedTuple):
    """One rank in one step, as the unit's Record has it."""

    rank: int
    data_s: float
    compute_s: float
    communication_s: float
    loss: float
    num_samples: int
    num_nonfinite: int = 0
    checksum: int = 0

    @property
    def own_s(self) -> float:
        """The seconds in which this rank does not communicate."""
        return self.data_s + self.compute_s

    @property
    def step_s(self) -> float:
        """The seconds of the whole step."""
        return self.own_s + self.communication_s


Step = list[Row]


def records(unit: ModuleType, step: Sequence[Row]) -> list[Any]:
    """The rows as records of the unit."""
    return [unit.Record(*row) for row in step]


def drawn_row(draw: random.Random, rank: int, num_samples: int) -> Row:
    """A rank with parts of a second of its own; it has a loss if it has samples."""
    seconds = (draw.uniform(0.01, 0.2), draw.uniform(0.3, 1), draw.uniform(0.05, 0.6))
    loss = draw.uniform(0.5, 4) if num_samples else NAN
    return Row(rank, *seconds, loss, num_samples, 0, draw.getrandbits(BITS))


def drawn_ranks(draw: random.Random, count: int) -> list[int]:
    """Numbers of ranks in any order; 0 is not among them unless there is only one."""
    return draw.sample(range(1, 4 * count + 2), count)


def shown(step: Sequence[Row]) -> tuple[Evidence, ...]:
    """What each rank recorded of its time, loss and samples."""
    return tuple(
        Evidence(
            row.rank,
            f"{row.num_samples} samples",
            f"data {row.data_s:.2f} s  compute {row.compute_s:.2f} s  "
            f"communication {row.communication_s:.2f} s  loss {row.loss:.4g}",
        )
        for row in step
    )


def number(value: Any, kind: type[float] = float) -> float | str:
    """A number as float or as int, or what it is instead."""
    if value is None:
        return "None: is a return missing?"
    try:
        return kind(value)
    except (TypeError, ValueError, RuntimeError):
        return f"{value!r:.50}, not a number"


def same(actual: float, expected: float, tolerance: float = 1e-9) -> bool:
    """Equal up to rounding; nan equals nan."""
    if math.isnan(expected) or math.isnan(actual):
        return math.isnan(expected) and math.isnan(actual)
    if math.isinf(expected) or math.isinf(actual):
        return actual == expected
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))
