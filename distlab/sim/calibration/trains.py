"""The trains that `calibrate` runs again and again, on processes and in the simulator.

A train does one thing several times without a pause. Its time per piece is the time
that a program sees if it does this in a loop. A single piece would mostly measure how
two processes find each other.

    one way          0 ──▶ 1   0 ──▶ 1   0 ──▶ 1 …
    back and forth   0 ──▶ 1   0 ◀── 1   0 ──▶ 1 …      half of a round trip
    both ways        0 ◀─▶ 1 + 0 ◀─▶ 1 + 0 ◀─▶ 1 …      without the +
    adding           0 ◀─▶ 1 + 0 ◀─▶ 1 + 0 ◀─▶ 1 …      the + alone

When two messages cross, we add them up on arrival, as programs do. That way the times
of messages include the effect of adding on the caches, and we add data that has just
arrived instead of data that was already in a cache.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.runner import RankContext
from distlab.sim.plans import schedules

Case = tuple[str, int, int]
"""The kind of a train, its number of bytes, and how often it repeats."""

WARM_ROUNDS = 1
LEAST_ROUNDS = 3
_TRAIN_BYTES = 1 << 21
_LONGEST_TRAIN = 20


def case(name: str, num_bytes: int) -> Case:
    """Return a train, which is longer if its pieces are short.

    Raises:
        ValueError: there is no train with that name.
    """
    if name not in STEPS:
        raise ValueError(f"there is no train of {name}: known are {', '.join(STEPS)}")
    count = _TRAIN_BYTES // max(1, num_bytes)
    return name, num_bytes, min(_LONGEST_TRAIN, max(2, count))


def measure(
    context: RankContext, cases: Sequence[Case], seconds: float
) -> list[list[float]]:
    """Return the seconds of each case on this rank, round by round; collective.

    Every round runs every case once, so that a disturbance affects all cases alike. The
    order changes from round to round, because after small messages TCP sends large ones
    in smaller portions, which stay in the caches. We continue until `seconds` have
    passed on rank 0's clock.
    """
    take_a_processor(context.rank, context.world_size)
    comm = context.comm
    most = max(num_bytes for _, num_bytes, _ in cases)
    tensor, box = torch.zeros(most // 4), torch.zeros(most // 4)
    rounds: list[list[float]] = []
    until = comm.time() + seconds
    go_on = torch.ones(1)
    while go_on:
        order = random.Random(len(rounds)).sample(range(len(cases)), len(cases))
        took = {i: train(comm, cases[i], tensor, box) for i in order}
        rounds.append([took[i] for i in range(len(cases))])
        enough = len(rounds) >= WARM_ROUNDS + LEAST_ROUNDS
        go_on.fill_(not (enough and comm.time() >= until))
        comm.broadcast(go_on, 0)
    return rounds[WARM_ROUNDS:]


def take_a_processor(rank: int, world_size: int) -> None:
    """Stay on a processor of one's own, if there are enough.

    On a quiet machine, the ranks are spread out in this way without our help. On a busy
    one, they end up on the same processor, where they keep each other from running.
    """
    if not hasattr(os, "sched_setaffinity"):  # Linux only
        return
    processors = sorted(os.sched_getaffinity(0))
    if world_size <= len(processors):
        os.sched_setaffinity(0, {processors[rank]})


def simulate(context: RankContext, one: Case) -> float:
    """Return the virtual seconds of one piece on a simulated rank."""
    room = one[1] // 4
    return train(context.comm, one, torch.zeros(room), torch.zeros(room))


def train(comm: Comm, one: Case, tensor: Tensor, box: Tensor) -> float:
    """Return the seconds per piece of a train, after an untimed first piece."""
    name, num_bytes, count = one
    # What one cannot find in a cache must not depend on what the round did before.
    tensor, box = tensor[: num_bytes // 4], box[: num_bytes // 4]
    step = STEPS[name]
    comm.barrier()
    step(comm, tensor, box)
    adding_s, started = 0.0, comm.time()
    for _ in range(count):
        adding_s += step(comm, tensor, box) or 0.0
    whole_s = comm.time() - started
    return (adding_s if name == ADDING else whole_s - adding_s) / count


def _one_way(comm: Comm, tensor: Tensor, box: Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
    elif comm.rank == 1:
        comm.recv(box, 0)


def _back_and_forth(comm: Comm, tensor: Tensor, box: Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
        comm.recv(box, 1)
    elif comm.rank == 1:
        comm.recv(box, 0)
        comm.send(tensor, 0)


def _cross_and_add(comm: Comm, tensor: Tensor, box: Tensor) -> float:
    """Exchange and add; return the seconds of adding."""
    n = comm.world_size
    comm.sendrecv(tensor, (comm.rank + 1) % n, box, (comm.rank - 1) % n)
    started = comm.time()
    tensor += box
    return comm.time() - started


def _all_gather(comm: Comm, tensor: Tensor, box: Tensor) -> None:
    schedules.ring_all_gather(comm, schedules.split(tensor, comm.world_size))


ONE_WAY, BACK_AND_FORTH = "one way", "back and forth"
BOTH_WAYS, ADDING = "both ways", "adding"
STEPS: dict[str, Callable[[Comm, Tensor, Tensor], float | None]] = {
    ONE_WAY: _one_way,
    BACK_AND_FORTH: _back_and_forth,
    BOTH_WAYS: _cross_and_add,
    ADDING: _cross_and_add,
    "ring all-reduce": lambda comm, t, _: schedules.ring_all_reduce(comm, t),
    "recursive doubling": lambda comm, t, _: schedules.recursive_doubling_all_reduce(
        comm, t
    ),
    "parameter server": lambda comm, t, _: schedules.parameter_server(comm, t),
    "tree broadcast": lambda comm, t, _: schedules.tree_broadcast(comm, t),
    "ring all-gather": _all_gather,
}
ALGORITHMS = tuple(STEPS)[4:]
"""Algorithms that a table doesn't contain, and that test its predictions."""
