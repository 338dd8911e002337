"""The expected answers, by other ways than the solution's where there are any.

They don't come from the reference, because the reference has to be checked against
something, too. Weights and activations are lists of tensors here, and messages are
counted one by one. tests/workbench/test_planning.py compares them with published
numbers. Each function has the name and the arguments of the task's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from distlab.given.planning import (
    RECOMPUTE,
    Batch,
    Cluster,
    Degrees,
    Goodput,
    Layout,
    Link,
    Memory,
    Model,
    ModelSize,
    Recompute,
    Recovery,
    StepTime,
)

# ── 3.29 size ───────────────────────────────────────────────────────────────────────


def matrices(model: Model) -> list[tuple[int, int]]:
    """The shapes of a layer's matrices."""
    h, f = model.hidden, model.ffn
    key = model.kv_heads * (h // model.heads)
    mlp = [(h, f), (h, f), (f, h)] if model.gated else [(h, f), (f, h)]
    return [(h, h), (h, key), (h, key), (h, h), *mlp]


def model_size(model: Model, sequence: int) -> ModelSize:
    """Tensor by tensor."""
    layer = sum(rows * columns for rows, columns in matrices(model))
    embedding = model.vocab * model.hidden
    norms = model.hidden * (2 * model.layers + 1)
    pairs = 2 * model.hidden * sequence  # the products of one token with all others
    return ModelSize(
        parameters=layer * model.layers
        + norms
        + (embedding if model.tied else 2 * embedding),
        weight_flops=3 * 2 * (layer * model.layers + embedding),
        attention_flops=3 * 2 * pairs * model.layers,
    )


# ── 3.30 memory ─────────────────────────────────────────────────────────────────────


def layer_parameters(model: Model, layout: Layout) -> int:
    """Tensor by tensor."""
    shares = [rows * columns // layout.tensor for rows, columns in matrices(model)]
    return sum(shares) + 2 * model.hidden


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """Layer by layer."""
    embedding = -(-model.vocab // layout.tensor) * model.hidden
    last = layout.pipeline - 1
    size = sum(
        layer_parameters(model, layout)
        for _ in range(layout.stage_layers(model, stage))
    )
    holds = [stage == 0, stage == last]
    copies = 1 if all(holds) and model.tied else sum(holds)
    return size + copies * embedding + model.hidden * holds[1]


def layer_activation_bytes(
    model: Model, layout: Layout, batch: Batch, recompute: Recompute
) -> float:
    """Tensor by tensor: its width, and over how many ranks it is split."""
    h, t = model.hidden, layout.tensor
    key = model.kv_heads * (h // model.heads)
    norm_split = t if layout.sequence_parallel else 1
    kept = [(h, norm_split)]
    if recompute != "full":
        kept += [(h, norm_split)] * 3
        kept += [(h, t), (key, t), (key, t), (h, t)]
        kept += [(model.ffn, t)] * (3 if model.gated else 2)
    if recompute == "none":
        kept.append((model.heads * batch.sequence, t))
    tokens = layout.microbatch * batch.sequence / layout.context
    each = sum(width / ranks for width, ranks in kept)
    return tokens * each * batch.precision.activations


def in_flight(layout: Layout, batch: Batch, stage: int) -> float:
    """Microbatches whose activations a stage holds at most, as 2.14 and 2.21 count."""
    p, q = layout.pipeline, layout.chunks
    chunks = p - stage if q == 1 else (q - 1) * p + 2 * (p - 1 - stage) + 1
    return min(chunks / q, batch.global_batch // (layout.data * layout.microbatch))


def stage_memory(model: Model, layout: Layout, batch: Batch, stage: int) -> Memory:
    """Whole or shard, for each of the three, and the activations."""
    size = stage_parameters(model, layout, stage)
    precision, ranks = batch.precision, layout.data * layout.context
    shard = [size / (ranks if layout.zero_stage >= first else 1) for first in (1, 2, 3)]
    gathered = layer_parameters(model, layout) if layout.zero_stage == 3 else 0
    tokens = layout.microbatch * batch.sequence / layout.context
    activations = (
        layout.stage_layers(model, stage)
        * in_flight(layout, batch, stage)
        * layer_activation_bytes(model, layout, batch, layout.recompute)
    )
    if layout.recompute == "full":
        activations += layer_activation_bytes(model, layout, batch, "selective")
    if stage == layout.pipeline - 1:
        split = layout.tensor if layout.sequence_parallel else 1
        activations += tokens * 2 * model.hidden / split * precision.activations
        activations += tokens * 4 * -(-model.vocab // layout.tensor)
    return Memory(
        weights_bytes=precision.weights * (shard[2] + gathered),
        gradients_bytes=precision.gradients * shard[1],
        optimizer_bytes=(precision.master_weights + precision.moments) * shard[0],
        activations_bytes=activations,
    )


def step_memory(model: Model, layout: Layout, batch: Batch) -> Memory:
    """Of all stages, and not only of the two at the ends."""
    stages = [stage_memory(model, layout, batch, i) for i in range(layout.pipeline)]
    return max(stages, key=lambda memory: memory.total_bytes)


# ── 3.31 time ───────────────────────────────────────────────────────────────────────


def roofline_s(flops: float, num_bytes: float, cluster: Cluster) -> float:
    """The slower of two."""
    rate = cluster.peak_flops * cluster.matmul_efficiency
    return max(flops / rate, num_bytes / cluster.memory_bytes_per_s)


def mfu(
    model: Model, batch: Batch, cluster: Cluster, num_gpus: int, step_s: float
) -> float:
    """Needed by possible."""
    size = model_size(model, batch.sequence)
    needed = size.flops_per_token * batch.sequence * batch.global_batch
    return needed / (num_gpus * step_s * cluster.peak_flops)


def ring_s(n: int, num_bytes: float, link: Link) -> float:
    """Step by step."""
    chunk = num_bytes / n
    return sum(link.alpha_s + chunk / link.bytes_per_s for _ in range(n - 1))


def group_link(cluster: Cluster, size: int, stride: int) -> Link:
    """By the ranks that are on the first node."""
    ranks = range(0, size * stride, stride)
    near = [rank for rank in ranks if rank < cluster.gpus_per_node]
    if len(near) == size and size * stride <= cluster.gpus_per_node:
        return cluster.intra_node
    leaving = len(near) * cluster.inter_node.bytes_per_s
    return replace(
        cluster.inter_node, bytes_per_s=min(leaving, cluster.intra_node.bytes_per_s)
    )


@dataclass(frozen=True)
class Pass:
    """One microbatch on the slowest stage, without messages."""

    forward_s: float
    backward_s: float


def slowest_pass(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> Pass:
    """All stages are compared."""
    stages = [
        _stage_pass(model, layout, batch, cluster, i) for i in range(layout.pipeline)
    ]
    return max(stages, key=lambda one: one.forward_s + one.backward_s)


def _stage_pass(
    model: Model, layout: Layout, batch: Batch, cluster: Cluster, stage: int
) -> Pass:
    tokens, t = layout.tokens(batch), layout.tensor
    layers = layout.stage_layers(model, stage)
    weights = sum(rows * columns // t for rows, columns in matrices(model))
    attention = layers * tokens * 2 * (2 * model.hidden * batch.sequence) / t
    body = layers * 2 * tokens * weights + attention
    output = 2 * tokens * -(-model.vocab // t) * model.hidden
    forward = body + (output if stage == layout.pipeline - 1 else 0)
    again = {"none": 0, "selective": attention, "full": body}[layout.recompute]
    read = stage_parameters(model, layout, stage) * batch.precision.weights
    return Pass(
        roofline_s(forward, read, cluster),
        roofline_s(2 * forward + again, 2 * read, cluster),
    )


Question = tuple[Model, Layout, Batch, Cluster]


def _passes(layout: Layout) -> int:
    """How often a layer goes forward for one microbatch."""
    return 1 + (layout.recompute == "full")


def tensor_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """All-reduce by all-reduce."""
    bytes_each = layout.tokens(batch) * model.hidden * batch.precision.activations
    link = group_link(cluster, layout.tensor, 1)
    one = ring_s(layout.tensor, bytes_each, link) * 2
    per_layer = one * 2 * _passes(layout) + one * 2
    layers = layout.stage_layers(model, 0)
    return per_layer * layers * layout.microbatches(batch)


def context_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Gather by gather."""
    key = model.kv_heads * (model.hidden // model.heads) // layout.tensor
    keys = layout.microbatch * batch.sequence * key * batch.precision.activations
    link = group_link(cluster, layout.context, layout.tensor)
    one = ring_s(layout.context, 2 * keys, link)
    per_layer = one * _passes(layout) + one * 2
    layers = layout.stage_layers(model, 0)
    return per_layer * layers * layout.microbatches(batch)


def pipeline_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Message by message."""
    is_near = layout.num_gpus <= cluster.gpus_per_node
    link = cluster.intra_node if is_near else cluster.inter_node
    sent: float = layout.tokens(batch) * model.hidden * batch.precision.activations
    if layout.sequence_parallel:
        sent /= layout.tensor
    number = 2 * layout.chunks * layout.microbatches(batch) * (layout.pipeline > 1)
    return number * (link.alpha_s + sent / link.bytes_per_s)


def exposed_data_s(
    model: Model, layout: Layout, batch: Batch, cluster: Cluster
) -> float:
    """Pass by pass."""
    size = max(stage_parameters(model, layout, i) for i in range(layout.pipeline))
    layers, ranks = layout.stage_layers(model, 0), layout.data * layout.context
    link = group_link(cluster, ranks, layout.tensor)
    reduce, gather = (
        layers * ring_s(ranks, size / layers * each, link)
        for each in (batch.precision.gradients, batch.precision.weights)
    )
    own = slowest_pass(model, layout, batch, cluster)
    exposed = 0.0
    for number in range(layout.microbatches(batch)):
        is_first, is_last = number == 0, number == layout.microbatches(batch) - 1
        forward = backward = 0.0
        if layout.zero_stage == 3:
            forward, backward = gather, gather + reduce
        else:
            forward = gather if is_first and layout.zero_stage else 0.0
            if layout.zero_stage == 2 or is_last:
                backward = reduce * (1 if layout.zero_stage else 2)
        exposed += max(0.0, forward - own.forward_s)
        exposed += max(0.0, backward - own.backward_s)
    return exposed


def update_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Weight by weight."""
    size = max(stage_parameters(model, layout, i) for i in range(layout.pipeline))
    own = size / (layout.data * layout.context) if layout.zero_stage else size
    kept = batch.precision
    read = kept.master_weights + kept.moments + kept.gradients
    written = kept.master_weights + kept.moments + kept.weights
    return own * (read + written) / cluster.memory_bytes_per_s


def step_time(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> StepTime:
    """The parts, and the bubble."""
    question = model, layout, batch, cluster
    own = slowest_pass(*question)
    m = layout.microbatches(batch)
    messages = tensor_s(*question) + context_s(*question) + pipeline_s(*question)
    one = own.forward_s + own.backward_s + messages / m
    return StepTime(
        compute_s=m * (own.forward_s + own.backward_s),
        tensor_s=tensor_s(*question),
        context_s=context_s(*question),
        pipeline_s=pipeline_s(*question),
        bubble_s=one * (layout.pipeline - 1) / layout.chunks,
        data_s=exposed_data_s(*question),
        update_s=update_s(*question),
    )


# ── 3.32 layout ─────────────────────────────────────────────────────────────────────


def useful_degrees(
    model: Model, batch: Batch, cluster: Cluster, microbatches: int, bubble: float
) -> Degrees:
    """Seconds per degree, solved."""
    flops_s = 1 / (cluster.peak_flops * cluster.matmul_efficiency)
    near_s = 1 / cluster.intra_node.bytes_per_s
    far_s = 1 / cluster.inter_node.bytes_per_s
    kept, h = batch.precision, model.hidden
    weights = sum(rows * columns for rows, columns in matrices(model))
    keys = 2 * model.kv_heads * (h // model.heads)
    backward_s = 4 * batch.sequence * batch.global_batch * flops_s  # one weight, n = 1
    return Degrees(
        data=backward_s / (2 * kept.gradients * far_s),
        # 2 w / t on one side, 2 · 2 h (t - 1) / t on the other, for each token
        tensor=1 + 2 * weights * flops_s / (4 * h * kept.activations * near_s),
        # 4 h s / c on one side, keys (c - 1) / c on the other, for each token
        context=1
        + 4 * h * batch.sequence * flops_s / (keys * kept.activations * far_s),
        pipeline=1 + microbatches * bubble / (1 - bubble),
    )


def valid_layouts(model: Model, batch: Batch, num_gpus: int) -> Iterator[Layout]:
    """All that there are, tried one by one."""
    some = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    sizes = [n for n in range(1, batch.global_batch + 1) if batch.global_batch % n == 0]
    for tensor, pipeline, context in product(some, repeat=3):
        data, left = divmod(num_gpus, tensor * pipeline * context)
        if left or pipeline > model.layers:
            continue
        for chunks, zero_stage, microbatch, recompute, is_split in product(
            range(1, model.layers // pipeline + 1),
            range(4),
            sizes,
            RECOMPUTE,
            (False, True),
        ):
            layout = Layout(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                chunks=chunks,
                zero_stage=zero_stage,
                microbatch=microbatch,
                recompute=recompute,
                sequence_parallel=is_split,
            )
            if not layout.problem(model, batch):
                yield layout


# ── 3.33 goodput ────────────────────────────────────────────────────────────────────


def checkpoint_interval_s(save_s: float, mtbf_s: float) -> float:
    """Young (1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def no_spare_probability(recovery: Recovery, mtbf_s: float) -> float:
    """The Poisson distribution, term by term."""
    mean = recovery.repair_s / mtbf_s
    terms = [
        math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        if mean
        else float(not k)
        for k in range(recovery.spare_nodes)
    ]
    return 1 - math.fsum(terms)


def goodput(
    cluster: Cluster, num_gpus: int, recovery: Recovery, training_s: float
) -> Goodput:
    """Seconds added up, rather than factors multiplied."""
    mtbf_s = cluster.gpu_mtbf_s / num_gpus
    interval_s = checkpoint_interval_s(recovery.save_s, mtbf_s)
    wait_s = recovery.repair_s / (1 + recovery.spare_nodes)
    lost_s = (
        recovery.detection_s
        + recovery.restart_s
        + interval_s / 2
        + wait_s * no_spare_probability(recovery, mtbf_s)
    )
    running_s = training_s + training_s / interval_s * recovery.save_s
    wall_s = running_s + running_s / mtbf_s * lost_s
    nodes = num_gpus / cluster.gpus_per_node + recovery.spare_nodes
    hourly = nodes * cluster.gpus_per_node * cluster.price_per_gpu_hour
    return Goodput(
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        lost_s=lost_s,
        share=training_s / wall_s,
        wall_s=wall_s,
        price=hourly * wall_s / 3600,
    )
