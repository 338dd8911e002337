"""Checks of the unit `trainer`, a file per task.

Everything is float64 and plain SGD. Adam would hide a gradient that is n times too
large, accuracy would hide almost anything, and world size 2 alone would hide a
hard-coded 2; none of them is used as proof.
"""

from distlab.grading.checks.average_gradients import average_once
from distlab.grading.checks.broadcast_model import broadcast_once
from distlab.grading.checks.evaluate import evaluate_once
from distlab.grading.checks.fit import fit_once
from distlab.grading.checks.gradient_weight import average_uneven
from distlab.grading.checks.main_program import main_once
from distlab.grading.checks.train_step import train_steps

__all__ = [
    "average_once",
    "average_uneven",
    "broadcast_once",
    "evaluate_once",
    "fit_once",
    "main_once",
    "train_steps",
]
