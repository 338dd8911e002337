"""Checks of the unit `ring_allreduce`: 3.1 to 3.5, each in a file of its own or two."""
