"""Pipeline parallelism: run several microbatches in the stages at the same time.

Guide: phase2_advanced/guide/pipeline_parallel.md.
Source: Y. Huang et al., GPipe (arXiv 1811.06965), figure 2; D. Narayanan et al. (arXiv
2104.04473), sections 2.2.1 and 2.2.2, for 1F1B and interleaved 1F1B.
Symbols: n = world_size ranks; m microbatches; v model chunks on each rank; t_f and t_b,
the time of one model chunk for the forward and the backward of one microbatch.
Cost: (m + n - 1)(t_f + t_b); m (t_f + t_b) is work, the rest is the pipeline bubble.

    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3        GPipe, n = 3, m = 4, drawn
    rank 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .         with t_f = t_b
    rank 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

A schedule is the list of one rank's actions, in order. An action starts when the rank
is free and the tensor it needs has arrived, so we can draw and judge a schedule
before sending any tensor. Run this file with `python` to draw yours. Given:

    Action("F", 3)               forward of microbatch 3; "B": backward; a third field,
                                 the number of the model chunk, is for 2.21
    ModelChunk(module, example)  the layers of one stage, and one sample that enters it:
                                 only its shape and dtype matter
    peers(comm, action, v)       the peer from which an action receives, and the peer to
                                 which it sends; None at the ends of the model
    comm.recv(tensor, *peer)     a peer is a rank and a tag; the same for comm.isend
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm, Work
from distlab.given.pipeline_parallel import (
    Action,
    Kept,
    LossFn,
    ModelChunk,
    Peer,
    Sends,
    draw,
    peers,
)


def gpipe(rank: int, world_size: int, num_microbatches: int) -> list[Action]:
    """Return the actions of `rank` in order: all forwards, then all backwards.

    C1 Each microbatch goes forward once, and later goes backward once.
    C2 All forwards come before the first backward.
    C3 If every rank follows its schedule, the batch takes (m + n - 1)(t_f + t_b) in
       total.
    In torch.distributed: torch.distributed.pipelining.ScheduleGPipe
    Example: m = 2 → F0 F1 B0 B1 on every rank
    Cost: each rank keeps the activations of m microbatches. Check: distlab check 2.10
    """
    ### BEGIN SOLUTION pipeline_parallel.gpipe
    #| a list of Action("F", number) and Action("B", number)
    forwards = [Action("F", number) for number in range(num_microbatches)]
    backwards = [Action("B", number) for number in range(num_microbatches)]
    return forwards + backwards
    ### END SOLUTION


def forward_step(
    comm: Comm,
    chunk: ModelChunk,
    inputs: Tensor,
    source: Peer | None,
    destination: Peer | None,
) -> tuple[Tensor, Tensor, Work | None]:
    """Run one microbatch forward through one stage: receive, compute, send.

    Given: `source` and `destination` come from peers(). Without a source, x is `inputs`
    itself; otherwise `inputs` only tells you the number of samples. Parameters may be
    frozen or unused, and the output may be non-contiguous.
    Returns x and output, which backward_step needs, and the send's Work or None.
    C1 `backward_step` adds the microbatch's gradient to every `.grad` of the stage and
       sends the gradient of x to the previous stage.
    C2 Both functions work for any order of the microbatches. Each starts its send
       without waiting for it, its messages carry the peer's tag, and the module runs
       only once per microbatch.
    In torch.distributed: PipelineStage's forward_one_chunk, backward_one_chunk
    Cost: one message to each neighbor. Check: distlab check 2.11
    """
    ### BEGIN SOLUTION pipeline_parallel.forward_backward
    #| which tensor enters the stage? which tensor leaves it, with which peer's tag?
    x = inputs
    if source:
        x = chunk.example.new_empty(len(inputs), *chunk.example.shape)
        comm.recv(x, *source)
        x.requires_grad_()
    output = chunk.module(x)
    if not destination:
        return x, output, None
    return x, output, comm.isend(output.detach().contiguous(), *destination)
    ### END SOLUTION


def backward_step(
    comm: Comm, x: Tensor, output: Tensor, source: Peer | None, destination: Peer | None
) -> Work | None:
    """Run the same microbatch backward: receive its gradient, backward, send it on.

    Given: `x` and `output` of forward_step. The gradient of `output` comes from
    `source`, the next stage. Without a source, `output` is the loss, as 2.12 passes it.
    Returns the Work of the send, or None. The clauses are those of forward_step.
    """
    ### BEGIN SOLUTION pipeline_parallel.forward_backward
    #| the gradient of which tensor arrives? the gradient of which tensor leaves?
    gradient = None
    if source:
        gradient = output.new_empty(output.shape)  # contiguous, as messages are
        comm.recv(gradient, *source)
    output.backward(gradient)
    if not destination:
        return None
    assert x.grad is not None
    return comm.isend(x.grad, *destination)
    ### END SOLUTION


def execute(
    comm: Comm,
    chunks: Sequence[ModelChunk],
    schedule: Sequence[Action],
    loss_fn: LossFn,
    microbatches: Sequence[tuple[Tensor, Tensor]],
) -> float:
    """Run this rank's `schedule`; every .grad grows by the gradient of the batch.

    Given: `chunks` are this rank's. `microbatches` are (inputs, targets), the same on
    every rank, but only the first stage may read inputs and only the last targets; the
    others may only count the samples. Microbatches may differ in size, and `loss_fn`
    averages over their samples. The schedules of all ranks fit together. The last stage
    is on rank n - 1, whatever the number of chunks. Send the loss as float64.
    C1 For any schedule, `execute` adds the gradient of the mean loss over all samples
       to every `.grad`.
    C2 `execute` returns this mean loss, which is the same number on every rank. The
       losses are detached before they are summed, because the sum would otherwise keep
       the graphs of all microbatches alive.
    In torch.distributed: torch.distributed.pipelining, PipelineScheduleMulti
    Example: microbatches of 2, 2 and 1 samples → weights 2/5, 2/5, 1/5
    Cost: 2 m messages between two stages, and one number. Check: distlab check 2.12
    """
    ### BEGIN SOLUTION pipeline_parallel.execute
    #| for each action: peers(), forward_step or backward_step, then free(). where does
    #| the loss come in, and with which weight? at the end: which sends are left?
    num_samples = sum(len(inputs) for inputs, _ in microbatches)
    loss = torch.zeros(1, dtype=torch.float64, device=comm.device)
    kept: Kept = {}
    sends: Sends = {}
    for action in schedule:
        source, destination = peers(comm, action, len(chunks))
        inputs, targets = microbatches[action.microbatch]
        key = action.chunk, action.microbatch
        if action.kind == "F":
            chunk = chunks[action.chunk]
            x, output, work = forward_step(comm, chunk, inputs, source, destination)
            if not destination:
                output = loss_fn(output, targets) * (len(inputs) / num_samples)
                loss += output.detach()
            kept[key] = x, output
            del x, output  # these names would hold the microbatch after its backward
        else:
            work = backward_step(comm, *kept[key], source, destination)
        if work:
            sends[action] = work
        free(action, kept, sends)
        for sent in [a for a, w in sends.items() if a.kind == "B" and w.is_completed()]:
            sends.pop(sent).wait()  # returns at once; else m gradients would be kept
    for work in sends.values():
        work.wait()
    comm.broadcast(loss, src=comm.world_size - 1)
    return float(loss)
    ### END SOLUTION


def free(action: Action, kept: Kept, sends: Sends) -> None:
    """Drop what no later action needs; execute calls this after each action.

    Given: `kept` holds x and output of every microbatch that isn't freed yet, and
    `sends` holds every send for which we haven't waited, including that of `action`.
    Remove entries from both. At the end, execute waits for the remaining sends.
    C1 A rank waits only for messages that its next action needs. `free` waits for each
       send that it removes, and it waits for no send unless the receiver must already
       have received it.
    C2 After a microbatch's backward, its entry in `kept` and the send of its output are
       removed. All other entries stay.
    In torch.distributed: PipelineStage.fwd_cache; Megatron: deallocate_output_tensor
    Cost: no communication. Check: distlab check 2.13
    """
    ### BEGIN SOLUTION pipeline_parallel.free
    #| after which action is a microbatch done? which of its sends must have arrived?
    if action.kind == "B":
        del kept[action.chunk, action.microbatch]
        sent = sends.pop(action._replace(kind="F"), None)
        if sent:
            sent.wait()  # its gradient has come back, so the output has arrived
    ### END SOLUTION


def one_f_one_b(rank: int, world_size: int, num_microbatches: int) -> list[Action]:
    """Return the actions of `rank` in order: 1F1B, one forward, then one backward.

    m may be smaller than n.
    C1 Each microbatch goes forward once, and later goes backward once.
    C2 If every rank follows its schedule, the batch takes (m + n - 1)(t_f + t_b) in
       total, just as with GPipe.
    C3 On each rank, at most n - rank microbatches are in flight at any time. A
       microbatch is in flight from the start of its forward to the end of its backward.
    In torch.distributed: torch.distributed.pipelining.Schedule1F1B
    Example: n = 2, m = 3 → F0 F1 B0 F2 B1 B2 on rank 0, F0 B0 F1 B1 F2 B2 on rank 1
    Cost: keeps the activations of n - rank microbatches. Check: distlab check 2.14
    """
    ### BEGIN SOLUTION pipeline_parallel.one_f_one_b
    #| warm-up, steady state, cool-down: how many forwards before the first backward?
    warmup = min(world_size - 1 - rank, num_microbatches)
    order = [Action("F", number) for number in range(warmup)]
    for number in range(num_microbatches - warmup):
        order += [Action("F", warmup + number), Action("B", number)]
    cooldown = range(num_microbatches - warmup, num_microbatches)
    return order + [Action("B", number) for number in cooldown]
    ### END SOLUTION


def interleaved(
    rank: int, world_size: int, num_microbatches: int, num_chunks: int
) -> list[Action]:
    """Return the actions of `rank` in order: interleaved 1F1B with `num_chunks` chunks.

    Here t_f and t_b are the times of one chunk: 1/v of the rank's layers.
    C1 Each microbatch goes forward once through every chunk, from chunk 0 up, and
       backward once through every chunk, from the last one down. `interleaved` raises
       ValueError if m isn't divisible by n.
    C2 If every rank follows its schedule, the batch takes (m v + n - 1)(t_f + t_b) in
       total, so the bubble shrinks to 1/v of its size.
    C3 A rank has at most (v - 1) n + 2 (n - 1 - rank) + 1 pairs of a microbatch and a
       chunk in flight at any time. A pair is in flight from the start of its forward to
       the end of its backward.
    In torch.distributed: torch.distributed.pipelining.ScheduleInterleaved1F1B
    Example: n = 2, v = 2, m = 2, rank 1 → F0 F1 F0' B0' F1' B1' B0 B1 (' is chunk 1)
    Cost: v times as many messages. Check: distlab check 2.21
    """
    ### BEGIN SOLUTION pipeline_parallel.interleaved
    #| in which order do the forwards of all (microbatch, chunk) come? the backwards?
    #| then it is 1F1B again: how many forwards before the first backward?
    if num_microbatches % world_size:
        raise ValueError(
            f"{num_microbatches} microbatches are not a multiple of {world_size} ranks"
        )
    forwards = [
        Action("F", start + offset, chunk)
        for start in range(0, num_microbatches, world_size)
        for chunk in range(num_chunks)
        for offset in range(world_size)
    ]
    backwards = [Action("B", f.microbatch, num_chunks - 1 - f.chunk) for f in forwards]
    # To the first forward of the last chunk; then to the last stage and back.
    warmup = (num_chunks - 1) * world_size + 2 * (world_size - 1 - rank)
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
    ### END SOLUTION


def with_torch(
    stage: nn.Module,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    num_microbatches: int,
) -> float:
    """Run a batch forward and backward with torch.distributed.pipelining, without comm.

    Given: torch's default process group, and this rank's `stage` of n, which may have
    frozen or unused parameters. The full batch has valid inputs only on rank 0, and
    valid targets only on the last rank. num_microbatches divides the batch and is at
    least n. loss_fn returns a mean.
    C1 The gradients are the same as if a single process had computed them from the mean
       loss of the batch.
    C2 `with_torch` returns this mean loss on every rank.
    C3 On each rank, at most n - rank microbatches are in flight at any time.
    In torch.distributed: already plain torch
    Example: n = 2, m = 4 → rank 0 goes F F B F B F B B
    Cost: as in 2.14, plus small messages about shapes. Check: distlab check 2.26
    """
    ### BEGIN SOLUTION pipeline_parallel.port
    #| torch.distributed.pipelining: PipelineStage(module, index, number of stages,
    #| device), Schedule1F1B(stage, m, loss_fn=…), its step(input, target=…, losses=[]).
    #| which rank passes the input, which rank the target? which rank has the losses?
    from torch.distributed import pipelining

    rank, n = dist.get_rank(), dist.get_world_size()
    part = pipelining.PipelineStage(stage, rank, n, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(part, num_microbatches, loss_fn=loss_fn)
    given = [inputs] if rank == 0 else []
    losses: list[Tensor] = []
    loss = torch.zeros((), dtype=torch.float64)
    if rank == n - 1:
        schedule.step(*given, target=targets, losses=losses)
        loss += torch.stack(losses).mean().detach()
    else:
        schedule.step(*given)
    dist.broadcast(loss, src=n - 1)
    return float(loss)
    ### END SOLUTION


if __name__ == "__main__":
    for name, plan in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        try:
            print(name, draw([plan(rank, 4, 8) for rank in range(4)]), sep="\n")
        except NotImplementedError as missing:
            print(f"{name}: {missing} is not written yet")
