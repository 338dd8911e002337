"""Checks of the unit `gradient_accumulation`, a file per task."""
