"""Checks of the unit `monitoring`: recorded steps, and steps that ranks record.

What ranks recorded is drawn from the seed: the numbers of ranks are not 0 … n - 1, they
come in any order, a rank has no samples, a loss is nan.
"""
