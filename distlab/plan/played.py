"""Run a layout in the simulator, to see whether its formulas hold.

There are two kinds of runs on the cluster's ranks and links, both with sizes only:

    collectives   Each collective of the layout runs once, message by message, in all
                  groups at the same time, so groups that share a link share it here,
                  too. A group that spans nodes is cut into rings, each of which leaves
                  the node through another rank's link (unit `planning`, group_link).
    the step      Every rank follows the schedule of unit `pipeline_parallel`. It
                  computes for as long as the formulas say, waits for as long as the
                  collectives took, and sends activations and gradients to the
                  neighboring stages. Data-parallel messages are a second stream. A
                  rank waits for it where a layer needs its weights, and at the end.
                  It pauses while tensor or context ranks exchange messages, because
                  unit `planning` says that only computation hides it.

            compute   ▓F0▓▓F1▓▓·····▓B0▓▓▓▓B1▓▓▓·update
            messages  ◀gather▶◀gather▶   ◀reduce▶◀reduce▶

So the simulation checks the formulas' claims about rings, shared links, bubbles and
overlap. It doesn't check the compute time, which it gets from the formulas.

A long ring repeats the same step, so we play its first steps and scale them up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from distlab.given.planning import Cluster, Layout
from distlab.plan.plans import Plan, Question
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.net.fabric import Fabric
from distlab.sim.payload import Sized

MAX_RANKS = 1024
MAX_MESSAGES = 300_000  # of one collective, over all ranks
_EAGER = 1 << 62  # a stage doesn't wait until the next one asks for its output


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The seconds of one collective of each kind; 0 where there is no group."""

    tensor_s: float  # an all-reduce of one layer's activations, in the tensor group
    context_s: float  # an all-gather of one layer's keys and values
    gather_s: float  # an all-gather of one layer's weights, in the group of shards
    reduce_s: float  # a reduce-scatter of one layer's gradients


@dataclass(frozen=True, kw_only=True)
class Played:
    """The simulator's results for a plan."""

    step_s: float
    collectives: Collectives
    messages: int
    stage: RankWork


def play(
    unit: ModuleType, pipeline: ModuleType, question: Question, plan: Plan
) -> Played:
    """Simulate one step of `plan` on all its ranks.

    `pipeline` is unit `pipeline_parallel`.

    Raises:
        ValueError: the layout has more ranks than we simulate.
    """
    layout = plan.layout
    require_room(layout.num_gpus)
    collectives, messages = _collectives(unit, question, layout)
    stage = RankWork.of(unit, question, plan, collectives)
    done = run(
        partial(_step, stage=stage, pipeline=pipeline),
        layout.num_gpus,
        net=fabric(question.cluster),
        payload="size",
        journal=False,
        trace=False,
        eager_bytes=_EAGER,
    )
    done.require_finished()
    messages += sum(value[1] for value in done.values)
    step_s = max(value[0] for value in done.values)
    return Played(
        step_s=step_s, collectives=collectives, messages=messages, stage=stage
    )


def one_pipeline(pipeline: ModuleType, question: Question, played: Played) -> SimRun:
    """Run the step again on one rank of each stage, and record everything.

    All other ranks of a stage do the same, so this is the run that we draw.
    """
    cluster = question.cluster
    is_one_node = question.num_gpus <= cluster.gpus_per_node
    link = cluster.intra_node if is_one_node else cluster.inter_node
    done = run(
        partial(_step, stage=played.stage, pipeline=pipeline),
        played.stage.pipeline,
        net=AlphaBeta(alpha_s=link.alpha_s, bytes_per_s=link.bytes_per_s),
        payload="size",
        eager_bytes=_EAGER,
    )
    done.require_finished()
    return done


def require_room(num_gpus: int) -> None:
    """Require that the simulator can run this many ranks.

    Raises:
        ValueError: it can't.
    """
    if num_gpus > MAX_RANKS:
        raise ValueError(f"--sim simulates up to {MAX_RANKS:,} GPUs, not {num_gpus:,}")


def fabric(cluster: Cluster) -> Fabric:
    """Return the cluster's network, where each GPU has its own link to other nodes."""
    return Fabric(
        node_size=cluster.gpus_per_node,
        intra_node_alpha_s=cluster.intra_node.alpha_s,
        intra_node_bytes_per_s=cluster.intra_node.bytes_per_s,
        nics=cluster.gpus_per_node,
        nic_bytes_per_s=cluster.inter_node.bytes_per_s,
        nic_alpha_s=cluster.inter_node.alpha_s,
        nodes_per_leaf=MAX_RANKS,
    )


# ── collectives ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The seconds of an all-gather, and the messages that we simulated for it."""

    seconds: float
    messages: int


