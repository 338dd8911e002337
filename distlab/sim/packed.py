"""Run a simulation in a process of its own, for code that mustn't run here.

A learner's code can loop forever, crash or exit. A simulation of it is therefore itself
a program on one real rank, under a rank's limits, and it returns plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from distlab.comm import Factory
from distlab.runner import Cluster, ErrorRecord, Limits, RankContext, RankRecord, Run
from distlab.runner.rank import name_of, resolve
from distlab.sim.conditions import Loss
from distlab.sim.faults import Faults
from distlab.sim.messages import Trace
from distlab.sim.net.links import AlphaBeta, Network
from distlab.sim.net.nets import as_data, from_data
from distlab.sim.outages import Struck
from distlab.sim.run import SimRun, run


def run_apart(
    cluster: Cluster,
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: Network | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    on_report: Callable[[int, Any], None] | None = None,
    faults: Faults | None = None,
    services: Mapping[str, Factory] | None = None,
    **how: Any,
) -> SimRun:
    """Call `run` with the simulated ranks in one forked process of `cluster`.

    The function that creates a service must belong to a module, and so must the
    program. `how` are other arguments of `run`, all of them plain data (carrier,
    payload …).

    Raises:
        ValueError: the other process wouldn't know the network.
        RunnerError: that process didn't finish; the message says what ended it.
    """
    name = name_of(program)
    limits = limits or Limits()
    outer = cluster.run(
        simulate,
        1,
        name,
        world_size,
        list(args),
        {
            "seconds": limits.seconds,
            "seed": seed,
            "net": as_data(net or AlphaBeta()),
            "faults": asdict(faults or Faults()),
            "services": {key: name_of(make) for key, make in (services or {}).items()},
            "how": how,
        },
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
    """Run the program of that process."""
    return pack(
        run(
            resolve(name),
            world_size,
            *args,
            net=from_data(settings["net"]),
            seed=settings["seed"],
            limits=Limits(seconds=settings["seconds"]),
            on_report=lambda rank, value: context.report((rank, value)),
            faults=Faults(**settings["faults"]),
            services={key: resolve(make) for key, make in settings["services"].items()},
            **settings["how"],
        )
    )


def pack(done: Run) -> dict[str, Any]:
    """Convert a run to plain data and tensors."""
    facts = {name: getattr(done, name) for name in done.__dataclass_fields__}
    facts["ranks"] = [
        {**vars(record), "error": asdict(record.error) if record.error else None}
        for record in done.ranks
    ]
    trace = facts.get("trace")
    lost = [tuple(loss) for loss in facts.get("lost", ())]
    struck = [(one.kind, one.node, one.at_ps) for one in facts.get("struck", ())]
    rows = list(trace.rows) if trace else []
    return {**facts, "trace": rows, "lost": lost, "struck": struck}


def unpack(facts: dict[str, Any]) -> SimRun:
    """Convert the data from `pack` back to a run."""
    ranks = tuple(
        RankRecord(
            **{**record, "error": record["error"] and ErrorRecord(**record["error"])}
        )
        for record in facts["ranks"]
    )
    trace = Trace([tuple(row) for row in facts["trace"]])
    lost = tuple(Loss(*loss) for loss in facts["lost"])
    struck = tuple(Struck(*one) for one in facts["struck"])
    messages = tuple(tuple(row) for row in facts["service_messages"])
    more = {"lost": lost, "struck": struck, "service_messages": messages}
    return SimRun(**{**facts, "ranks": ranks, "trace": trace, **more})
