"""Checks of the unit `model_parallel`, a file per task."""
