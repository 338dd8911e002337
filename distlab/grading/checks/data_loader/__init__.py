"""Checks of the unit `data_loader`, a file or two per task.

The tasks are plans: each rank works out by itself what it reads. So one process works
out the plans of all ranks, for many world sizes at once, and they are laid side by
side. What a real process has for itself, its random numbers above all, is made to
differ from one plan to the next.
"""
