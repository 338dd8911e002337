"""Written-down schedules, their formulas, and runs played again with other speeds."""