def _collectives(
    unit: ModuleType, question: Question, layout: Layout
) -> tuple[Collectives, int]:
    """Return the seconds of each collective, and the messages of all of them."""
    model, batch = question.model, question.batch
    precision = batch.precision
    t, c, shards = layout.tensor, layout.context, layout.shards
    width = layout.tokens(batch) * model.hidden * precision.activations
    keys = layout.microbatch * batch.sequence * 2 * model.kv_hidden
    sizes = [unit.stage_parameters(model, layout, i) for i in (0, layout.pipeline - 1)]
    weights = max(sizes) / layout.stage_layers(model, 0)

    ring = partial(play_ring, question.cluster, layout)
    tensor = ring(t, 1, width)
    context = ring(c, t, keys * precision.activations / t)
    gather = ring(shards, t, precision.weights * weights)
    rings, reduce = [tensor, context, gather], gather
    if precision.gradients != precision.weights:
        reduce = ring(shards, t, precision.gradients * weights)
        rings.append(reduce)
    collectives = Collectives(
        tensor_s=2 * tensor.seconds,
        context_s=context.seconds,
        gather_s=gather.seconds,
        reduce_s=reduce.seconds,
    )
    return collectives, sum(one.messages for one in rings)


def play_ring(
    cluster: Cluster, layout: Layout, size: int, stride: int, num_bytes: float
) -> Ring:
    """Simulate an all-gather in all groups of `size` ranks, `stride` apart."""
    if size == 1:
        return Ring(seconds=0.0, messages=0)
    n = layout.num_gpus
    steps = min(size - 1, max(1, MAX_MESSAGES // (2 * n)))
    done = run(
        _gather,
        n,
        size,
        stride,
        cluster.gpus_per_node,
        num_bytes,
        steps,
        net=fabric(cluster),
        payload="size",
        journal=False,
        trace=False,
        eager_bytes=_EAGER,
    )
    done.require_finished()
    return Ring(seconds=done.time_s * (size - 1) / steps, messages=sum(done.values))


def members_of(rank: int, size: int, stride: int) -> list[int]:
    """Return the group of a rank, of `size` ranks that are `stride` apart."""
    block = size * stride
    first = rank // block * block + rank % stride
    return list(range(first, first + block, stride))


def rings_of(members: Sequence[int], per_node: int) -> list[list[int]]:
    """Return a group's rings: a single one within a node, or one per rank of a node.

    node 0: 0 1   node 1: 2 3    ring 0: 0 1 2 3    leaves the nodes from 1 and 3
                                 ring 1: 1 0 3 2    leaves them from 0 and 2
    """
    nodes = [
        list(ranks)
        for _, ranks in itertools.groupby(members, lambda rank: rank // per_node)
    ]
    if len(nodes) == 1:
        return nodes
    count = len(nodes[0])
    return [
        [rank for ranks in nodes for rank in ranks[turn:] + ranks[:turn]]
        for turn in range(count)
    ]


def _gather(
    context: RankContext,
    size: int,
    stride: int,
    per_node: int,
    num_bytes: float,
    steps: int,
) -> int:
    """Pass chunks around all rings of this rank's group; return the messages sent."""
    comm = context.comm
    rings = rings_of(members_of(comm.rank, size, stride), per_node)
    part = num_bytes / size / len(rings)
    sends, receives = [], []
    for ring in rings:
        place = ring.index(comm.rank)
        sends.append(ring[(place + 1) % size])
        receives.append(ring[place - 1])
    outward = {peer: times * part for peer, times in sorted(Counter(sends).items())}
    inward = {peer: times * part for peer, times in sorted(Counter(receives).items())}
    for _ in range(steps):
        works: list[Any] = [
            comm.irecv(_sized(count), peer) for peer, count in inward.items()
        ]
        works += [comm.isend(_sized(count), peer) for peer, count in outward.items()]
        for work in works:
            work.wait()
    return steps * len(outward)


def _sized(num_bytes: float) -> Any:
    """Return a message of this many bytes, which can be sent like a tensor."""
    return Sized(max(1, round(num_bytes)))


# ── the step ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of one rank; seconds are for one layer of one microbatch."""

    pipeline: int
    chunks: int
    zero: int  # the ZeRO stage, or -1 if no other rank has the same weights
    microbatches: int
    layers: int
    forward_s: float
    backward_s: float
    tensor_s: float  # of one all-reduce
    context_s: float  # of one gather
    forwards: int  # how often a layer sends its forward messages: 2 if recomputed
    gather_s: float
    reduce_s: float
    update_s: float
    message_bytes: float

    @staticmethod
    def of(
        unit: ModuleType, question: Question, plan: Plan, collectives: Collectives
    ) -> RankWork:
        """Return the stage of every rank: the formulas give all the slowest one's."""
        model, batch, cluster = question.model, question.batch, question.cluster
        layout = plan.layout
        layers = layout.stage_layers(model, 0)
        forward_s, backward_s = unit.pass_times(model, layout, batch, cluster)
        width = layout.tokens(batch) * model.hidden * batch.precision.activations
        split = layout.tensor if layout.sequence_parallel else 1
        return RankWork(
            pipeline=layout.pipeline,
            chunks=layout.chunks,
            zero=layout.zero_stage if layout.shards > 1 else -1,
            microbatches=layout.microbatches(batch),
            layers=layers,
            forward_s=forward_s / layers,
            backward_s=backward_s / layers,
            tensor_s=collectives.tensor_s,
            context_s=collectives.context_s,
            forwards=2 if layout.recompute == "full" else 1,
            gather_s=collectives.gather_s,
            reduce_s=collectives.reduce_s,
            update_s=plan.time.update_s,
            message_bytes=width / split,
        )


class _Streams:
    """The two streams of a rank: computation, and data-parallel messages.

    `_wires_free_s` is when all messages that have been started will have arrived. The
    weights of a layer are gathered while the layer before it computes, even if that one
    belongs to another microbatch or chunk. Neither time includes `_paused_s`, the time
    so far in which other messages held this stream up.
    """

    def __init__(self, clock: Any, stage: RankWork) -> None:
        self._clock, self._stage, self._zero = clock, stage, stage.zero
        self._wires_free_s = self._paused_s = 0.0
        self._arrival_s: float | None = None  # of the next layer's weights

    def compute(self, action: Any, following: Any) -> None:
        """Compute the layers of one action; `following` is the next one, or None."""
        stage, is_forward = self._stage, action.kind == "F"
        compute_s = stage.forward_s if is_forward else stage.backward_s
        times = 1 if is_forward else stage.forwards  # of a forward pass
        messages_s = 2 * times * stage.tensor_s
        messages_s += (times if is_forward else times + 1) * stage.context_s
        now_s = self._clock.now_s() - self._paused_s
        layers = stage.layers // stage.chunks  # valid layouts have no remainder
        for layer in range(layers):
            if self._gathers(action):
                if self._arrival_s is None:
                    self._gather(now_s)
                now_s = max(now_s, self._arrival_s or 0.0)
                self._arrival_s = None
            if self._gathers(action if layer < layers - 1 else following):
                self._gather(now_s)
            now_s += compute_s
            self._paused_s += messages_s
            if self._reduces(action):
                parts = 2 if self._zero == 0 else 1  # of an all-reduce
                begin_s = max(self._wires_free_s, now_s)
                self._wires_free_s = begin_s + parts * stage.reduce_s
        self._sleep_until(now_s + self._paused_s)

    def finish(self) -> None:
        """Wait for the last messages, then update the weights."""
        self._sleep_until(self._wires_free_s + self._paused_s)
        self._clock.sleep(self._stage.update_s)

    def _gather(self, now_s: float) -> None:
        begin_s = max(self._wires_free_s, now_s)
        self._wires_free_s = self._arrival_s = begin_s + self._stage.gather_s

    def _gathers(self, action: Any) -> bool:
        """Return True if the layers of an action need weights from other ranks."""
        if action is None or self._zero < 1:
            return False
        return self._zero == 3 or (action.kind == "F" and action.microbatch == 0)

    def _reduces(self, action: Any) -> bool:
        if action.kind == "F" or self._zero < 0:
            return False
        is_last = action.microbatch == self._stage.microbatches - 1
        return self._zero >= 2 or is_last

    def _sleep_until(self, moment_s: float) -> None:
        self._clock.sleep(max(0.0, moment_s - self._clock.now_s()))


def _step(
    context: RankContext, stage: RankWork, pipeline: ModuleType
) -> tuple[float, int]:
    """Run a rank's schedule; return the time at its end and the messages sent."""
    comm, p = context.comm, stage.pipeline
    per_stage = comm.world_size // p
    mine = comm.rank // per_stage
    if stage.chunks > 1:
        actions = pipeline.interleaved(mine, p, stage.microbatches, stage.chunks)
    else:
        actions = pipeline.one_f_one_b(mine, p, stage.microbatches)
    streams = _Streams(context.clock, stage)
    num_stages, sent = p * stage.chunks, 0
    for action, following in itertools.zip_longest(actions, actions[1:]):
        at = action.chunk * p + mine
        before, after = (at - 1, at + 1) if action.kind == "F" else (at + 1, at - 1)
        for other, receives in ((before, True), (after, False)):
            if not receives:
                streams.compute(action, following)
            if not 0 <= other < num_stages:
                continue
            peer = comm.rank + (other % p - mine) * per_stage
            tag = 2 * (action.microbatch * num_stages + min(at, other))
            tag += action.kind == "B"
            message = _sized(stage.message_bytes)
            if receives:
                comm.recv(message, peer, tag)
            else:
                comm.isend(message, peer, tag).wait()
                sent += 1
    streams.finish()
    return context.clock.now_s(), sent
