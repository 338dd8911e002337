"""Checks of the unit `mixed_precision`, a file per task.

The gradients are random numbers that 16 bits can hold and whose sums they cannot, and
each step is plain SGD done by the check: an optimizer that divides by the
gradient's size would hide a forgotten division.
"""
