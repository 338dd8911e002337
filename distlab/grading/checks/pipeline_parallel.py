"""Checks of the unit `pipeline_parallel`: the plans, and the executor that runs them.

A schedule is judged as a list: played by a clock of whole units, exactly, on as many
ranks as one likes. The executor is judged on real ranks, and for time on simulated
ones.
"""

from distlab.grading.checks.pipeline_execute import run_schedules
from distlab.grading.checks.pipeline_plans import make_schedules
from distlab.grading.checks.ported_pipeline import ported_pipeline

__all__ = ["make_schedules", "ported_pipeline", "run_schedules"]
