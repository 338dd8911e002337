"""The reference runs beside: what its record of the same scenario tells of another's.

observe.py       in each rank: a scenario twice, its calls watched, its work counted
modes.py         models in the mode that their caller did not choose
fingerprints.py  what an object looks like, so that a change can be seen
standing.py      the judges of every task: cost, side effects, a second call
"""
