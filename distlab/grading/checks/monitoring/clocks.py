"""A module `time` whose clocks go as a script says, for C1 of 4.1.

Nothing waits. Only the code of the unit sees it: its own names, and what it imports
inside a function while the script goes on.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from distlab.comm import _seams

WALL, FORWARD, WORKING = "time of day", "forward", "processor time"
CLOCKS = {
    "time": WALL,
    "monotonic": FORWARD,
    "perf_counter": FORWARD,
    "process_time": WORKING,
    "thread_time": WORKING,
}
"""Which kind of clock each function of the module reads."""
STARTS = {WALL: 1.7e9, FORWARD: 5000.0, WORKING: 3.0}


class Clocks:
    """Three clocks, and the module that reads them."""

    def __init__(self) -> None:
        self.now = dict(STARTS)
        self.module = ModuleType("time")
        vars(self.module).update(vars(time))
        for name, kind in CLOCKS.items():
            setattr(self.module, name, lambda kind=kind: self.now[kind])
            in_ns = f"{name}_ns"
            setattr(self.module, in_ns, lambda kind=kind: int(self.now[kind] * 1e9))
        setattr(self.module, "clock_gettime", self._by_number)  # noqa: B010 - its type
        whole = lambda number: int(self._by_number(number) * 1e9)  # noqa: E731
        setattr(self.module, "clock_gettime_ns", whole)  # noqa: B010 - its type

    def compute(self, seconds: float) -> None:
        """The process works."""
        for kind in self.now:
            self.now[kind] += seconds

    def wait(self, seconds: float) -> None:
        """The process waits: its processor time stands still."""
        self.now[WALL] += seconds
        self.now[FORWARD] += seconds

    def correct(self, seconds: float) -> None:
        """The time of day is set anew."""
        self.now[WALL] += seconds

    @contextmanager
    def seen_by(self, unit: ModuleType) -> Iterator[None]:
        """Within it, `unit` reads these clocks."""
        own = vars(self.module)
        fakes = {id(v): own[n] for n, v in vars(time).items() if own[n] is not v}
        before = [
            (vars(module), name, value)
            for module in (unit, timeit, _seams)
            for name, value in vars(module).items()
            if value is time or id(value) in fakes
        ]
        try:
            for names, name, value in before:
                names[name] = self.module if value is time else fakes[id(value)]
            sys.modules["time"] = self.module
            yield
        finally:
            sys.modules["time"] = time
            for names, name, value in before:
                names[name] = value

    def _by_number(self, number: int) -> float:
        """What clock_gettime reads."""
        if number == time.CLOCK_REALTIME:
            return self.now[WALL]
        on_processor = (time.CLOCK_PROCESS_CPUTIME_ID, time.CLOCK_THREAD_CPUTIME_ID)
        return self.now[WORKING if number in on_processor else FORWARD]
