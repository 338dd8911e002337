"""Virtual time: a scenario on simulated ranks.

That is exact, the same on every machine, and can be had for more ranks than there are
processors. The code under judgement runs in a process of its own here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

from distlab.curriculum import load_graft
from distlab.curriculum.compiled import received
from distlab.grading.guard import install
from distlab.grading.kernel import perform_simulated
from distlab.grading.runs import Network
from distlab.runner import RankContext
from distlab.runner.rank import resolve
from distlab.sim import AlphaBeta, SimRun
from distlab.sim import run as simulate


class Settings(TypedDict):
    """The network of a run, as it travels to the process that simulates it."""

    world_size: int
    bytes_per_s: float
    added_bytes_per_s: float
    seed: int


def settings_of(network: Network, seed: int) -> Settings:
    """`network` and the seed of the run."""
    return Settings(
        world_size=network.world_size,
        bytes_per_s=network.bytes_per_s,
        added_bytes_per_s=network.added_bytes_per_s,
        seed=seed,
    )


def play_in_virtual_time(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    scenario: str,
    values: dict[str, Any],
    settings: Settings,
    protected: dict[str, list[str]],
) -> dict[str, Any]:
    """The program of that process."""
    install(**protected, doors=())
    module = load_graft(received(source), received(reference), grafts)
    start: Callable[..., SimRun] = simulate
    if settings["added_bytes_per_s"] < math.inf:
        from distlab.sim.calibration.charge import run_charged

        cost_s = 1 / settings["added_bytes_per_s"]
        start = partial(run_charged, operation_s=lambda num_bytes: num_bytes * cost_s)
    run = start(
        partial(perform_simulated, module, resolve(scenario), values, source["builds"]),
        settings["world_size"],
        net=AlphaBeta(alpha_s=0.0, bytes_per_s=settings["bytes_per_s"]),
        seed=settings["seed"],
        journal=False,
    )
    return {
        "outcome": run.outcome,
        "explanation": run.explanation,
        "time_s": run.time_s,
        "values": run.values,
    }
