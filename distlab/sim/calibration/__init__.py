"""Measure this machine, and check predictions against it."""
