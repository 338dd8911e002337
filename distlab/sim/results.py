"""The arguments of a simulated run, and the record that it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distlab.comm import Factory
from distlab.runner import Limits, Run
from distlab.sim.carriers import CarrierName
from distlab.sim.conditions import Loss
from distlab.sim.faults import STORE, Faults
from distlab.sim.generators import Generators
from distlab.sim.messages import Trace
from distlab.sim.net.links import Network
from distlab.sim.net.quantities import time_words
from distlab.sim.outages import Struck
from distlab.sim.payload import PAYLOADS, Payload
from distlab.sim.services import ServiceMessage

MAX_RANKS = 4096
_FEW = 6  # faults that are told one by one


@dataclass(frozen=True, kw_only=True)
class SimRun(Run):
    """A Run in virtual time; `trace` has every message, in the order they started.

    `lost` holds the messages that faults took, and `num_duplicates` counts those that
    arrived twice. `links` has the picoseconds for which each link of the network was
    busy. `service_messages` went from or to nodes that aren't ranks. `struck` holds the
    deaths, restarts and freezes that took place, and `service_errors` says why a
    service ended.

    With fake tensors, `memory` has each rank's bytes at their peak, by what they are
    for. `played` are the ranks that executed the program, the others followed one of
    them; `unlike` are neighbors among `played` whose calls differ.
    """

    trace: Trace = field(default_factory=Trace, repr=False)

    carrier: CarrierName = "greenlets"
    lost: tuple[Loss, ...] = ()
    num_duplicates: int = 0
    links: dict[str, int] = field(default_factory=dict, repr=False)
    service_messages: tuple[ServiceMessage, ...] = field(default=(), repr=False)
    service_errors: dict[str, str] = field(default_factory=dict)
    struck: tuple[Struck, ...] = ()
    memory: tuple[Mapping[str, int], ...] = field(default=(), repr=False)
    played: tuple[int, ...] = ()
    unlike: tuple[tuple[int, int], ...] = ()

    @property
    def time_s(self) -> float:
        """Virtual seconds until the last rank was done, or stuck."""
        return self.seconds

    @property
    def took(self) -> str:
        """Implement `Run.took`, and say that these seconds are virtual."""
        return f"{time_words(self.seconds)} of simulated time"

    @property
    def trace_hash(self) -> str:
        """Return 32 hexadecimal digits that are equal if and only if the traces are.

        They cover every message, every call in the journals with its time (collectives
        appear only there), and the end of the run.
        """
        digest = hashlib.blake2b(digest_size=16)
        for row in self.trace.rows:
            digest.update(b"%d %d %d %d %d %d\n" % row)
        digest.update(repr(self.service_messages).encode())
        for record in self.ranks:
            for event in record.journal:
                told = (event.get(name) for name in ("k", "n", "op", "bytes", "t"))
                digest.update(repr((record.rank, *told)).encode())
        digest.update(repr(self.seconds).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The arguments of `run`, apart from the program."""

    world_size: int
    net: Network
    limits: Limits | None
    journal: bool
    seed: int
    payload: Payload
    eager_bytes: int
    faults: Faults
    trace: bool
    isolate: bool
    wall_limit_s: float | None
    turn_limit_s: float | None
    services: Mapping[str, Factory]
    belongings: Callable[[], Generators] | None = None
    on_output: Callable[[int, str], None] | None = None
    ranks_per_node: int = 0  # for their local ranks; 0: all are on one node
    hide: bool = False  # what the kernel computes, from the torch modes of ranks
    times_out: bool = False  # at `wall_limit_s`, return a run instead of raising

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ValueError(
                f"{self.world_size} ranks: choose between 1 and {MAX_RANKS} simulated "
                "ones"
            )
        if self.payload not in PAYLOADS:
            known = ", ".join(PAYLOADS)
            raise ValueError(f"payload {self.payload!r}: choose one of {known}")
        if self.eager_bytes < 0:
            raise ValueError(
                f"eager_bytes is {self.eager_bytes}: a number of bytes, 0 or more"
            )
        for name in ("wall_limit_s", "turn_limit_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise ValueError(f"{name} is {limit_s}: seconds, above 0, or None")
        for name in self.services:
            if not isinstance(name, str) or not name.isidentifier() or name == STORE:
                raise ValueError(
                    f"{name!r} is no name for a service: letters, and not {STORE!r}"
                )
        self.faults.check(self.world_size, self.services)


def what_struck(result: SimRun) -> str:
    """Say which nodes died and came back, and what ended a service."""
    told = [*map(str, result.struck), *result.service_errors.values()]
    few = told if len(told) <= _FEW else [*told[:_FEW], f"and {len(told) - _FEW} more"]
    return "".join(f"; {text}" for text in few)
