"""Run on each rank for the lab of phase 4; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from distlab.given.monitoring import checksum, read_spans
from distlab.runner import RankContext

DATA_S, COMPUTE_S = 0.020, 0.100
NUM_BYTES = 8 << 20
NUM_SAMPLES = 16


def recorded_step(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> dict[int, dict[str, float]]:
    """Take one step in virtual time, and return the shares of every rank."""
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


def hidden_faults(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_steps: int,
    flipped: tuple[int, int],
    poisoned: tuple[int, int],
) -> dict[str, Any]:
    """Take steps with faults, at (rank, step): a changed weight and a nan.

    The simulator adds the slow rank. Returns this rank's knowledge at the end, which is
    the suspects and the milliseconds of each rank in the last step.
    """
    comm, clock = context.comm, context.clock
    weights = torch.ones(1024, dtype=torch.float64)
    timer, history = unit.StepTimer(clock.now_s), []
    for step in range(num_steps):
        timer.reset()
        with timer.measure("data"):
            clock.sleep(DATA_S)
        with timer.measure("compute"):
            draw = random.Random(1000 * comm.rank + step)
            clock.sleep(COMPUTE_S * draw.uniform(0.95, 1.05))
        gradient = torch.full_like(weights, 1.0 + comm.rank)
        if (comm.rank, step) == poisoned:
            gradient[0] = math.nan
        num_nonfinite = unit.reduce_gradients(comm, timer, [gradient])
        weights -= 0.01 * gradient
        if (comm.rank, step) == flipped:
            weights[1] += 1e-12
        seconds = (timer.seconds[part] for part in unit.PARTS)
        record = unit.Record(
            comm.rank, *seconds, 2.0, NUM_SAMPLES, num_nonfinite, checksum([weights])
        )
        history.append(unit.gather_records(comm, record))
    named = unit.suspects(history)
    return {
        "named": {field: list(getattr(named, field)) for field in named._fields},
        "ms": [[1000 * part for part in record[1:4]] for record in history[-1]],
    }


def read_traces(
    context: RankContext, unit: ModuleType, *, seed: int = 0, files: tuple[str, ...]
) -> dict[str, tuple[dict[str, float], str]]:
    """Return milliseconds of compute and communication by name, and the cause."""
    found = {}
    for file in files:
        communication, compute = read_spans(file)
        lanes = {"compute": compute, "communication": communication}
        row = {
            lane: sum(end - start for start, end in unit.merge(own)) / 1000
            for lane, own in lanes.items()
        }
        row["exposed"] = float(unit.exposed_us(communication, compute)) / 1000
        found[Path(file).stem] = (
            row,
            str(unit.explain_exposed(communication, compute)),
        )
    return found
