"""What units are given: code that is no lesson, and without which one would not hold.

Templates and solutions import from here, as they do from `distlab.comm`. No task asks
for any of it; each module says which unit it serves.
"""
