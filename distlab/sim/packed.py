"""Simulated runs for code that must not run here: in a process of its own, and back.

Learner code can loop, crash and leave. So a simulation of it is itself a program on
one real rank, under a rank's limits, and what comes back is plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from distlab.runner import Cluster, ErrorRecord, Limits, RankContext, RankRecord, Run
from distlab.runner.rank import resolve
from distlab.sim.links import AlphaBeta
from distlab.sim.run import SimRun, run


def run_apart(
    cluster: Cluster,
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: AlphaBeta | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    on_report: Callable[[int, Any], None] | None = None,
) -> SimRun:
    """`run`, with the simulated ranks in one forked process of `cluster`.

    Raises:
        RunnerError: that process did not come to its end; with what ended it.
    """
    name = f"{program.__module__}:{program.__qualname__}"
    limits = limits or Limits()
    outer = cluster.run(
        simulate,
        1,
        name,
        world_size,
        list(args),
        {"seconds": limits.seconds, "seed": seed, "net": asdict(net or AlphaBeta())},
        limits=replace(limits, memory_bytes=limits.memory_bytes * world_size),
        on_report=(lambda _, told: on_report(*told)) if on_report else None,
        journal=False,
    )
    return unpack(outer.require_finished().values[0])


def simulate(
    context: RankContext,
    name: str,
    world_size: int,
    args: list[Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The program of that process."""
    return pack(
        run(
            resolve(name),
            world_size,
            *args,
            net=AlphaBeta(**settings["net"]),
            seed=settings["seed"],
            limits=Limits(seconds=settings["seconds"]),
            on_report=lambda rank, value: context.report((rank, value)),
        )
    )


def pack(done: Run) -> dict[str, Any]:
    """A run as plain data and tensors."""
    facts = {name: getattr(done, name) for name in done.__dataclass_fields__}
    facts["ranks"] = [
        {**vars(record), "error": asdict(record.error) if record.error else None}
        for record in done.ranks
    ]
    return {**facts, "trace": [tuple(m) for m in facts.get("trace", ())]}


def unpack(facts: dict[str, Any]) -> SimRun:
    """The run that `pack` was given."""
    from distlab.sim.channels import Message

    ranks = tuple(
        RankRecord(
            **{**record, "error": record["error"] and ErrorRecord(**record["error"])}
        )
        for record in facts["ranks"]
    )
    trace = tuple(Message(*message) for message in facts["trace"])
    return SimRun(**{**facts, "ranks": ranks, "trace": trace})
