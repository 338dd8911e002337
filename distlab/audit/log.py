"""The log of one rank: what its script did, in order, with the line of each event.

A rank is a thread in the simulator and a process elsewhere. Either way its log belongs
to its thread, and a hook that runs on another thread finds none and does nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.audit.places import Place, here

_HERE = threading.local()
Facts = dict[str, Any]
MOST_EVENTS = 400_000


@dataclass(slots=True)
class Event:
    """Something that a rank did; `step` is how many optimizer steps it had taken."""

    kind: str
    at: Place | None
    step: int
    facts: Facts

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]


@dataclass
class AuditLog:
    """All events of one rank, and the names that its objects got."""

    rank: int
    folder: Path
    events: list[Event] = field(default_factory=list)
    num_steps: int = 0

    def add(self, kind: str, at: Place | None = None, /, **facts: Any) -> Event:
        """Write an event down; its place is the user's line that runs, if not given."""
        event = Event(kind, at or here(), self.num_steps, facts)
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        return event

    def of(self, *kinds: str) -> Iterator[Event]:
        """Return the events of these kinds, in order."""
        return (event for event in self.events if event.kind in kinds)


class Memory:
    """What the hooks on a rank's thread remember while it runs, and nobody keeps."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log
        self.kept: dict[int, Any] = {}  # objects whose id stands for them
        self.number_of: dict[int, int] = {}
        self.born: dict[int, Place] = {}  # parameters, by id
        self.names: dict[int, str] = {}  # parameters, by id
        self.inner_of: dict[int, int] = {}  # a module that DDP holds -> its wrapper
        self.seeded: dict[str, Place] = {}
        self.depth = 0  # of modules that call each other
        self.in_call = 0  # collectives made of others
        self.in_step = False
        self.steps: dict[int, Event] = {}  # that have begun, by optimizer
        self.loader = (0, 0)  # the one that fetches, and its epoch
        self.loss_at: Place | None = None
        self.lengths: set[int] = set()  # of tensors that tell if padding was cut off
        self.counts: Counter[str] = Counter()

    def number(self, kind: str, thing: object) -> int:
        """Return which one an object is of its kind, such as the second optimizer.

        Ranks that run the same code give it the same number.
        """
        if id(thing) not in self.number_of:
            self.counts[kind] += 1
            self.number_of[id(thing)] = self.counts[kind] - 1
            self.kept[id(thing)] = thing  # or its id could come again
        return self.number_of[id(thing)]


def current() -> Memory | None:
    """Return what belongs to the rank whose thread calls, or None."""
    return getattr(_HERE, "memory", None)


def attach(memory: Memory | None) -> None:
    """From now on the calling thread is that rank's; None: no rank's any more."""
    _HERE.memory = memory
