"""Run a program on simulated ranks, in this process, and report how it ended.

    from distlab.sim import AlphaBeta, run
    done = run(program, 256, net=AlphaBeta(alpha_s=5e-6, bytes_per_s=1e9))
    done.time_s, done.trace, done.values

`program` is a function of a `RankContext`, like the one that `Cluster.run` takes. We
return the same kind of `Run`, so every judgement of a run on real ranks also works
here.
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
    ranks_per_node: int = 0,
    hide: bool = False,
    times_out: bool = False,
) -> SimRun:
    """Run `program(context, *args)` on `world_size` simulated ranks to its end.

    Each rank gets a copy of `args` and a torch generator seeded with `seed` + rank. Of
    `limits`, we apply those that are kept per rank, and `seconds`, which are virtual
    here: a timeout beyond them counts as no timeout. Without a journal, a run is
    several times as fast, but says less about how it ended.

    `carrier` chooses what ranks run on. "greenlets" are fast but can't call comm inside
    backward(), and "threads" can. "auto" begins with greenlets, and if a rank makes
    such a call, the whole run starts over on threads. It also starts over if a rank
    draws its first random number only after others had their turn. The output and the
    reports of the first attempt are discarded, which is why we pass on reports only at
    the end. Changes that it made to module globals, files and the like remain.

    `payload` is explained in the module of that name. Messages of up to `eager_bytes`
    are sent before anyone receives them; at 0, as on gloo, none are. `faults` says what
    goes wrong. Without `trace`, we don't record messages, so that a million of them
    take no memory. `isolate` gives each rank its own environment (with RANK, LOCAL_RANK
    and WORLD_SIZE in it) and its own numbers from `random` and `numpy.random`. We break
    off a run after `wall_limit_s` seconds by the wall clock, or if one rank runs for
    `turn_limit_s` without a call that waits, for example in an endless loop. With
    `times_out`, we then return a run whose outcome is "timeout". Local ranks count from
    0 on each node of `ranks_per_node`; 0 puts all ranks on one node. With `hide`, a
    dispatch mode in which a rank runs sees only what that rank computes.

    `services` are nodes that aren't ranks: each name comes with a function that creates
    the service, and ranks call it by that name. Faults can name services, and also
    "store", the node of `context.store`.

    Raises:
        ValueError: there are fewer than 1 or more than 4,096 ranks, the carrier or
            payload is unknown, a number of bytes is negative, there are faults of ranks
            that don't exist, or a limit by the wall clock isn't above 0.
        RunnerError: the package greenlet isn't installed, or the wall clock ran out.
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
        ranks_per_node=ranks_per_node,
        hide=hide,
        times_out=times_out,
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
    """Run in the fastest way that works; return the run and its reports."""
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
