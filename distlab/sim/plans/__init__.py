"""Explicit schedules, their formulas, and recorded runs replayed with other speeds."""
