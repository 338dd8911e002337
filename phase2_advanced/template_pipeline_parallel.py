"""Many microbatches on their way through the stages at once: pipeline parallelism.

Guide: phase2_advanced/guide/pipeline_parallel.md.
Source: Y. Huang et al., GPipe (arXiv 1811.06965), figure 2; D. Narayanan et al. (arXiv
2104.04473), sections 2.2 and 2.3, for 1F1B and its interleaved form.
Symbols: n = world_size ranks; m microbatches; v chunks of the model on each rank; t_f
and t_b, how long one chunk takes to go forward and backward with one microbatch.
Cost: (m + n - 1)(t_f + t_b), of which m (t_f + t_b) is work and the rest the bubble.

    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3        GPipe, n = 3, m = 4, drawn
    rank 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .         with t_f = t_b
    rank 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

A schedule is a plain list: what one rank does, in order. When each entry starts is not
in it. That follows: an entry starts when the rank is free and what it needs is there.
So a schedule can be thought out, drawn and judged before any tensor is sent; and one
executor runs them all. `python` with the name of this file draws yours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm, Work

LossFn = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class Action(NamedTuple):
    """One entry of a schedule: Action("F", 3) is the forward of microbatch 3.

    `chunk` is for 2.21, where a rank has several parts of the model; else it is 0.
    """

    kind: str  # "F" forward, "B" backward
    microbatch: int
    chunk: int = 0


class Chunk(NamedTuple):
    """A part of the model: the layers, and what ONE sample that comes in is like.

    Chunk c of rank r is stage c · n + r of all n · v: after the last rank comes rank 0
    again, with its next chunk. Of `like` the shape and dtype count, not the values.
    """

    module: nn.Module
    like: Tensor


class Peer(NamedTuple):
    """The other end of a message: comm.recv(tensor, *peer), comm.isend(tensor, *peer).

    The tag says which message it is: two ranks may have several under way.
    """

    rank: int
    tag: int


def gpipe(rank: int, world_size: int, num_microbatches: int) -> list[Action]:
    """What `rank` does, in order: all forwards, then all backwards.

    C1 each microbatch goes forward once and backward once, in that order
    C2 all forwards come before the first backward
    C3 all ranks together take (m + n - 1)(t_f + t_b)
    In torch.distributed: torch.distributed.pipelining.ScheduleGPipe
    Example: m = 2 → F0 F1 B0 B1 on every rank
    Cost: the activations of m microbatches are kept. Check: distlab check 2.10
    """
    # TODO(pipeline_parallel.gpipe)
    # a list of Action("F", number) and Action("B", number)
    raise NotImplementedError("pipeline_parallel.gpipe")


def peers(
    comm: Comm, action: Action, num_chunks: int
) -> tuple[Peer | None, Peer | None]:
    """From whom `action` gets its tensor, and to whom its result goes.

    A forward gets activations from the stage before; a backward gets their gradient
    from the stage after. None where the model begins or ends.
    """
    num_stages = num_chunks * comm.world_size
    stage = action.chunk * comm.world_size + comm.rank

    def peer(other: int) -> Peer | None:
        if not 0 <= other < num_stages:
            return None
        cut = action.microbatch * num_stages + min(stage, other)
        return Peer(other % comm.world_size, 2 * cut + (action.kind == "B"))

    before, after = peer(stage - 1), peer(stage + 1)
    return (before, after) if action.kind == "F" else (after, before)


def execute(
    comm: Comm,
    chunks: Sequence[Chunk],
    schedule: Sequence[Action],
    loss_fn: LossFn,
    microbatches: Sequence[Batch],
) -> float:
    """Do what this rank's `schedule` says; every .grad grows by that of the batch.

    Given: `chunks` are this rank's. `microbatches` are (inputs, targets), the same on
    every rank, but only the first stage may read inputs and only the last targets; for
    the others they say how many samples there are. They may differ in size. `loss_fn`
    averages over its samples. The schedules of all ranks fit together.

    C1 every .grad grows by the gradient of the mean loss over ALL samples; that loss is
    returned, the same number on every rank
    C2 after its backward nothing is kept of a microbatch
    C3 a rank waits for what its next action needs, and for nothing else
    In torch.distributed: torch.distributed.pipelining, PipelineScheduleMulti
    Cost: 2 m messages over each cut, and one number. Check: distlab check 2.11
    """
    # TODO(pipeline_parallel.execute)
    # for each action: what must be here first? what must be kept for later, and until
    # when? peers(comm, action, len(chunks)) knows where tensors come from and go to
    raise NotImplementedError("pipeline_parallel.execute")


def one_f_one_b(rank: int, world_size: int, num_microbatches: int) -> list[Action]:
    """What `rank` does, in order: one forward, one backward, as soon as that can be.

    C1 each microbatch goes forward once and backward once, in that order
    C2 all ranks together take (m + n - 1)(t_f + t_b), as GPipe does
    C3 at no time are more than n - rank microbatches on their way: forward done or
    going on, backward not done
    In torch.distributed: torch.distributed.pipelining.Schedule1F1B
    Example: n = 2, m = 3 → F0 F1 B0 F2 B1 B2 on rank 0, F0 B0 F1 B1 F2 B2 on rank 1
    Cost: the activations of n - rank microbatches are kept. Check: distlab check 2.14
    """
    # TODO(pipeline_parallel.one_f_one_b)
    # warm-up, steady state, cool-down: how many forwards until the first backward?
    raise NotImplementedError("pipeline_parallel.one_f_one_b")


def interleaved(
    rank: int, world_size: int, num_microbatches: int, num_chunks: int
) -> list[Action]:
    """What `rank` does, in order, when it has `num_chunks` parts of the model.

    Here t_f and t_b are those of one chunk, a v-th of what the rank has.

    C1 each microbatch goes once forward and once backward through each chunk: forward
    from chunk 0 on, backward from the last one; m that is no multiple of n: ValueError
    C2 all ranks together take (m v + n - 1)(t_f + t_b): the bubble is a v-th
    C3 at no time are more than (v - 1) n + 2 (n - 1 - rank) + 1 pairs of a microbatch
    and a chunk on their way, forward begun and backward not done
    In torch.distributed: torch.distributed.pipelining.ScheduleInterleaved1F1B
    Example: n = 2, v = 2, m = 2, rank 1 → F0 F1 F0' B0' F1' B1' B0 B1 (' is chunk 1)
    Cost: v times as many messages. Check: distlab check 2.21
    """
    # TODO(pipeline_parallel.interleaved)
    # in which order does a rank go forward through its (microbatch, chunk)? backward?
    # then it is 1F1B again: how many forwards until the first backward?
    raise NotImplementedError("pipeline_parallel.interleaved")


def port(
    stage: nn.Module,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    num_microbatches: int,
) -> float:
    """A batch forward and backward in torch's own words: there is no comm here.

    Given: torch's default process group; `stage`, this rank's part of the model, of as
    many parts as there are ranks; the whole batch, of which the inputs are right on
    rank 0 only, and the targets on the last rank only. num_microbatches divides the
    batch, and is at least the number of ranks; loss_fn gives a mean.

    C1 the gradients are those of one process: of the mean loss of the batch
    C2 returns that loss, on every rank
    C3 never more than n - rank microbatches are on their way
    In torch.distributed: that is what this is
    Example: n = 2, m = 4 → rank 0 goes F F B F B F B B
    Cost: as in 2.14, and some small messages about shapes. Check: distlab check 2.26
    """
    # TODO(pipeline_parallel.port)
    # torch.distributed.pipelining: PipelineStage(module, index, number of stages,
    # device), Schedule1F1B(stage, m, loss_fn=…), its step(input, target=…, losses=[]).
    # which rank gives it the input, which one the target? who has the losses then?
    raise NotImplementedError("pipeline_parallel.port")


def draw(
    schedules: Sequence[Sequence[Action]], forward: int = 1, backward: int = 2
) -> str:
    """All ranks' schedules as a table: a row per rank, a column per unit of time.

    `forward` and `backward` are t_f and t_b, in whole units. Where the ranks wait for
    each other forever, the table ends. A chunk other than 0 is marked with ' each.
    """
    takes = {"F": forward, "B": backward}
    num_stages = len(schedules) * (1 + max(a.chunk for s in schedules for a in s))
    rows: list[list[str]] = [[] for _ in schedules]
    done: dict[tuple[str, int, int], int] = {}  # by kind, microbatch, stage: when
    left = [list(schedule) for schedule in schedules]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while left[rank]:
                kind, number, chunk = left[rank][0]
                stage = chunk * len(rows) + rank
                before = ("F", number, stage - 1), ("B", number, stage + 1)
                needed = before[kind == "B"]
                if needed[2] == num_stages:
                    needed = "F", number, stage
                if needed[2] >= 0 and needed not in done:
                    break
                row += ["."] * (done.get(needed, 0) - len(row))
                row += [f"{kind}{number}" + "'" * chunk] * takes[kind]
                done[kind, number, stage] = len(row)
                left[rank].pop(0)
                moved = True
    width = max((len(entry) for row in rows for entry in row), default=1)
    lines = [" ".join(entry.ljust(width) for entry in row) for row in rows]
    lines = [f"rank {rank}  {line}".rstrip() for rank, line in enumerate(lines)]
    return "\n".join([*lines, f"{max(map(len, rows))} units of time"])


if __name__ == "__main__":
    for name, plan in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        try:
            print(name, draw([plan(rank, 4, 8) for rank in range(4)]), sep="\n")
        except NotImplementedError as missing:
            print(f"{name}: {missing} is not written yet")
