"""Checks of the unit `distributed_data_parallel`, a file per task."""
