"""Checks of the unit `activation_checkpointing`, a file per task."""

from distlab.grading.checks.checkpoint import there_and_back
from distlab.grading.checks.first_function import scale_and_back
from distlab.grading.checks.ported_checkpoint import asked_for, ported_blocks

__all__ = ["asked_for", "ported_blocks", "scale_and_back", "there_and_back"]
