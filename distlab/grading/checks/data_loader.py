"""Checks of the unit `data_loader`, a file or two per task.

The tasks are plans: each rank works out by itself what it reads. So one process works
out the plans of all ranks, for many world sizes at once, and they are laid side by
side. What a real process has for itself, its random numbers above all, is made to
differ from one plan to the next.
"""

from distlab.grading.checks.data_loader_batches import steps_are_those_of_one_process
from distlab.grading.checks.data_loader_resume import goes_on_with_the_next
from distlab.grading.checks.data_loader_sampler import ranks_share_one_shuffle
from distlab.grading.checks.data_loader_seeds import workers_draw_their_own
from distlab.grading.checks.data_loader_shards import shares_are_even

__all__ = [
    "goes_on_with_the_next",
    "ranks_share_one_shuffle",
    "shares_are_even",
    "steps_are_those_of_one_process",
    "workers_draw_their_own",
]
