"""Run a program on simulated ranks, in this process, and say how it ended.

    from distlab.sim import AlphaBeta, run
    done = run(program, 256, net=AlphaBeta(alpha_s=5e-6, bytes_per_s=1e9))
    done.time_s, done.trace, done.values

`program` is a function of a `RankContext`, the same that `Cluster.run` takes, and what
comes back is the same `Run`: every judgement on real ranks holds for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from distlab.comm import Factory
from distlab.runner import Limits
from distlab.sim.carriers import CarrierName
from distlab.sim.faults import Faults
from distlab.sim.generators import DrewLate, Generators
from distlab.sim.kernel import MustMove
from distlab.sim.net.links import AlphaBeta, Network
from distlab.sim.payload import Payload
from distlab.sim.results import MAX_RANKS, Setup, SimRun
from distlab.sim.simulation import Simulation

__all__ = ["MAX_RANKS", "SimRun", "run"]


def run(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: Network | None = None,
    seed: int = 0,
    journal: bool = True,
    limits: Limits | None = None,
    on_report: Callable[[int, Any], None] | None = None,
    carrier: Literal["auto"] | CarrierName = "auto",
    payload: Payload = "real",
    eager_bytes: int = 0,
    faults: Faults | None = None,
    trace: bool = True,
    isolate: bool = False,
    wall_limit_s: float | None = None,
    turn_limit_s: float | None = None,
    services: Mapping[str, Factory] | None = None,
    belongings: Callable[[], Generators] | None = None,
    on_output: Callable[[int, str], None] | None = None,
) -> SimRun:
    """Run `program(context, *args)` on `world_size` simulated ranks to its end.

    Each rank gets a copy of `args` and a torch generator seeded with `seed` + rank. Of
    `limits` hold what is kept per rank, and `seconds`, virtual here, as the limit
    beyond which a timeout counts as none. Without a journal a run is several times
    as fast, and less can be said about how it ended.

    `carrier` is what ranks are made of: "greenlets" are fast and cannot call comm
    inside backward(), "threads" can. "auto" begins with greenlets; the first such call
    ends that attempt, and the whole run starts over on threads. It also starts over if
    a rank draws its first random number only after others had their turn. What the
    ranks printed and reported until then is forgotten (so reports are passed on at the
    end); what they did to module globals, files and the like is not.

    `payload` is explained there. Messages of up to `eager_bytes` are sent before anyone
    receives them; at 0, as on gloo, none is. `faults` say what goes wrong. Without
    `trace` messages leave no record, and a million of them takes no memory. `isolate`
    gives each rank its own environment (with RANK, LOCAL_RANK and WORLD_SIZE in it) and
    its own numbers from `random` and `numpy.random`. After `wall_limit_s` seconds by
    the wall clock a run is broken off; so it is when one rank goes on for
    `turn_limit_s` without a call that waits, as a loop without an end does.

    `services` are nodes that are no ranks, by their names, with what makes each; ranks
    call them by name. Faults can name them, and "store", the node of `context.store`.

    `belongings` makes what is swapped when ranks are, by default torch's generator.
    What a rank prints goes to `on_output(rank, text)` as well as into its record.

    Raises:
        ValueError: fewer than 1 or more than 4,096 ranks, an unknown carrier or
            payload, a negative number of bytes, faults of ranks that do not exist, a
            limit by the wall clock that is not above 0.
        RunnerError: the package greenlet is not installed, or the wall clock ran out.
    """
    if carrier not in ("auto", "greenlets", "threads"):
        raise ValueError(
            f'carrier {carrier!r}: choose "auto", "greenlets" or "threads"'
        )
    setup = Setup(
        world_size=world_size,
        net=net or AlphaBeta(),
        limits=limits,
        journal=journal,
        seed=seed,
        payload=payload,
        eager_bytes=eager_bytes,
        faults=faults or Faults(),
        trace=trace,
        isolate=isolate,
        wall_limit_s=wall_limit_s,
        turn_limit_s=turn_limit_s,
        services=services or {},
        belongings=belongings,
        on_output=on_output,
    )
    tell = on_report or (lambda rank, value: None)
    if carrier != "auto":
        return Simulation(setup, carrier, tell).run(program, args)
    done, told = _first_that_can(setup, program, args)
    for report in told:
        tell(*report)
    return done


def _first_that_can(
    setup: Setup, program: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[SimRun, list[tuple[int, Any]]]:
    """The run, in the fastest way in which it can be done, and what was reported."""
    told: list[tuple[int, Any]] = []
    way: dict[str, Any] = {"can_move": True, "lazy": True}
    carrier: CarrierName = "greenlets"
    while True:
        simulation = Simulation(
            setup, carrier, lambda *report: told.append(report), **way
        )
        try:
            return simulation.run(program, args), told
        except DrewLate:
            way["lazy"] = False
        except MustMove:
            carrier, way = "threads", {}
        told.clear()
