"""Run on each rank for the walkthrough of phase 1; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.comm import Comm
from distlab.data.digits import load_digits_split
from distlab.models.mlp import make_mlp
from distlab.runner import RankContext
from distlab.training.digits_rank import (
    Mode,
    accuracy_of,
    in_a_row,
    shuffled,
    step_alone,
    step_summed,
)

RATE = 0.2
"""The learning rate of the digits' baseline."""
_ROUNDS = 5  # of a measurement, of which the median counts

# ── messages and collectives ────────────────────────────────────────────────────────


def ring(
    context: RankContext, unit: ModuleType, *, seed: int = 0, order: str, num_bytes: int
) -> None:
    """Send to the right and receive from the left on every rank, in this order."""
    comm = context.comm
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    if order == "your ring_shift":
        unit.ring_shift(comm, outgoing, incoming)
        return
    receives_first = {
        "all ranks send first": False,
        "rank 0 receives first": comm.rank == 0,
        "odd ranks receive first": comm.rank % 2 == 1,
    }[order]
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size
    if receives_first:
        comm.recv(incoming, left)
        comm.send(outgoing, right)
    else:
        comm.send(outgoing, right)
        comm.recv(incoming, left)


def one_collective(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    function: str,
    num_elements: int,
) -> None:
    """Run one of the learner's collectives, whose largest tensor has `num_elements`."""
    comm, n = context.comm, context.world_size
    full = torch.ones(num_elements // n * n)
    chunk = torch.ones(num_elements // n)
    if function in ("broadcast", "tree_broadcast"):
        getattr(unit, function)(comm, full, 0)
    elif function == "all_reduce":
        unit.all_reduce(comm, full)
    if "reduce_scatter" in function:
        unit.reduce_scatter(comm, chunk, full)
    if "all_gather" in function:
        unit.all_gather(comm, full, chunk)


def split_sum(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_elements: int,
    num_calls: int,
) -> float:
    """Measure the seconds of the learner's all_reduce, split into equal calls."""
    buckets = torch.ones(num_elements).chunk(num_calls)

    def action() -> None:
        for bucket in buckets:
            unit.all_reduce(context.comm, bucket)

    return _median_s(context.comm, action)


def one_split_sum(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_elements: int,
    num_calls: int,
) -> None:
    """Run the same split sum once, for a simulated clock."""
    for bucket in torch.ones(num_elements).chunk(num_calls):
        unit.all_reduce(context.comm, bucket)


def _median_s(comm: Comm, action: Callable[[], Any]) -> float:
    action()  # the first one opens connections
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def timed_step(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    global_batch_size: int,
    sample_s: float,
    num_elements: int,
) -> None:
    """Take a step by the simulated clock: compute this rank's samples, then sum."""
    count = len(range(context.rank, global_batch_size, context.world_size))
    context.clock.sleep(count * sample_s)
    unit.all_reduce(context.comm, torch.ones(num_elements))


# ── samples ─────────────────────────────────────────────────────────────────────────


def coverage(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_samples: int,
    num_ranks: int,
    num_epochs: int,
) -> dict[str, list[int]]:
    """Count how many different samples rank 0 has read after each epoch."""
    counts: dict[str, list[int]] = {"set_epoch called": [], "never called": []}
    for name, numbers in counts.items():
        sampler = unit.DistributedSampler(num_samples, 0, num_ranks)
        seen: set[int] = set()
        for epoch in range(num_epochs):
            if name == "set_epoch called":
                sampler.set_epoch(epoch)
            seen |= {int(sample) for sample in sampler}
            numbers.append(len(seen))
    return counts


# ── training ────────────────────────────────────────────────────────────────────────


class Shards:
    """This rank's equal shard of each global batch, except an incomplete last one."""

    def __init__(self, rank: int, world_size: int, global_batch_size: int) -> None:
        self._data = load_digits_split()
        self._rank, self._world_size = rank, world_size
        self._size, self._epoch = global_batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self._data.train_targets)
        order = shuffled(0, self._epoch, count)[: count - count % self._size]
        for batch in order.split(self._size):
            mine = batch[self._rank :: self._world_size]
            yield self._data.train_inputs[mine], self._data.train_targets[mine]


def fit_digits(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    global_batch_size: int,
    num_epochs: int,
) -> tuple[list[float], Tensor]:
    """Run the learner's `fit` on the digits; return losses and this rank's weights."""
    comm = context.comm
    model = make_mlp(seed=comm.rank)  # fit makes them equal
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = Shards(comm.rank, comm.world_size, global_batch_size)
    losses = unit.fit(
        comm, model, optimizer, cross_entropy, loader, num_epochs, lambda line: None
    )
    return [float(loss) for loss in losses], in_a_row(model)


def weights_by_epoch(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    mode: Mode,
    learning_rate: float,
    num_epochs: int,
) -> tuple[list[Tensor], float]:
    """Return this rank's weights after each epoch, and its final accuracy."""
    comm, data = context.comm, load_digits_split()
    step = {"alone": step_alone, "summed": step_summed}.get(mode, unit.train_step)
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    shards, history = Shards(comm.rank, comm.world_size, 64), []
    for epoch in range(num_epochs):
        shards.set_epoch(epoch)
        for inputs, targets in shards:
            step(comm, model, optimizer, cross_entropy, inputs, targets)
        history.append(in_a_row(model).clone())
    return history, accuracy_of(model, data)


def errors_of_means(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    first_counts: tuple[int, ...],
    batch_size: int,
    sort_by_class: bool,
) -> dict[str, list[float]]:
    """Return how far two means are from the batch's gradient, by rank 0's count.

    There are two ranks, and the errors are relative to the length of that gradient.
    """
    data = load_digits_split()
    inputs, targets = data.train_inputs[:batch_size], data.train_targets[:batch_size]
    if sort_by_class:
        order = targets.argsort(stable=True)
        inputs, targets = inputs[order], targets[order]
    expected = _gradient(make_mlp(), inputs, targets)
    errors: dict[str, list[float]] = {"average_gradients": [], "average_weighted": []}
    for first in first_counts:
        mine = slice(first) if context.rank == 0 else slice(first, None)
        count = len(targets[mine])
        for name, row in errors.items():
            model = make_mlp()
            _gradient(model, inputs[mine], targets[mine])
            if name == "average_gradients":
                unit.average_gradients(context.comm, model)
            else:
                unit.average_weighted(context.comm, model, count)
            actual = _gradients_in_a_row(model)
            row.append(float((actual - expected).norm() / expected.norm()))
    return errors


def evaluate_digits(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    counts: tuple[int, ...],
    weights: tuple[float, ...],
) -> dict[str, float]:
    """Return this rank's own accuracy and the result of the learner's `evaluate`.

    Rank 0 has the first samples of the held-out digits, which are sorted by class.
    """
    data, model = load_digits_split(), make_mlp()
    torch.nn.utils.vector_to_parameters(
        torch.tensor(weights, dtype=torch.float64), model.parameters()
    )
    start = sum(counts[: context.rank])
    order = data.held_out_targets.argsort(stable=True)
    mine = order[start : start + counts[context.rank]]
    inputs, targets = data.held_out_inputs[mine], data.held_out_targets[mine]
    with torch.no_grad():
        correct = int((model(inputs).argmax(dim=1) == targets).sum())
    metrics = unit.evaluate(context.comm, model, cross_entropy, [(inputs, targets)])
    return {
        "samples": len(mine),
        "correct": correct,
        "evaluate": float(metrics.accuracy),
    }


def _gradient(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the mean gradient in the model, which is zero without samples."""
    if len(targets):
        cross_entropy(model(inputs), targets).backward()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return _gradients_in_a_row(model)


def _gradients_in_a_row(model: torch.nn.Module) -> Tensor:
    rows = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    return torch.cat(rows).clone()
