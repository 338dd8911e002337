"""Checks of the unit `recovery`: recorded and drawn reports, and scripts of faults."""
