"""What the parent of simulated ranks and their worker both know."""

from __future__ import annotations

GRACE_S = 1.0
"""How long after its time limit a run that we can't break off may still go on."""

PLACE = "place"
"""The file with one byte, the rank that ran last: all that a crash leaves behind."""

STACKS = "stacks"
"""The file into which Python writes the stack of a crash, or of an endless loop."""
