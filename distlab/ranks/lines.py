"""Constants that the worker of simulated ranks shares with its parent."""

from __future__ import annotations

GRACE_S = 1.0
"""How long a run that we can't break off may continue after its time limit."""

PLACE = "place"
"""A file with one byte, the rank that ran last. It tells us who caused a crash."""

STACKS = "stacks"
"""Python writes its stack into this file if it crashes or runs out of time."""
