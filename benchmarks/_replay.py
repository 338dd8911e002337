"""Which wrong solutions of the catalogue record exactly what some code has recorded?

They play the same scenario, with the same numbers, on ranks of the simulator's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.curriculum import Curriculum, load_graft
from distlab.curriculum.units import arrived, travelling
from distlab.grading.catalogue import Entry, read_catalogue
from distlab.grading.guard import install
from distlab.grading.harness import PlayedRuns, off_limits
from distlab.grading.kernel import perform_simulated
from distlab.grading.runs import RunSpec
from distlab.runner import Limits, RankContext, Run, RunCancelledError, RunnerError
from distlab.runner.rank import resolve
from distlab.sim import run as simulate

LIMIT_S = 30.0
TOLERANCE = 1e-9  # relative: the kernel's ranks may add up in another order


def alike(
    task: str, spec: RunSpec, run: Run, runs: PlayedRuns, curriculum: Curriculum
) -> list[Entry]:
    """The wrong solutions that record what the learner's code has recorded."""
    known = [
        entry
        for entry in read_catalogue(curriculum, unit=task.partition(".")[0])
        if entry.task == task and entry.is_mutant and not entry.limit_s
    ]
    texts = [entry.applied_to(runs.impl.reference.text) for entry in known]
    told: dict[int, list[Any]] = {}

    def keep(_rank: int, report: Any) -> None:
        told[report[0]] = report[1]

    try:
        runs.cluster.run(
            play_each,
            1,
            travelling(runs.impl.reference),
            texts,
            spec.name,
            {"seed": runs.seed, **dict(spec.values)},
            {"world_size": runs.world_size, "seed": runs.seed},
            off_limits(runs.impl),
            limits=Limits(seconds=LIMIT_S),
            on_report=keep,
            seed=runs.seed,
            journal=False,
        )
    except (RunnerError, RunCancelledError):
        return []
    return [
        entry
        for number, entry in enumerate(known)
        if number in told and same(told[number], run.values)
    ]


def play_each(
    context: RankContext,
    reference: dict[str, str],
    texts: Sequence[str],
    scenario: str,
    values: dict[str, Any],
    settings: dict[str, int],
    protected: dict[str, Any],
) -> None:
    """In a process of its own: each text in the kernel; what its ranks recorded."""
    install(**protected)
    for number, text in enumerate(texts):
        source = arrived({**reference, "text": text})
        module = load_graft(source, source, [])
        run = simulate(
            partial(
                perform_simulated, module, resolve(scenario), values, source.builds
            ),
            settings["world_size"],
            seed=settings["seed"],
            limits=Limits(seconds=LIMIT_S),
            journal=False,
        )
        if run.outcome == "finished":
            context.report([number, run.values])


def same(one: object, other: object) -> bool:
    """Whether two records are equal, numbers up to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        a, b = one.detach().double(), other.detach().double()
        return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE * max(1.0, abs(one))
    return one == other
