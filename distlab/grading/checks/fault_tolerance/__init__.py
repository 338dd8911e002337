"""Checks of the unit `fault_tolerance`: every crash of a simulated disk is tried.

One process plays all ranks in the simulator, on one disk that they share.
"""
