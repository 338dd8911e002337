"""Checks of the unit `topology`: estimates, the two levels, and choices.

Estimates and choices are judged against the formulas in `topology_forms`; the simulator
confirms these. Functions that send are judged on real ranks, and their messages are
counted on many simulated ranks.
"""
