"""Checks of the unit `process_group`: what is played, and what is said about it."""
