"""T, the oracle of time: how many messages long a scenario is, on simulated ranks.

On a network where a message takes one second, and a rank's messages in one direction
take turns, the virtual time of a run is the length of its longest chain of messages.
That is exact, the same on every machine, and can be had for more ranks than there are
processors. The code under judgement runs in a process of its own here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived, travelling
from distlab.grading.diagnosis import diagnose
from distlab.grading.guard import install
from distlab.grading.harness import (
    Implementation,
    RankHarness,
    Scenario,
    needed_reference,
    off_limits,
)
from distlab.grading.liveness import perform_simulated
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.rank import name_of, resolve
from distlab.sim import AlphaBeta, SimRun
from distlab.sim import run as simulate


def rounds(
    impl: Implementation,
    bench: RankHarness,
    scenario: Scenario,
    world_size: int,
    num_bytes: int,
    **values: Any,
) -> float:
    """How many messages of `num_bytes` follow each other in `scenario`.

    Raises:
        NotYetError: the simulated ranks did not come to their end.
    """
    told = simulated(impl, bench, scenario, world_size, float(num_bytes), **values)
    return float(told["time_s"])


def simulated(
    impl: Implementation,
    bench: RankHarness,
    scenario: Scenario,
    world_size: int,
    bytes_per_s: float = math.inf,
    added_bytes_per_s: float = math.inf,
    **values: Any,
) -> dict[str, Any]:
    """`time_s` of `scenario`, and the `values` of its ranks; messages have no latency.

    Without `bytes_per_s` they take no time at all, and without `added_bytes_per_s`
    neither does what the ranks compute: see `distlab.sim.calibration.charge`.

    Raises:
        NotYetError: the simulated ranks did not come to their end.
    """
    run = bench.cluster.run(
        play_in_virtual_time,
        1,
        travelling(impl.source),
        needed_reference(impl),
        list(impl.grafts),
        name_of(scenario),
        {"seed": bench.seed, **values},
        {
            "world_size": world_size,
            "bytes_per_s": bytes_per_s,
            "added_bytes_per_s": added_bytes_per_s,
            "seed": bench.seed,
        },
        off_limits(impl),
        limits=bench.limits,
        seed=bench.seed,
        journal=False,
    )
    if run.outcome != "finished":
        raise diagnose(run)
    told: dict[str, Any] = run.values[0]
    if told["outcome"] != "finished":
        raise NotYetError(
            f"on {world_size} simulated ranks: {told['explanation']}", kind="DEADLOCK"
        )
    return told


def play_in_virtual_time(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    scenario: str,
    values: dict[str, Any],
    settings: dict[str, Any],
    protected: dict[str, list[str]],
) -> dict[str, Any]:
    """The program of that process."""
    install(**protected)
    module = load_graft(arrived(source), arrived(reference), grafts)
    start: Callable[..., SimRun] = simulate
    if settings["added_bytes_per_s"] < math.inf:
        from distlab.sim.calibration.charge import run_charged

        cost_s = 1 / settings["added_bytes_per_s"]
        start = partial(run_charged, operation_s=lambda num_bytes: num_bytes * cost_s)
    run = start(
        partial(perform_simulated, module, resolve(scenario), values),
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
