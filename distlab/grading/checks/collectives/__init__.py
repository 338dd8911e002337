"""Checks of the unit `collectives`: 1.1 to 1.4, 1.14, 1.17 and 1.18."""
