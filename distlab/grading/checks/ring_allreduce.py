"""Checks of the unit `ring_allreduce`: 3.1 to 3.5, each in a file of its own or two."""

from distlab.grading.checks import ring_bounds, ring_plans, ring_segments, ring_sums

__all__ = ["ring_bounds", "ring_plans", "ring_segments", "ring_sums"]
