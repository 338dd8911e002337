"""Programs of ranks that do nothing for a while, in a module that is imported soon.

What a test's own module imports would count as idle time where the limit is a second.
"""

from __future__ import annotations

import os
import time

import torch

from distlab.runner import RankContext


def sleeps_on_rank_1(context: RankContext) -> None:
    if context.comm.rank == 1:
        time.sleep(60.0)
    context.comm.barrier()


def sleeps_while_others_wait(context: RankContext) -> None:
    context.comm.barrier()
    context.comm.all_reduce(torch.ones(1))
    if context.comm.rank == 1:
        time.sleep(60.0)
    context.comm.isend(torch.ones(1), 1).wait() if context.comm.rank else None
    context.comm.all_reduce(torch.ones(1))


def goes_on(context: RankContext) -> None:
    for step in range(10**6):
        context.report(os.getpid())
        context.comm.all_reduce(torch.ones(1))
        time.sleep(0.01 if step else 0.0)


def speaks_for_a_while(context: RankContext) -> str:
    for _ in range(6):
        time.sleep(0.3)
        context.report("still here")
    return "done"
