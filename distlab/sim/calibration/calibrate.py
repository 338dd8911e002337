"""Measure the link between two processes of this machine, and test the table.

    with Cluster() as cluster:
        found = calibrate(cluster)
    found.net.save("laptop.json")       → distlab sim … --net table:laptop.json
    found.mean_err                      how far off its predictions are, on average

We measure trains of messages in one direction and in both, and additions. Then we
predict algorithms, at sizes between those of the table, so that nothing in the table is
fitted to them. We measure both in the same rounds, so that noise affects both alike.
For both, only the fast rounds count, because a disturbance can only add time.

We hold only the predictions for two processes to a limit. If there are more processes
than processors, they take turns, and the table of a link can't know what that costs. We
predict and show these as well.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.runner import Cluster, Limits, RunnerError
from distlab.sim.calibration.charge import run_charged
from distlab.sim.calibration.trains import (
    ADDING,
    ALGORITHMS,
    BACK_AND_FORTH,
    BOTH_WAYS,
    ONE_WAY,
    Case,
    case,
    measure,
    simulate,
)
from distlab.sim.net.piecewise import Piecewise

KIB, MIB = 1024, 1024**2
DEFAULT_S = 20.0
MISS = 0.10
"""A prediction with a larger error is a miss, and so is a larger mean error."""

_COUNTS = 4  # one round in so many: the quick ones, and of those the mean
_AFTER_S = 60.0  # a round that has begun is ended, on the slowest machine too


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The cases to measure; the table has no held-out size, nor half of one."""

    sizes: tuple[int, ...] = (
        *(0, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB),
        # Buffers and caches end here, and the line bends: rows stand closer.
        *(256 * KIB, 362 * KIB, 512 * KIB, 724 * KIB, MIB, 1448 * KIB),
        *(2 * MIB, 4 * MIB, 8 * MIB),
    )
    held_out: tuple[int, ...] = (
        *(6 * KIB, 96 * KIB, 384 * KIB, 3 * MIB // 2, 6 * MIB),
    )
    more_ranks: tuple[int, ...] = (3, 4)
    held_out_more_ranks: tuple[int, ...] = (6 * KIB, 384 * KIB, 6 * MIB)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One held-out case: an algorithm, its predicted time and its measured time."""

    algorithm: str
    world_size: int
    num_bytes: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error; 0.1 means that we predicted a tenth too much."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_miss(self) -> bool:
        """True if the prediction is off by more than a tenth, either way."""
        return abs(self.error) > MISS


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The table of this machine, and how well it predicts.

    `rounds` counts how often we measured everything. `unrest` says by how much longer a
    median round took than the rounds that count, so it is near 0 on a quiet machine.
    """

    net: Piecewise
    proof: tuple[Prediction, ...]
    rounds: int
    unrest: float
    cores: int

    @property
    def mean_err(self) -> float:
        """The mean error of the predictions for two processes."""
        return self.mean_err_of(2)

    def mean_err_of(self, world_size: int) -> float:
        """Return the mean error for another number of processes; NaN without any."""
        errors = [abs(p.error) for p in self.proof if p.world_size == world_size]
        return statistics.fmean(errors) if errors else math.nan

    @property
    def latency_s(self) -> float:
        """Seconds that the smallest message takes."""
        return self.net.table[0][1]

    @property
    def bytes_per_s(self) -> float:
        """The speed of the largest message in one direction."""
        size, seconds = self.net.table[-1]
        return size / seconds


def calibrate(
    cluster: Cluster,
    seconds: float = DEFAULT_S,
    *,
    plan: Measurements | None = None,
    backend: str = "tcp",
) -> Calibration:
    """Measure for about `seconds`, but for a few rounds at least.

    Raises:
        ValueError: `seconds` isn't above 0.
        RunnerError: the processes didn't finish; the message says why.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"{seconds:g} seconds: choose a number above 0")
    plan = plan or Measurements()
    shares = {2: 0.7 if plan.more_ranks else 1.0}
    shares |= {n: 0.3 / len(plan.more_ranks) for n in plan.more_ranks}
    timings = {
        n: _measured(cluster, n, _cases(plan, n), share * seconds, backend)
        for n, share in shares.items()
    }
    net = _table(plan.sizes, timings[2])
    return Calibration(
        net=net,
        proof=tuple(_proof(net, timings)),
        rounds=timings[2].rounds,
        unrest=timings[2].unrest,
        cores=_usable_cores(),
    )


def predict(net: Piecewise, world_size: int, one: Case) -> float:
    """Return the seconds of one piece of a train on simulated ranks."""
    done = run_charged(
        simulate,
        world_size,
        one,
        operation_s=net.operation_s,
        net=net,
        journal=False,
        carrier="greenlets",
    )
    done.require_finished()
    seconds: list[float] = done.values
    return max(seconds)


@dataclass(frozen=True, kw_only=True)
class _Timings:
    seconds: dict[Case, float]
    rounds: int
    unrest: float


def _cases(plan: Measurements, world_size: int) -> list[Case]:
    """Return what the ranks do in one round."""
    held_out = plan.held_out if world_size == 2 else plan.held_out_more_ranks
    cases = [case(name, size) for size in held_out for name in ALGORITHMS]
    if world_size == 2:
        kinds = (ONE_WAY, BACK_AND_FORTH, BOTH_WAYS, ADDING)
        cases += [case(kind, size) for size in plan.sizes for kind in kinds]
    if world_size & (world_size - 1):
        cases = [one for one in cases if one[0] != "recursive doubling"]
    return cases


def _measured(
    cluster: Cluster, world_size: int, cases: list[Case], seconds: float, backend: str
) -> _Timings:
    run = cluster.run(
        measure,
        world_size,
        cases,
        seconds,
        limits=Limits(seconds=seconds + _AFTER_S),
        backend=backend,
        journal=False,
    )
    if run.outcome != "finished":
        failed = run.primary()
        why = failed.error.message if failed and failed.error else run.explanation
        raise RunnerError((why.splitlines() or [run.outcome])[0])
    # It took as long as its slowest rank: ranks x rounds x cases → rounds of each case.
    by_round = [
        list(map(max, zip(*ranks, strict=True)))
        for ranks in zip(*run.values, strict=True)
    ]
    by_case = [sorted(column) for column in zip(*by_round, strict=True)]
    quick = math.ceil(len(by_round) / _COUNTS)
    low = [statistics.fmean(column[:quick]) for column in by_case]
    return _Timings(
        seconds=dict(zip(cases, low, strict=True)),
        rounds=len(by_round),
        unrest=statistics.median(
            statistics.median(column) / counts - 1
            for column, counts in zip(by_case, low, strict=True)
        ),
    )


def _table(sizes: Sequence[int], timings: _Timings) -> Piecewise:
    def column(kind: str, share: float = 1.0) -> tuple[float, ...]:
        found = [share * timings.seconds[case(kind, size)] for size in sizes]
        # More bytes take no less: what says otherwise was disturbed.
        return tuple(min(found[i:]) for i in range(len(found)))

    return Piecewise(
        table=tuple(zip(sizes, column(ONE_WAY), strict=True)),
        back_and_forth_s=column(BACK_AND_FORTH, 0.5),
        both_ways_s=column(BOTH_WAYS),
        adding_s=column(ADDING),
    )


def _proof(net: Piecewise, timings: dict[int, _Timings]) -> list[Prediction]:
    return [
        Prediction(
            algorithm=one[0],
            world_size=world_size,
            num_bytes=one[1],
            predicted_s=predict(net, world_size, one),
            measured_s=measured_s,
        )
        for world_size, found in timings.items()
        for one, measured_s in found.seconds.items()
        if one[0] in ALGORITHMS
    ]


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
