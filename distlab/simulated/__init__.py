"""What `distlab sim` can run: a task, a function of a unit, or one of a file."""
