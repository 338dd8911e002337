"""Checks of the unit `pipeline_parallel`: the plans, and the executor that runs them.

A schedule is judged as a list: played by a clock of integer units, exactly, on any
number of ranks. The executor is judged on real ranks, and for time on simulated ranks.
"""

from distlab.grading.checks.pipeline_execute import run_schedules
from distlab.grading.checks.pipeline_free import free_alone
from distlab.grading.checks.pipeline_plans import make_schedules
from distlab.grading.checks.pipeline_steps import run_any_order, run_steps
from distlab.grading.checks.ported_pipeline import ported_pipeline

__all__ = [
    "free_alone",
    "make_schedules",
    "ported_pipeline",
    "run_any_order",
    "run_schedules",
    "run_steps",
]
