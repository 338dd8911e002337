"""Code that is given to learners because it isn't part of any lesson.

Templates and solutions import from here, as they do from `distlab.comm`. You never have
to write any of it yourself. Each module is named after the unit that it serves.
"""
