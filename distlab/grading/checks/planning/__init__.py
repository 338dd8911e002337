"""Checks of the unit `planning`: numbers, compared with those of `forms`.

The questions in `questions` are few that tell most, and many that are drawn.
"""
