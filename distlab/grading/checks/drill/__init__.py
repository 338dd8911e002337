"""Checks of the unit `drill`: recorded runs, with ranks and steps renumbered.

What was injected stands in each file, so the right answer is known from the fault and
not from a second analysis.
"""
