"""Checks of the unit `collectives`: 1.1 to 1.4, 1.14 and 1.17, a file each or two."""
