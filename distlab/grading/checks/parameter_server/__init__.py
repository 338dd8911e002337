"""Checks of the unit `parameter_server`."""
