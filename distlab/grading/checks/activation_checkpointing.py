"""Checks of the unit `activation_checkpointing`, a file per task."""

from distlab.grading.checks.checkpoint import there_and_back
from distlab.grading.checks.first_function import scale_and_back

__all__ = ["scale_and_back", "there_and_back"]
