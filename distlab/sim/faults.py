"""What goes wrong in a simulated run: slow, dead and late ranks, lost messages.

Everything is drawn from `seed`, in the order in which messages start: the same faults
and the same program give the same run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

Partition = tuple[tuple[int, ...], float, float]
"""These ranks are cut off from all others, from a time to another one, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults of one run.

    straggler  rank: factor. What it computes (`context.clock.sleep`) and every byte
               it sends or receives takes that many times as long, latency apart; of a
               message between two stragglers the slower one counts.
    kill       rank: seconds. It dies at that time, like a process: whoever waits for it
               or calls it afterwards gets PeerLost.
    late       rank: seconds. It starts its program at that time.
    loss       the share of messages that vanish. What is sent after a lost message does
               not take its place, so its receiver waits forever; its sender does not
               know. Library collectives and `new_group` lose nothing.
    duplicate  the share of messages that arrive twice. Of a Comm's the second copy is
               thrown away by its number; an Endpoint hands both to its program.
    partition  ranks, from, to. Meanwhile no message starts between these ranks and the
               others. A Comm's messages wait until it is over; an Endpoint's vanish.

    Raises:
        ValueError: a share outside of 0 … 1, a time that is negative or has no end, a
            factor that is not above 0, a partition that ends before it begins.
    """

    straggler: Mapping[int, float] = field(default_factory=dict)
    kill: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    loss: float = 0.0
    duplicate: float = 0.0
    partition: Partition | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for rank, factor in self.straggler.items():
            if not 0 < factor < math.inf:
                raise ValueError(
                    f"straggler: rank {rank} has the factor {factor}; it must be above "
                    "0 and finite"
                )
        for name in ("kill", "late"):
            for rank, seconds in getattr(self, name).items():
                _require_time(f"{name}: rank {rank} at", seconds)
        for name in ("loss", "duplicate"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}: a share is between 0 and 1")
        if self.partition is not None:
            _require_partition(self.partition)

    def check(self, world_size: int) -> None:
        """Every rank named must be one of `world_size`.

        Raises:
            ValueError: one is not.
        """
        named = {name: tuple(getattr(self, name)) for name in _BY_RANK}
        named["partition"] = self.partition[0] if self.partition else ()
        for name, ranks in named.items():
            for rank in ranks:
                if not 0 <= rank < world_size:
                    raise ValueError(
                        f"{name} names rank {rank}, but there is only rank 0 … "
                        f"{world_size - 1}"
                    )

    def __bool__(self) -> bool:
        """Whether anything can go wrong."""
        return any(getattr(self, f.name) for f in fields(self) if f.name != "seed")


_BY_RANK = ("straggler", "kill", "late")


def _require_time(what: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{what} {seconds} s: a time is 0 or more, and finite")


def _require_partition(partition: Partition) -> None:
    ranks, from_s, to_s = partition
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"partition of ranks {ranks}: each once, and at least 1")
    _require_time("partition: from", from_s)
    _require_time("partition: to", to_s)
    if to_s <= from_s:
        raise ValueError(f"partition: it ends at {to_s} s, before it has begun")


class Luck:
    """The drawing of one run."""

    def __init__(self, faults: Faults) -> None:
        self._random = random.Random(faults.seed)
        self._loss, self._duplicate = faults.loss, faults.duplicate

    def loses(self) -> bool:
        """Whether the message that starts now vanishes."""
        return self._loss > 0 and self._random.random() < self._loss

    def doubles(self) -> bool:
        """Whether the message that starts now arrives twice."""
        return self._duplicate > 0 and self._random.random() < self._duplicate
