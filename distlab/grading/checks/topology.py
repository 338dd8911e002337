"""Checks of the unit `topology`: estimates, the two levels, and choices.

Estimates and choices are judged against the formulas in `topology_forms`; the simulator
confirms these. Functions that send are judged on real ranks, and their messages are
counted on many simulated ranks.
"""

from distlab.grading.checks.topology_choose import choose_all
from distlab.grading.checks.topology_doubling import double_all
from distlab.grading.checks.topology_estimate import estimate_all
from distlab.grading.checks.topology_nodes import over_nodes

__all__ = ["choose_all", "double_all", "estimate_all", "over_nodes"]
