"""Checks of the unit `mixed_precision`, a file per task.

The gradients are random numbers that 16 bits can hold and whose sums they cannot, and
each step is plain SGD done by the check: an optimizer that divides by the
gradient's size would hide a forgotten division.
"""

from distlab.grading.checks.loss_scaler import (
    all_or_none_step,
    same_staircase,
    unscaled_once,
)
from distlab.grading.checks.master_weights import (
    mean_in_float32,
    model_is_the_master_rounded,
    tiny_updates_add_up,
)
from distlab.grading.checks.ported_precision import ported_precision

__all__ = [
    "all_or_none_step",
    "mean_in_float32",
    "model_is_the_master_rounded",
    "ported_precision",
    "same_staircase",
    "tiny_updates_add_up",
    "unscaled_once",
]
