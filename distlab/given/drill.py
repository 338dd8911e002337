"""Recorded runs of the unit `drill`: the reports of ranks, and an agent's log.

`phase4_production/incidents/` has runs of real processes, each with a single fault or
with none. tests/record_incidents.py recorded them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

# ── what is known of a run ──────────────────────────────────────────────────────────


class Report(NamedTuple):
    """The report that a rank wrote at the end of a step that it completed."""

    rank: int
    step: int  # from 1
    time_s: float  # on the clock of the events
    own_s: float  # data and compute: the time in which it does not wait for ranks
    loss: float
    num_nonfinite: int  # elements of its own gradients, before the all_reduce
    checksum: int  # of its weights after the step


ENTERED = "entered"  # a rank began to wait for the others in `step`; its newest one
LOST = "lost"  # a rank's collective failed: a peer is gone, or did not come in time
RAISED = "raised"  # a rank's own loader raised: its data worker has ended
ENDED = "ended"  # as `text` says: "SIGKILL", "exit code 1"; seen only now and then
SAVED = "saved"  # the checkpoint after `step` is written, the shards of all ranks
REFUSED = "refused"  # of this checkpoint, `rank`'s shard is not what was saved
STOPPED = "stopped"  # someone asked all ranks to stop after `step`


class Event(NamedTuple):
    """One line of the agent's log; `rank` or `step` is -1 if the line has none."""

    time_s: float
    kind: str
    rank: int = -1
    step: int = -1
    text: str = ""


class RecordedRun(NamedTuple):
    """The reports and events of a run, in the order of their times."""

    reports: list[Report]
    events: list[Event]


# ── what is said of it ──────────────────────────────────────────────────────────────

NOTHING = "nothing"  # a healthy run
KILLED = "killed"  # a process ended by a signal
DATA_WORKER = "data worker"  # a process that reads data for a rank ended
FROZEN = "frozen"  # a process neither ends nor goes on
SLOW = "slow"  # a rank for which the others wait, step after step
NAN = "nan"  # inf or nan in the gradients of a rank
DESYNC = "desync"  # a rank's weights are not those of the others
TORN = "torn"  # a checkpoint is not what was saved

CONTINUE = "continue"  # change nothing
REPLACE = "replace"  # move the rank to another machine at the next checkpoint
RESTART = "restart"  # all ranks, from the newest checkpoint that is usable

ACTIONS = {
    NOTHING: CONTINUE,
    SLOW: REPLACE,
    KILLED: RESTART,
    DATA_WORKER: RESTART,
    FROZEN: RESTART,
    NAN: RESTART,
    DESYNC: RESTART,
    TORN: RESTART,
}


class Cause(NamedTuple):
    """The first fault of a run with its rank and step, or -1 and -1 without one."""

    what: str
    rank: int = -1
    step: int = -1


class Incident(NamedTuple):
    """The cause, what to do about it, and how many steps must be repeated."""

    what: str
    rank: int
    step: int
    action: str
    steps_lost: int


def read_run(path: str | Path) -> RecordedRun:
    """Read a file that tests/record_incidents.py wrote."""
    saved = json.loads(Path(path).read_text(encoding="utf-8"))
    return RecordedRun(
        [Report(*row) for row in saved["reports"]],
        [Event(*row) for row in saved["events"]],
    )
