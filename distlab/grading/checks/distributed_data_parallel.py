"""Checks of the unit `distributed_data_parallel`, a file per task."""

from distlab.grading.checks.ddp_buckets import carry, lay_out
from distlab.grading.checks.ddp_finish import hold_back, take_steps
from distlab.grading.checks.ddp_hooks import step_once
from distlab.grading.checks.ddp_unused import run_out, take_branches

__all__ = [
    "carry",
    "hold_back",
    "lay_out",
    "run_out",
    "step_once",
    "take_branches",
    "take_steps",
]
