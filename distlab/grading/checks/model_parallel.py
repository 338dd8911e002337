"""Checks of the unit `model_parallel`, a file per task."""

from distlab.grading.checks.model_parallel_partition import every_layer_has_its_stage
from distlab.grading.checks.model_parallel_step import step_stages

__all__ = ["every_layer_has_its_stage", "step_stages"]
