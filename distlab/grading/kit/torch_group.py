"""What the `port` tasks share: a real gloo group, and how a run in it got stuck."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distlab.grading.kit.stuck import name_of_stuck
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 5, 1)
PATIENCE_S = 8.0  # a rank waits this long in one call: under load, meeting takes time


def join(context: RankContext) -> None:
    """Be in torch's default process group, as if torchrun had started this rank."""
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group("gloo")


def finished(runs: Runs, scenario: Scenario | RunSpec, **values: Any) -> Run:
    """The run of a scenario that joins; calls are torch's own, so none are recorded.

    Raises:
        NotYetError: it did not come to its end; how it got stuck, if it did.
    """
    try:
        return runs.finished(scenario, **values)
    except NotYetError as error:
        run = error.run
        named = name_of_stuck(run, runs.source, PATIENCE_S) if run else None
        raise named or error from error
