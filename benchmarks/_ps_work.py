"""What the workers of `benchmarks/ps.py` do, on processes and in virtual time alike.

Each push adds a digit of its own in base 16 to the weights of every server. So the
weights say how often each push was applied, exactly, and at which clock each worker is:
what `_ps_observer` judges by comes from them, and not from what a server says.

What happens is noted as rows, in the order in which a worker sees it:

    [kind, rank, server, number, time_s, weights]

"started" after all are there, "acked" and "pulled" when the reply has come, "final" at
the end. `number` is that of the worker's last push, `weights` of a pull only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.given.parameter_server import Worker
from distlab.runner import RankContext

Row = list[Any]
Plan = dict[str, Any]
"""Plain data, for it travels to the processes.

servers     names of the services
seconds     by rank: what a gradient takes, as a sleep
pushes      by rank: how many it makes
patience_s  after which a worker sends a message again
dies        ranks that the others do not wait for at the end
bound       of SSP; None: no bound
lease_s     see `_ps_servers`
end_s       in virtual time: when the weights are read at the end; None: with the store
"""
STARTED, ACKED, PULLED, FINAL = "started", "acked", "pulled", "final"
_DIGITS = 12  # of base 16 in one element: below 2^53 sums of float64 are exact
BASE = 16


def most_pushes(plan: Plan) -> int:
    """Of one worker."""
    return int(max(plan["pushes"]))


def num_elements(plan: Plan) -> int:
    """How long the weights are."""
    num_digits = len(plan["pushes"]) * most_pushes(plan)
    return -(-num_digits // _DIGITS)


def place(plan: Plan, rank: int, number: int) -> tuple[int, int]:
    """The element of a push, and its digit there."""
    return divmod(rank * most_pushes(plan) + number - 1, _DIGITS)


def gradient(plan: Plan, rank: int, number: int) -> Tensor:
    """One at the digit of this push, zeros elsewhere."""
    values = torch.zeros(num_elements(plan), dtype=torch.float64)
    element, digit = place(plan, rank, number)
    values[element] = float(BASE**digit)
    return values


def counts(plan: Plan, weights: Sequence[float]) -> list[list[int]]:
    """By rank: how often each of its pushes was applied, the first one first.

    Raises:
        ValueError: a weight that no pushes give.
    """
    wrong = [value for value in weights if value < 0 or value != int(value)]
    if wrong or len(weights) != num_elements(plan):
        raise ValueError(f"weights that are no sum of pushes: {wrong[:3]}")
    most, found = most_pushes(plan), []
    for rank in range(len(plan["pushes"])):
        places = [place(plan, rank, number) for number in range(1, most + 1)]
        found.append([int(weights[e]) // BASE**digit % BASE for e, digit in places])
    return found


def work(context: RankContext, plan: Plan, note: Callable[[Row], object]) -> None:
    """One worker: compute, push to each server, pull from each, and again.

    At the end, when all that still live have pushed, it reads the weights once more.
    """
    assert context.endpoint
    assert context.store
    rank, clock, store = context.rank, context.clock, context.store
    names, patience_s = plan["servers"], plan["patience_s"]
    servers = [Worker(context.endpoint, clock, name, patience_s) for name in names]
    if plan["end_s"] is None:
        store.set(f"ready{rank}", b"")
        store.wait([f"ready{other}" for other in range(context.world_size)])
    note([STARTED, rank, -1, 0, clock.now_s(), []])
    for number in range(1, plan["pushes"][rank] + 1):
        clock.sleep(plan["seconds"][rank])
        for which, server in enumerate(servers):
            server.push(gradient(plan, rank, number))
            note([ACKED, rank, which, number, clock.now_s(), []])
        for which, server in enumerate(servers):
            weights = server.pull().tolist()
            note([PULLED, rank, which, number, clock.now_s(), weights])
    if plan["end_s"] is None:
        store.set(f"done{rank}", b"")
    _wait_for_all(context, plan)
    for which, server in enumerate(servers):
        weights = server.pull().tolist()
        note([FINAL, rank, which, server.num_pushes, clock.now_s(), weights])


def _wait_for_all(context: RankContext, plan: Plan) -> None:
    if plan["end_s"] is not None:
        context.clock.sleep(max(0.0, plan["end_s"] - context.clock.now_s()))
        return
    assert context.store
    alive = set(range(context.world_size)) - set(plan["dies"])
    context.store.wait([f"done{rank}" for rank in sorted(alive)])


def on_processes(context: RankContext, plan: Plan) -> None:
    """The same, where rows go to the parent at once: a killed worker's are there."""
    work(context, plan, context.report)
