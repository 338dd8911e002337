"""A number of samples per step, or a learning rate, that depends on how many ranks.

How it knows: the same script runs on n ranks and on one. The samples of all ranks in
the first step are counted, by the loader's batches or by the rows that forward() gets.
If there are k times as many, the learning rate should be k or √k times as high; if
there are as many, it should be the same.
Silent: if the script couldn't run on one rank, or not all steps can be counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distlab.audit import source
from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog
from distlab.audit.places import Place
from distlab.audit.trial import (
    Trial,
    between_steps,
    loader_of,
    steps,
    training_loaders,
    trains,
)

_NEAR = 1e-6
_WORLD = r"world_size|WORLD_SIZE|num_gpus|n_gpus|ngpus|nprocs|num_ranks|device_count"


def find(trial: Trial) -> Iterator[Finding]:
    """Return at most one finding."""
    if trial.one is None or not trial.is_data_parallel():
        return
    many, one = trial.pair.logs, trial.one.logs
    batch, batch_alone = _samples_per_step(many), _samples_per_step(one)
    first, alone = steps(many[0])[:1], steps(one[0])[:1]
    if not batch or not batch_alone or not first or not alone:
        return
    rates, rates_alone = first[0]["lr"], alone[0]["lr"]
    if not rates or not rates_alone or not rates_alone[0]:
        return
    k, r = batch / batch_alone, rates[0] / rates_alone[0]
    n = trial.world_size
    if _near(r, 1) and k > 1 + _NEAR and k > n / 2:
        at = _batch_line(many[0])
        if at is not None:
            yield Finding(
                at,
                "global-batch",
                f"a step takes {batch:g} samples with {n} ranks, but {batch_alone:g} "
                f"with one, at the same learning rate of {rates[0]:g}",
                "divide the batch size by the number of ranks, or scale the learning "
                "rate with it",
            )
    elif not _near(r, 1) and not any(_near(r, x) for x in (k, math.sqrt(k))):
        made = next(iter(many[0].of("optimizer")), None)
        if made is not None and made.at is not None:
            yield Finding(
                source.assigned_at(made.at, "lr", _WORLD) or made.at,
                "learning-rate",
                f"the learning rate is {rates[0]:g} with {n} ranks and "
                f"{rates_alone[0]:g} with one, but a step takes {batch:g} and "
                f"{batch_alone:g} samples, respectively",
                "scale the learning rate with the samples per step, or not at all",
            )


def _near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_NEAR)


def _samples_per_step(logs: list[AuditLog]) -> float:
    """Return the samples of all ranks in the first step, 0 if nobody counted them."""
    total = 0
    for log in logs:
        kind = "batch" if training_loaders(log) else "forward"
        events = between_steps(log, kind)
        if not events:
            return 0
        rows = [
            event["rows"] for event in events[0] if kind == "batch" or trains(event)
        ]
        if not rows:
            return 0
        total += sum(rows)
    return total


def _batch_line(log: AuditLog) -> Place | None:
    for number in sorted(training_loaders(log)):
        made = loader_of(log, number)
        if made is not None:
            return made.at
    forward = next((e for e in log.of("forward") if e["training"]), None)
    return forward.at if forward else None
