"""Checks of task 3.33, `planning.goodput`: what failures cost."""

from __future__ import annotations

from distlab.grading.checks.planning.asked import answers, expect_answers
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, on_ranks

TASK = "planning.goodput"
INTERVAL = on_ranks(answers, function="checkpoint_interval_s")
SPARE = on_ranks(answers, function="no_spare_probability")
GOODPUT = on_ranks(answers, function="goodput")


@clause(TASK, "C1", worlds=(1,), runs=[INTERVAL])
def the_interval_is_youngs(runs: Runs) -> str | None:
    """Short and long ones."""
    return expect_answers(runs, "checkpoint_interval_s")


@clause(TASK, "C2", worlds=(1,), runs=[SPARE])
def spares_may_be_used_up(runs: Runs) -> str | None:
    """Without spare nodes, with one, and with many."""
    return expect_answers(runs, "no_spare_probability")


@clause(TASK, "C3", worlds=(1,), runs=[GOODPUT], after=["C1", "C2"])
def a_failure_costs_this_much(runs: Runs) -> str | None:
    """One GPU, a node, and many nodes."""
    return expect_answers(runs, "goodput", "mtbf_s", "interval_s", "lost_s")


@clause(TASK, "C4", worlds=(1,), runs=[GOODPUT], after=["C1", "C2", "C3"])
def a_share_is_left(runs: Runs) -> str | None:
    """The same jobs."""
    return expect_answers(runs, "goodput", "share")


@clause(TASK, "C5", worlds=(1,), runs=[GOODPUT], after=["C1", "C2", "C3", "C4"])
def time_and_price(runs: Runs) -> str | None:
    """The same jobs."""
    return expect_answers(runs, "goodput", "wall_s", "price")
