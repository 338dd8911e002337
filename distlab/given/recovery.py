"""Reports of ranks in unit `recovery`, and a supervisor's events and actions.

`RecordedRun` reads the runs in distlab/given/recovery_runs/. We recorded them from
three ranks that trained on gloo, sent a heartbeat every 50 ms from a thread of their
own, and reported each step on standard output. What happened to one of them was real:
SIGSTOP, SIGKILL, an endless loop, a file that is written and synced again and again.
For any time in a run, `RecordedRun` returns the reports that an agent had by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distlab.comm.services import Tick, WakeAt
from distlab.given.process_group import Begin, Finish, Interrupted

RUNS = Path(__file__).parent / "recovery_runs"

# ── what the ranks report ───────────────────────────────────────────────────────────

COMPUTE, WAIT, SAVE = "compute", "wait", "save"
NEWEST = 20  # completed steps of a process that a report has at most


class Step(NamedTuple):
    """One optimizer step that a process has completed."""

    number: int
    time_s: float  # when


class Report(NamedTuple):
    """The agent's knowledge of one rank's process; all times are on the same clock."""

    rank: int
    steps: Sequence[Step]  # the newest of this process, ascending; some may be missing
    doing: str  # COMPUTE, WAIT (in a collective) or SAVE (a checkpoint)
    since_s: float  # the process has done that since then
    beat_s: float  # the newest message of its heartbeat thread
    has_ended: bool = False  # the operating system says so


class Condition(NamedTuple):
    """The ranks with a problem, in any order; a rank is in at most one list."""

    dead: list[int]
    frozen: list[int]
    slow: list[int]


class RecordedRun(NamedTuple):
    """Messages of a run's ranks, in order: (time_s, rank, what, number).

    The third field is "started" (by a process that has this rank from now on),
    "compute", "wait", "save", "step" with the step's number, "beat", or "ended" with
    the exit code.
    """

    title: str
    messages: list[tuple[float, int, str, int]]
    faults: list[tuple[float, int, str]]  # what was done to which rank, when

    @classmethod
    def read(cls, path: str | Path) -> RecordedRun:
        """Read the run in this file; a name without a folder is looked up in RUNS."""
        path = Path(path)
        path = path if path.exists() else RUNS / path.with_suffix(".json").name
        fields = json.loads(path.read_text(encoding="utf-8"))
        rows = [tuple(row) for row in fields["messages"]]
        return cls(fields["title"], rows, [tuple(row) for row in fields["faults"]])

    def reports(self, now_s: float) -> list[Report]:
        """Return one report, at this time, for each rank that has sent a message."""
        found: dict[int, Report] = {}
        for time_s, rank, what, number in self.messages:
            if time_s > now_s:
                break
            old = found.get(rank, Report(rank, (), COMPUTE, time_s, time_s))
            match what:
                case "started":
                    old = Report(rank, (), COMPUTE, time_s, time_s)
                case "beat":
                    old = old._replace(beat_s=time_s)
                case "step":
                    newest = (*old.steps, Step(number, time_s))[-NEWEST:]
                    old = old._replace(steps=newest)
                case "ended":
                    old = old._replace(has_ended=True)
                case _:
                    old = old._replace(doing=what, since_s=time_s)
            found[rank] = old
        return [found[rank] for rank in sorted(found)]


def show(path: str, detect: Callable[[list[Report], float], Condition]) -> None:
    """Print every change in what `detect` returns for a recorded run, with its time."""
    run = RecordedRun.read(path)
    last, end_s = Condition([], [], []), run.messages[-1][0]
    print(f"{path}: {run.title}")
    for now_s in (hundredth / 100 for hundredth in range(int(100 * end_s) + 2)):
        found = detect(run.reports(now_s), now_s)
        if found != last:
            print(f"  {now_s:6.2f} s  {found}")
        last = found


# ── what happens to the processes, and what to do about it ──────────────────────────
# A process has a number that no other one has or had. It is not a rank.


@dataclass(frozen=True)
class Ready:
    """Event: this process has finished its imports and waits for a rank."""

    process: int


@dataclass(frozen=True)
class Ended:
    """Event: this process has ended; the code is -s after signal s."""

    process: int
    code: int


@dataclass(frozen=True)
class Frozen:
    """Event: `detect` has named the rank of this process in this generation."""

    process: int
    generation: int


@dataclass(frozen=True)
class Completed:
    """Event: all ranks of this generation have completed this optimizer step."""

    step: int
    generation: int


@dataclass(frozen=True)
class Start:
    """Action: start a process under this number; it imports, then reports Ready."""

    process: int


@dataclass(frozen=True)
class Signal:
    """Action: send a signal to this process."""

    process: int
    signal: int


@dataclass(frozen=True)
class Form:
    """Action: let these processes leave their group, if any, and form a new one."""

    generation: int
    members: dict[int, int]  # rank → process; the ranks are 0 … world_size - 1


Event = Begin | Ready | Ended | Frozen | Completed | Tick | Interrupted
Action = Start | Signal | Form | WakeAt | Finish


def exit_code_of(code: int) -> int:
    """Return the code that a shell reports for this exit code: 128 + s for -s."""
    return code if code >= 0 else 128 - code


__all__ = [
    "COMPUTE",
    "NEWEST",
    "RUNS",
    "SAVE",
    "WAIT",
    "Action",
    "Begin",
    "Completed",
    "Condition",
    "Ended",
    "Event",
    "Finish",
    "Form",
    "Frozen",
    "Interrupted",
    "Ready",
    "RecordedRun",
    "Report",
    "Signal",
    "Start",
    "Step",
    "Tick",
    "WakeAt",
    "exit_code_of",
    "show",
]
