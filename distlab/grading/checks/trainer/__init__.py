"""Checks of the unit `trainer`, a file per task.

Everything is float64 and plain SGD. Adam would hide a gradient that is n times too
large, accuracy would hide almost anything, and world size 2 alone would hide a
hard-coded 2; none of them is used as proof.
"""
