"""The corpus, training: loops as one writes them, and the slips that stop them."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.comm import ANY, Comm, ReduceOp
from distlab.runner import RankContext
from tests.corpora.programs.case import flawed, hangs, misfit, raises, right

LR = 0.5


def batches(rank: int, count: int) -> list[Tensor]:
    """Small whole numbers, so that sums are exact in any order."""
    return [torch.arange(4.0) + rank + step for step in range(count)]


def gradient(weight: Tensor, batch: Tensor) -> Tensor:
    """Of the loss batch · weight."""
    return batch.clone()


# ── right ───────────────────────────────────────────────────────────────────────────


def _trained(rank: int, n: int) -> list[float]:
    mean = [sum(i + r + s for r in range(n) for s in range(3)) / n for i in range(4)]
    return [-LR * x for x in mean]


@right(2, 4, gives=_trained)
def data_parallel(ctx: RankContext) -> Tensor:
    """Three steps of averaged gradients."""
    weight = torch.zeros(4)
    for batch in batches(ctx.rank, 3):
        grad = gradient(weight, batch)
        ctx.comm.all_reduce(grad, ReduceOp.AVG)
        weight -= LR * grad
    return weight


@right(2, 3, gives=lambda rank, n: [1.0 + n * (n + 1) / 2.0, 1.0 * n])
def uneven_but_counted(ctx: RankContext) -> list[float]:
    """Rank r has r + 1 batches; all go on until nobody has one, and give zeros."""
    left, steps, total = ctx.rank + 1, 0.0, torch.ones(1)
    while True:
        any_left = torch.tensor([float(left > 0)])
        ctx.comm.all_reduce(any_left, ReduceOp.MAX)
        if not any_left:
            return [float(total), steps]
        grad = torch.tensor([float(left > 0)])
        ctx.comm.all_reduce(grad)
        total += grad
        left, steps = left - 1, steps + 1


@right(2, 3, gives=lambda rank, n: [2.0])
def stops_together(ctx: RankContext) -> list[float]:
    """Rank 0 decides when the loss is small enough, and tells the others."""
    for step in range(5):
        stop = torch.tensor([float(ctx.rank == 0 and step == 2)])
        ctx.comm.broadcast(stop, 0)
        if stop:
            return [float(step)]
    return [5.0]


@right(2, gives=lambda rank, n: [[10.0, 20.0, 30.0], [5.0, 6.0, 7.0]][rank])
def two_stages(ctx: RankContext) -> list[float]:
    """A pipeline: activations go one way, gradients come back."""
    kept = []
    for step in range(3):
        x = torch.tensor([5.0 + step])
        if ctx.rank == 0:
            ctx.comm.send(x, 1)
            ctx.comm.recv(x, 1)
        else:
            ctx.comm.recv(x, 0)
            ctx.comm.send(torch.tensor([10.0 * (step + 1)]), 0)
        kept.append(float(x))
    return kept


@right(3, 4, gives=lambda rank, n: [[-3.0 * (n - 1)], [-1.0 * (n - 1)] * 3][rank > 0])
def parameter_server(ctx: RankContext) -> list[float]:
    """Rank 0 takes three pushes of everyone and answers with the weight."""
    comm, weight, seen = ctx.comm, torch.zeros(1), []
    others = range(1, ctx.world_size)
    for step in range(3):
        if ctx.rank == 0:
            for _ in others:
                grad = torch.zeros(1)
                comm.recv(grad, ANY, tag=step)
                weight -= grad
            for dst in others:
                comm.send(weight, dst, tag=step)
        else:
            before = weight.clone()
            comm.send(torch.ones(1), 0, tag=step)
            comm.recv(weight, 0, tag=step)
            seen.append(float(weight - before))
    return seen or [float(weight)]


@right(2, 3, gives=lambda rank, n: [1.0])
def checkpoint_then_barrier(ctx: RankContext) -> list[float]:
    """Rank 0 alone saves, and all wait until it has."""
    saved = torch.zeros(1)
    if ctx.rank == 0:
        saved += 1
    ctx.comm.barrier()
    ctx.comm.broadcast(saved, 0)
    return saved.tolist()


# ── buggy ───────────────────────────────────────────────────────────────────────────


@hangs(2, 3, 4)
def uneven_batches(ctx: RankContext) -> None:
    """Ten samples do not divide evenly: the last rank has one batch less."""
    weight = torch.zeros(4)
    count = 3 - (ctx.rank == ctx.world_size - 1)
    for batch in batches(ctx.rank, count):
        grad = gradient(weight, batch)
        ctx.comm.all_reduce(grad)  # guilty
        weight -= LR * grad


@raises("ValueError", 2, 3)
def bad_sample_on_one_rank(ctx: RankContext) -> None:
    """The second batch of rank 1 cannot be read; the others wait for its gradient."""
    for step, batch in enumerate(batches(ctx.rank, 3)):
        if ctx.rank == 1 and step == 1:
            raise ValueError("label 11 is out of range")  # guilty
        ctx.comm.all_reduce(batch)


@hangs(2, 3)
def bad_sample_skipped(ctx: RankContext) -> None:
    """Rank 1 catches the error and goes on with the next batch: one call too few."""
    for step, batch in enumerate(batches(ctx.rank, 3)):
        try:
            if ctx.rank == 1 and step == 1:
                raise ValueError("label 11 is out of range")
        except ValueError:
            continue
        ctx.comm.all_reduce(batch)  # guilty


@hangs(2, 3)
def stops_on_its_own(ctx: RankContext) -> None:
    """Each rank compares its own loss with the bound, and one is through early."""
    for step in range(4):
        loss = torch.tensor([4.0 - step - (ctx.rank == 0)])
        if loss < 2:
            break
        ctx.comm.all_reduce(torch.ones(4))  # guilty


@hangs(2, 3)
def clips_on_its_own(ctx: RankContext) -> None:
    """Only a rank whose gradient is large asks for the norm of all."""
    norm = torch.tensor([1.0 + 9 * (ctx.rank == 1)])
    if norm > 5:
        ctx.comm.all_reduce(norm)  # guilty
    ctx.comm.barrier()


@hangs(2, 4)
def unused_parameter(ctx: RankContext) -> None:
    """On odd ranks a branch of the model is not used: no gradient, no call."""
    used = [torch.ones(4), torch.ones(4)]
    for parameter in used[: 1 + (ctx.rank % 2 == 0)]:
        ctx.comm.all_reduce(parameter)  # guilty


@misfit("collective-mismatch", 2, 3)
def parameters_in_another_order(ctx: RankContext) -> None:
    """Weight, then bias; the other way round on rank 1: sizes do not fit."""
    weight, bias = torch.ones(6), torch.ones(2)
    order = [bias, weight] if ctx.rank == 1 else [weight, bias]
    for parameter in order:
        ctx.comm.all_reduce(parameter)  # guilty


@hangs(2, 3)
def validates_on_rank_zero(ctx: RankContext) -> None:
    """Rank 0 returns from validation late: its metric is averaged with nobody."""
    for step in range(2):
        ctx.comm.all_reduce(torch.ones(4))
        if ctx.rank == 0 and step == 1:
            accuracy = torch.tensor([0.9])
            ctx.comm.all_reduce(accuracy)  # guilty


@hangs(2, 3)
def warms_up_one_rank(ctx: RankContext) -> None:
    """Rank 0 runs a first step alone; from then on it is one call ahead."""

    def step(comm: Comm) -> None:
        comm.all_reduce(torch.ones(4))  # guilty

    if ctx.rank == 0:
        step(ctx.comm)
    for _ in range(2):
        step(ctx.comm)


@hangs(2, 3)
def last_stage_keeps_its_gradient(ctx: RankContext) -> None:
    """A pipeline whose last stage never sends its gradient back."""
    x, rank, last = torch.ones(3), ctx.rank, ctx.world_size - 1
    if rank > 0:
        ctx.comm.recv(x, rank - 1)
    if rank < last:
        ctx.comm.send(x, rank + 1)
        ctx.comm.recv(x, rank + 1)  # guilty
        if rank > 0:
            ctx.comm.send(x, rank - 1)


@hangs(3)
def stage_skips_a_microbatch(ctx: RankContext) -> None:
    """The middle stage works on three microbatches, its neighbors on four."""
    x = torch.ones(3)
    for _ in range(3 if ctx.rank == 1 else 4):
        if ctx.rank > 0:
            ctx.comm.recv(x, ctx.rank - 1)
        if ctx.rank < 2:
            ctx.comm.send(x, ctx.rank + 1)  # guilty


@hangs(3, 4)
def server_counts_itself(ctx: RankContext) -> None:
    """A parameter server that waits for as many pushes as there are ranks."""
    if ctx.rank:
        ctx.comm.send(torch.ones(4), 0)
        ctx.comm.recv(torch.ones(4), 0)
        return
    for _ in range(ctx.world_size):
        ctx.comm.recv(torch.ones(4), ANY)  # guilty
    for dst in range(1, ctx.world_size):
        ctx.comm.send(torch.ones(4), dst)


@hangs(3)
def server_that_stops_first(ctx: RankContext) -> None:
    """The server ends after two rounds, the workers want three."""
    rounds = 2 if ctx.rank == 0 else 3
    for _ in range(rounds):
        if ctx.rank == 0:
            for src in range(1, ctx.world_size):
                ctx.comm.recv(torch.ones(4), src)
        else:
            ctx.comm.send(torch.ones(4), 0)  # guilty


@hangs(2, 3)
def barrier_after_an_exception(ctx: RankContext) -> None:
    """Rank 1 cleans up after its error with a barrier; the others are elsewhere."""
    try:
        if ctx.rank == 1:
            raise ValueError("no such file")
        ctx.comm.all_reduce(torch.ones(4))
    except ValueError:
        ctx.comm.barrier()  # guilty


@hangs(3)
def even_ranks_only(ctx: RankContext) -> None:
    """The first weights go to the even ranks by a collective: odd ones do not call."""
    weight = torch.ones(4)
    if ctx.rank % 2 == 0:
        ctx.comm.broadcast(weight, 0)  # guilty
    ctx.comm.barrier()


@flawed("mismatched-buffers", 2)
def half_precision_on_one_side(ctx: RankContext) -> None:
    """Activations are sent in half precision and received in single."""
    if ctx.rank == 0:
        ctx.comm.send(torch.ones(4, dtype=torch.float16), 1)
    else:
        ctx.comm.recv(torch.zeros(2), 0)  # guilty


@raises("IndexError", 2, 3)
def one_label_too_many(ctx: RankContext) -> None:
    """A bug of the last rank's own; who waits for it did nothing wrong."""
    last = ctx.world_size - 1
    if ctx.rank == last:
        logits = torch.zeros(3)
        ctx.comm.send(logits[3], 0)  # guilty
    elif ctx.rank == 0:
        ctx.comm.recv(torch.zeros(1), last)
