"""Run `imagenet_trainer` and `drill` in a rank for the lab of phase 4.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from distlab.given.drill import read_run
from distlab.given.imagenet_trainer import Job, NoAverage, NoScaler
from distlab.grading.checks.imagenet_trainer.parts import (
    Loader,
    NotingEngine,
    Scheduler,
)
from distlab.runner import RankContext


def weights_of_samples(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_samples: tuple[int, ...],
    num_parts: int,
) -> tuple[list[int], list[float]]:
    """Return this rank's microbatches, and how much each of its samples counts.

    Input i is 1 in place i and 0 elsewhere, so weight i gets its gradient from sample i
    alone. With the learning rate 1, the step shows this gradient.
    """
    rank, total = context.rank, sum(num_samples)
    first = sum(num_samples[:rank])
    model = nn.Linear(total, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = NotingEngine(context.comm, model)
    job = Job(
        comm=context.comm,
        model=model,
        engine=engine,
        optimizer=optimizer,
        scheduler=Scheduler(optimizer),
        loader=Loader(0, []),
        loss_fn=lambda outputs, targets: (outputs - targets).mean(),
        evaluate=lambda model: None,
        scaler=NoScaler(),
        average=NoAverage(),
        grad_accum_steps=num_parts,
    )
    own = torch.eye(total, dtype=torch.float64)[first : first + num_samples[rank]]
    unit.train_step(job, own, torch.zeros(len(own), 1, dtype=torch.float64))
    moved = -model.weight.detach().flatten()
    return engine.sizes, moved[first : first + num_samples[rank]].tolist()


def told_by_step(
    context: RankContext, unit: ModuleType, *, seed: int = 0, file: str
) -> list[tuple[int, tuple[Any, ...]]]:
    """Return incident's answer about a recorded run after each step."""
    reports, events = read_run(file)
    steps = sorted({report.step for report in reports})
    found = []
    for last in steps:
        known = [report for report in reports if report.step <= last]
        until_s = max(report.time_s for report in known)
        if last == steps[-1]:
            until_s = float("inf")  # the end: all that the agent saw
        seen = [event for event in events if event.time_s <= until_s]
        found.append((last, tuple(unit.incident(known, seen))))
    return found
