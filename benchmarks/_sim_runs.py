"""What `benchmarks/sim.py` runs in the simulator, and how long that took here.

Every run is also checked against its closed form: fast and wrong would be no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._sim_bare import bare
from distlab.comm import Comm
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.faults import Faults
from distlab.sim.payload import Sized
from distlab.sim.plans import closed_forms as forms
from distlab.sim.plans import schedules as sched
from distlab.sim.plans.replay import record

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
FAST: dict[str, Any] = {"net": NET, "journal": False, "trace": False}
NODE_SIZE = 64  # ranks that share a fast net, in the run with 4,096 of them
CALM = 1.1  # how far apart two bare runs may be
SCENARIOS, STRAGGLER_RANKS, SIMULATED = 1000, 64, 5


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Processor seconds of this process, and how far the run is off its formula.

    `limit_s` is what the program takes where a message is a switch and a copy.
    """

    cpu_s: float
    rel_err: float
    limit_s: float | None = None
    is_calm: bool = True


def timed(expected_s: float, simulate: Callable[[], SimRun]) -> Timed:
    """Run once, with the processor's clock beside it."""
    started = time.process_time()
    done = simulate()
    cpu_s = time.process_time() - started
    done.require_finished()
    return Timed(cpu_s=cpu_s, rel_err=off_by(done.time_s, expected_s))


def off_by(seconds: float, expected_s: float) -> float:
    """The relative error of a time."""
    return abs(seconds / expected_s - 1)


# ── large runs ──────────────────────────────────────────────────────────────────────


def beside_limit(bare_s: Callable[[], float], simulate: Callable[[], Timed]) -> Timed:
    """A run between two of its program on bare greenlets.

    Other programs take the caches away, and so even processor seconds grow on a busy
    machine, those of a large program more than those of a small one. Both bare runs
    take the same if nothing of the kind has changed meanwhile: then the pair counts.
    """
    before = bare_s()
    done = simulate()
    after = bare_s()
    is_calm = max(before, after) <= CALM * min(before, after)
    return replace(done, limit_s=(before + after) / 2, is_calm=is_calm)


def ring(context: RankContext, tensor: Tensor) -> None:
    """The written-down schedule, which does without the data."""
    sched.ring_all_reduce(context.comm, tensor)


def ring_as_written(context: RankContext, count: int) -> float:
    """Ring all-reduce as a learner writes it, with tensors that are there."""
    comm = context.comm
    n, right, left = comm.world_size, comm.rank + 1, comm.rank - 1
    tensor = torch.full((count,), float(comm.rank))
    chunks = tensor.chunk(n)
    received = torch.empty_like(chunks[0])
    for step in range(n - 1):
        out, into = (comm.rank - step) % n, (comm.rank - step - 1) % n
        comm.sendrecv(chunks[out], right % n, received, left % n)
        chunks[into].add_(received)
    for step in range(n - 1):
        out, into = (comm.rank - step + 1) % n, (comm.rank - step) % n
        comm.sendrecv(chunks[out], right % n, chunks[into], left % n)
    return float(tensor.sum())


def hierarchical(context: RankContext, tensor: Tensor, node_size: int) -> None:
    sched.hierarchical_all_reduce(context.comm, tensor, node_size)


def ring_of_sizes(n: int) -> Timed:
    """Messages that have a size and no content."""
    data = torch.zeros(16 * n)
    form_s = forms.ring_all_reduce_s(n, data.nbytes, NET)
    return beside_limit(
        lambda: bare(ring, n, Sized(data.nbytes))[0],
        lambda: timed(form_s, lambda: run(ring, n, data, payload="size", **FAST)),
    )


def ring_of_tensors(n: int) -> Timed:
    """Sixteen float32 in a message; the sums must be right."""
    count = 16 * n
    form_s = forms.ring_all_reduce_s(n, 4 * count, NET)

    def expect_sums(values: Sequence[Any]) -> None:
        total = count * n * (n - 1) / 2
        if any(off_by(value, total) > 1e-6 for value in values):
            raise SystemExit(f"{total} was to come out, not {set(values)}")

    def simulate() -> SimRun:
        done = run(ring_as_written, n, count, **FAST)
        expect_sums(done.values)
        return done

    def bare_s() -> float:
        limit_s, sums = bare(ring_as_written, n, count)
        expect_sums(sums)
        return limit_s

    return beside_limit(bare_s, lambda: timed(form_s, simulate))


