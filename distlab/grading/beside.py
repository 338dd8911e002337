"""The reference's run beside a learner's that failed, for the picture of it.

The ranks, the scenario and its numbers are the same. It is played when the picture is
drawn, after the verdict, and given up where it would keep the learner waiting.
"""

from __future__ import annotations

from dataclasses import replace

from distlab.grading.harness import PlayedRuns
from distlab.grading.runs import RunSpec
from distlab.runner import Run, RunCancelledError, RunnerError

LIMIT_S = 0.25


def reference_run(runs: PlayedRuns, spec: RunSpec) -> Run | None:
    """The reference's run of `spec`; None where it does not end within LIMIT_S."""
    right = runs.of(runs.impl.reference_alone)
    right.limits = replace(runs.limits, seconds=min(LIMIT_S, runs.limits.seconds))
    try:
        run = right.read(spec)
    except (RunnerError, RunCancelledError):
        return None
    return _without_lines(run) if run.outcome == "finished" else None


def _without_lines(run: Run) -> Run:
    """The same run as if nobody knew its source: the picture must not show that."""
    for record in run.ranks:
        for event in record.journal:
            if "file" in event:
                event["file"], event["line"] = "", 0
    return run
