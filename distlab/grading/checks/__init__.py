"""A package per unit: its scenarios (run on ranks) and its judges (run here)."""
