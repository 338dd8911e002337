"""Checks of the unit `activation_checkpointing`, a file per task."""
