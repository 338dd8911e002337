"""The drill: say what went wrong and what to do, from what a run has left behind.

Guide: phase4_production/guide/drill.md.
Source: Z. Jiang et al., MegaScale (NSDI 2024), section 4; A. Grattafiori et al., The
Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4, for what fails, how often.
Symbols: a step counts from 1; checkpoint k has the weights after step k.
Cost: none; it runs once, after the fact.

    rank 0   …  11 ✓  12 ✓  13 entered ──────── timed out   exit code 1
    rank 1   …  11 ✓  12 ✓  13 entered ──────── timed out   exit code 1
    rank 2   …  11 ✓  12 ✓  SIGKILL                         the cause
    saved    …  10

Most lines of a log are consequences. One of them is the cause, the first thing that
went wrong. `Report`, `Event` and the words for causes are in distlab/given/drill.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from distlab.given.drill import (
    ACTIONS,
    DATA_WORKER,
    DESYNC,
    ENDED,
    ENTERED,
    FROZEN,
    KILLED,
    LOST,
    NAN,
    NOTHING,
    RAISED,
    REFUSED,
    RESTART,
    SAVED,
    SLOW,
    TORN,
    Cause,
    Event,
    Incident,
    Report,
    read_run,
)

LATE = 2.0  # times as long as the others: then a rank is late in a step
PATIENCE = 5  # steps in which a rank must be late, one after the other


def by_step(reports: Sequence[Report]) -> dict[int, list[Report]]:
    """Return the reports of each step that all ranks have completed, in order."""
    num_ranks = len({report.rank for report in reports})
    steps: dict[int, list[Report]] = {}
    for report in sorted(reports, key=lambda report: report.step):
        steps.setdefault(report.step, []).append(report)
    return {step: own for step, own in steps.items() if len(own) == num_ranks}


def damage(reports: Sequence[Report]) -> Cause | None:
    """Find the first step whose weights are wrong on some rank, if there is one.

    Given: by_step.

    C1 NAN means that a rank has num_nonfinite above 0, and DESYNC means that a rank's
       checksum differs from the one that most ranks have. If both occur, the earlier
       one counts, or NAN if they occur in the same step.
    In torch.distributed: torch.distributed.checkpoint keeps such a step like any other
    Example: step 7: checksums 5 5 9 5, step 8: 6 6 8 6 → DESYNC of rank 2 in step 7
    Check: distlab check 4.12
    """
    # TODO(drill.incident)
    # which step tells the ranks apart? what does one rank's nan do to the others?
    raise NotImplementedError("drill.incident")


def stopped_process(reports: Sequence[Report], events: Sequence[Event]) -> Cause | None:
    """Find the rank whose process stopped first, unless ranks stopped by themselves.

    The agent looks at the processes now and then, so what it saw first need not have
    happened first. LOST says that another rank is gone, so it is never the cause.

    C2 KILLED means that a signal ended the process, and DATA_WORKER means that the
       process that read its data has ended. In both cases, the step is the one after
       the rank's last report.
    C3 FROZEN means that a rank has lost a peer although no process was stopped. The
       frozen rank is the one that the others wait for, in a step that it has not
       entered. The step is the one after its last report.
    In torch.distributed: Flight Recorder has the newest collective of each rank
    Example: rank 0 LOST, rank 2 ENDED "SIGKILL", rank 0 ENDED "exit code 1" → rank 2
    Check: distlab check 4.12
    """
    # TODO(drill.incident)
    # which events can only be a cause? if there are none: which rank do all wait for?
    raise NotImplementedError("drill.incident")


def straggler(reports: Sequence[Report]) -> Cause | None:
    """Find the rank that the others are waiting for, if there is one. Given: by_step.

    A rank is late in a step if its own_s is more than LATE times the median of the
    other ranks' own_s.

    C4 SLOW means that a rank is late in each of the last PATIENCE steps. The step is
       the first one since which it has been late without a break.
    Example: late in steps 3 and 9 to 14 of 14 → step 9; late in 11 to 14 → none
    Check: distlab check 4.12
    """
    # TODO(drill.incident)
    # for how long has each rank been late, without a break, up to now?
    raise NotImplementedError("drill.incident")


def steps_lost(reports: Sequence[Report], events: Sequence[Event], cause: Cause) -> int:
    """Count the steps completed on all ranks that a restart must repeat.

    Given: by_step. The restart is from the newest usable checkpoint, or from step 0.

    C5 A restart loses the steps since the newest checkpoint that can be loaded
       completely and whose weights are right on all ranks. If no restart is needed, no
       steps are lost.
    In torch.distributed: nothing; torchrun restarts the script, which must know
    Example: SAVED 5 10 15, REFUSED 15, all ranks completed 17 → 17 - 10 = 7 steps
    Check: distlab check 4.12
    """
    # TODO(drill.incident)
    # which checkpoints would you trust, given the cause and its step?
    raise NotImplementedError("drill.incident")


def incident(reports: Sequence[Report], events: Sequence[Event]) -> Incident:
    """Say what went wrong in a run, and what to do.

    Given: both are in the order of their times; every rank has a report, and there are
    at least three ranks. Ranks may have any numbers; a run need not begin with step 1.
    No two ranks have the same fault at the same time.

    It is the first of damage, stopped_process, TORN, straggler and NOTHING. TORN has
    the rank and the step of the REFUSED checkpoint of the highest step. The action is
    ACTIONS[what].
    Check: distlab check 4.12
    """
    # TODO(drill.incident)
    # a refused checkpoint changes what is lost, also if something else is the cause
    raise NotImplementedError("drill.incident")


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(f"{file}: {incident(*read_run(file))}")
