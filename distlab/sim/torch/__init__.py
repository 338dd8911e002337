"""torch.distributed code on simulated ranks, unmodified, in virtual time.

    from distlab.sim import AlphaBeta
    from distlab.sim import torch as sim_torch

    def train():                       # any torch.distributed code: DDP, FSDP2, …
        model = DDP(Model())
        ...
    done = sim_torch.run(train, 64, net=AlphaBeta(), flops_per_s=1e13)
    done.time_s, done.values, done.explanation

Each rank is a thread of this process, one runs at a time. Communication takes the time
that the network says, compute that of its floating-point operations: both the same on
every machine. The groups are there from the start; init_process_group may be called.

Limits: this rests on private names of torch (see patches), so it runs on the versions
it was tested on. Work done between ranks outside of process groups (files, sockets,
a TCPStore made by hand) is not simulated. Streams do not exist on CPU: what FSDP2 hides
behind compute on GPUs, it waits for here, as it does with gloo.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from distlab.runner import RankContext, RunnerError
from distlab.sim.faults import Faults
from distlab.sim.net.links import Network
from distlab.sim.run import SimRun
from distlab.sim.run import run as simulate

if TYPE_CHECKING:
    from distlab.sim.torch.fake.account import Account
    from distlab.sim.torch.fake.world import FakeWorld
    from distlab.sim.torch.played import Cast

TESTED = ("2.11", "2.12", "2.13", "2.14")
"""The versions of torch whose private names are known to be as they are used here."""

_BUSY = threading.Lock()
# On a CPU build it says that triton's kernels, of which there are none, don't count.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

__all__ = ["TESTED", "memory", "now_s", "run"]


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: Network | None = None,
    flops_per_s: float = 1e13,
    per_node: int | None = None,
    is_initialized: bool = True,
    fake: bool = False,
    played: Collection[int] | None = None,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> SimRun:
    """Run `fn(*args)`, torch.distributed code, on each of `world_size` simulated ranks.

    `flops_per_s` is how fast one rank computes. `per_node` is the number of ranks on
    each node, from which LOCAL_RANK and its like follow; by default all are on one.
    Unless `is_initialized`, there is no group until init_process_group has been called,
    as in a script. `prepare(rank)` is called with each `distlab.sim.torch.rank.Rank` in
    its thread, before `fn`.

    With `fake`, tensors have no memory and operators compute nothing: a model may be
    larger than this machine, and `memory()` says what it would take. The values of such
    tensors nobody knows, and code that decides by one is refused. Then only the ranks
    in `played` (and those with faults) need execute the program; the others do as one
    of these does, see `played`. By default all are played.

    `options` are those of `distlab.sim.run` (faults, journal, limits, seed, …);
    `values` has what `fn` returned on each rank.

    Raises:
        ValueError: a speed that is not above 0, some ranks played without `fake`, nodes
            that do not divide the ranks, a run inside of another one, a carrier or
            payload, of which there is one only, and what `distlab.sim.run` refuses.
        RunnerError: this version of torch is not a tested one.
    """
    require_tested(torch.__version__)
    if played is not None and not fake:
        raise ValueError("played is for fake tensors: with real ones all ranks differ")
    if not flops_per_s > 0:
        raise ValueError(f"flops_per_s is {flops_per_s}: it must be above 0")
    per_node = per_node or world_size
    if per_node < 1 or world_size % per_node:
        raise ValueError(
            f"{world_size} ranks cannot be on nodes of {per_node} ranks each"
        )
    if chosen := sorted({"carrier", "payload"} & options.keys()):
        raise ValueError(
            f"{chosen[0]} cannot be chosen: torch.distributed code runs on threads and "
            "with real tensors"
        )
    if not _BUSY.acquire(blocking=False):
        raise ValueError(
            "sim.torch.run was called while another one runs: one at a time, because "
            "torch keeps its groups once per process"
        )
    try:
        from distlab.sim.torch.fake.world import FakeWorld
        from distlab.sim.torch.patches import installed
        from distlab.sim.torch.played import Cast
        from distlab.sim.torch.shared_store import SharedStore

        world = FakeWorld() if fake else None
        cast = None
        if played is not None:
            apart = _struck(options.get("faults"))
            cast = Cast(world_size, played, apart)
        outer = dict(vars(os.environ)["_data"])
        settings = _Settings(
            1 / flops_per_s, per_node, is_initialized, prepare, outer, world, cast
        )
        program = partial(_live, fn, SharedStore(), settings)
        with installed(), world.installed() if world else nullcontext():
            done = simulate(
                program,
                world_size,
                *args,
                net=net,
                carrier="threads",
                **options,
            )
        return done if world is None else _with_memory(done, world, cast)
    finally:
        _BUSY.release()


def now_s() -> float:
    """Virtual seconds since the start of the run, on the rank that asks.

    Raises:
        ValueError: no simulated rank asks.
    """
    from distlab.sim.torch.rank import here

    rank = here()
    if rank is None:
        raise ValueError("now_s() is the clock of a simulated rank: call it in one")
    return rank.now_s()


def memory() -> Account:
    """The bytes of the rank that asks, by what they are for, in a run with `fake`.

    Raises:
        ValueError: no simulated rank with fake tensors asks.
    """
    from distlab.sim.torch.rank import here

    rank = here()
    if rank is None or rank.fake is None:
        raise ValueError("memory() is of a simulated rank, in a run with fake=True")
    rank.fake.sort()
    account: Account = rank.fake.account
    return account


def require_tested(version: str) -> None:
    """Refuse a version of torch on which nobody has tried this.

    Raises:
        RunnerError: it is none of TESTED, and DISTLAB_SIM_TORCH is not `force`.
    """
    minor = ".".join(version.split(".")[:2])
    if minor in TESTED or os.environ.get("DISTLAB_SIM_TORCH") == "force":
        return
    raise RunnerError(
        f"sim.torch is tested with torch {', '.join(TESTED)}, this is {version}: "
        "install one of those, or set DISTLAB_SIM_TORCH=force to try"
    )


def _struck(faults: Faults | None) -> set[int]:
    """The ranks that faults make differ from the others."""
    named = faults.nodes().values() if faults else ()
    return {node for nodes in named for node in nodes if isinstance(node, int)}


def _with_memory(done: SimRun, world: FakeWorld, cast: Cast | None) -> SimRun:
    """The run with the memory of all ranks, also of those that followed others."""
    memory = dict(world.memory)
    ranks = done.ranks
    if cast is not None:
        ranks = cast.everyone(ranks)
        memory = {rank: memory.get(of, {}) for rank, of in enumerate(cast.leader_of)}
    return replace(
        done,
        ranks=ranks,
        memory=tuple(memory.get(rank, {}) for rank in range(done.world_size)),
        played=tuple(cast.played) if cast else tuple(range(done.world_size)),
        unlike=tuple(cast.unlike(done.ranks)) if cast else (),
    )


@dataclass(frozen=True)
class _Settings:
    """What all ranks of a run are told."""

    seconds_per_flop: float
    per_node: int
    is_initialized: bool
    prepare: Callable[[Any], None] | None
    environment: dict[bytes, bytes]
    world: FakeWorld | None
    cast: Cast | None


def _live(
    fn: Callable[..., Any],
    shared: Any,
    settings: _Settings,
    context: RankContext,
    *args: Any,
) -> Any:
    """One rank's life."""
    from distlab.sim.torch.flops import ChargeFlops
    from distlab.sim.torch.patches import RankWorld, environment_of
    from distlab.sim.torch.rank import Rank, settle_in

    if settings.cast is not None and not settings.cast.is_played(context.comm.rank):
        return None
    rank = Rank(context, shared, settings.seconds_per_flop)
    rank.cast = settings.cast
    rank.world = RankWorld()
    rank.environment = environment_of(
        rank.number, rank.world_size, settings.per_node, settings.environment
    )
    rank.per_node = settings.per_node
    settle_in(rank)
    try:
        if settings.prepare is not None:
            settings.prepare(rank)
        if settings.is_initialized:
            torch.distributed.init_process_group("gloo")
            rank.world.is_ours = True
        if settings.world is not None:
            rank.fake = settings.world.home(rank.charge)
        with rank.fake.compute if rank.fake else ChargeFlops(rank):
            value = fn(*args)
        rank.settle()
        return value
    finally:
        if rank.fake is not None:
            rank.fake.close(rank.number)
        settle_in(None)
