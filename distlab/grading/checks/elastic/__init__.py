"""Checks of the unit `elastic`."""
