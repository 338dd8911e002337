"""What each rank does in the lab of phase 4; `unit` is the learner's module.

Scenarios as the autograder's: `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from distlab.runner import RankContext

DATA_S, COMPUTE_S = 0.020, 0.100
NUM_BYTES = 8 << 20
NUM_SAMPLES = 16


def recorded_step(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> dict[int, dict[str, float]]:
    """One step in virtual time; the shares of every rank, as this rank knows them."""
    comm, clock = context.comm, context.clock
    timer = unit.StepTimer(clock.now_s)
    with timer.measure("data"):
        clock.sleep(DATA_S)
    with timer.measure("compute"):
        clock.sleep(COMPUTE_S)
    with timer.measure("communication"):
        comm.all_reduce(torch.ones(NUM_BYTES // 4))
    seconds = (timer.seconds[part] for part in unit.PARTS)
    record = unit.Record(comm.rank, *seconds, 2.0, NUM_SAMPLES)
    report = unit.step_report(unit.gather_records(comm, record))
    return {
        rank: dict(zip(unit.PARTS, map(float, shares), strict=True))
        for rank, shares in report.shares.items()
    }
