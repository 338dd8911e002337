"""Checks of the unit `topology`: what was foretold, built for nodes, and chosen.

Forecasts and choices are judged against formulas that stand in `topology_forms`; the
simulator bears these out. What sends is judged on real ranks, and counted on many
simulated ones.
"""

from distlab.grading.checks.topology_choose import choose_all
from distlab.grading.checks.topology_doubling import double_all
from distlab.grading.checks.topology_nodes import over_nodes
from distlab.grading.checks.topology_estimate import foretell

__all__ = ["choose_all", "double_all", "foretell", "over_nodes"]