def hierarchical_of_sizes(n: int, node_size: int = NODE_SIZE) -> Timed:
    """All-reduce in two levels, on one net for both."""
    data = torch.zeros(4 * n)
    form_s = forms.hierarchical_s(n // node_size, node_size, data.nbytes, NET, NET)
    return timed(
        form_s, lambda: run(hierarchical, n, data, node_size, payload="size", **FAST)
    )


# ── closed forms ────────────────────────────────────────────────────────────────────

Program = Callable[[Comm, Tensor], None]
Form = Callable[[int, int], float]
WORLDS = (2, 3, 4, 8, 16, 64, 256)
COUNT = 256 * 3 * 10  # float32; every one of these divides it
POWERS_ONLY = ("recursive doubling", "Rabenseifner")
PROGRAMS: dict[str, Program] = {
    "ring": sched.ring_all_reduce,
    "recursive doubling": sched.recursive_doubling_all_reduce,
    "Rabenseifner": sched.rabenseifner_all_reduce,
    "tree": sched.tree_all_reduce,
    "parameter server": sched.parameter_server,
}


def _formula(name: str) -> Form:
    return lambda n, num_bytes: forms.ALL_REDUCES[name](n, num_bytes, NET)


FORMS: dict[str, tuple[Program, Form]] = {
    **{name: (program, _formula(name)) for name, program in PROGRAMS.items()},
    "hierarchical": (
        lambda comm, t: sched.hierarchical_all_reduce(comm, t, _node(comm.world_size)),
        lambda n, size: forms.hierarchical_s(n // _node(n), _node(n), size, NET, NET),
    ),
    "tree broadcast": (sched.tree_broadcast, lambda n, s: forms.tree_s(n, s, NET)),
    "tree reduce": (sched.tree_reduce, lambda n, s: forms.tree_s(n, s, NET)),
    "ring reduce-scatter": (
        lambda comm, t: sched.ring_reduce_scatter(comm, t.chunk(comm.world_size)),
        lambda n, size: forms.ring_reduce_scatter_s(n, size, NET),
    ),
}


def _node(n: int) -> int:
    return min(4, n) if n % min(4, n) == 0 else 1


def closed_form_errors(
    table: dict[str, tuple[Program, Form]] = FORMS, worlds: tuple[int, ...] = WORLDS
) -> dict[str, float]:
    """The relative error of each schedule on each number of ranks, as `ring, 8`."""
    errors = {}
    for name, (program, form) in table.items():
        for n in worlds:
            if name in POWERS_ONLY and n & (n - 1):
                continue
            done = run(_call, n, program, torch.zeros(COUNT), net=NET, journal=False)
            done.require_finished()
            errors[f"{name}, {n}"] = off_by(done.time_s, form(n, 4 * COUNT))
    return errors


def _call(context: RankContext, program: Program, tensor: Tensor) -> None:
    program(context.comm, tensor)


# ── stragglers ──────────────────────────────────────────────────────────────────────


def training_steps(context: RankContext) -> None:
    """Three steps: compute for a millisecond, then average 64 KiB around a ring."""
    gradient = torch.zeros(16 * 1024)
    for _ in range(3):
        context.clock.sleep(1e-3)
        sched.ring_all_reduce(context.comm, gradient)


def stragglers(
    n: int = STRAGGLER_RANKS, scenarios: int = SCENARIOS
) -> tuple[float, float]:
    """Processor seconds to record once and replay; error of a few against real runs."""
    random = np.random.default_rng(0)
    slow = random.random((scenarios, n)) < 2 / n
    factors = np.where(slow, 1 + 4 * random.random((scenarios, n)), 1.0)
    started = time.process_time()
    replayed = record(training_steps, n, net=NET).replay(factors)
    cpu_s = time.process_time() - started
    errors = [
        off_by(float(replayed[i]), _simulated_s(n, factors[i]))
        for i in range(min(SIMULATED, scenarios))
    ]
    return cpu_s, max(errors)


def _simulated_s(n: int, factors: Any) -> float:
    faults = Faults(straggler={r: float(f) for r, f in enumerate(factors) if f != 1})
    done = run(training_steps, n, net=NET, faults=faults, journal=False)
    done.require_finished()
    return done.time_s
