"""Planning a run: what fits, how long a step takes, which layout, and what it costs.

Guide: phase3_multi_node/guide/planning.md.
Source: D. Narayanan et al. (arXiv 2104.04473) for the layouts, V. Korthikanti et al.
(2205.05198) for activations, S. Rajbhandari et al. (1910.02054) for ZeRO, A. Chowdhery
et al. (2204.02311), appendix B, for the operations and MFU, J. Austin et al., "How to
Scale Your Model" (jax-ml.github.io/scaling-book) for the largest degrees, and J. W.
Young (CACM 1974) for the interval between checkpoints.
Symbols: L layers of width h; a heads and k key/value heads, h / a wide each; f the
inner width of the MLP; v tokens in the vocabulary; s tokens in a sequence; d, t, p and
c the degrees of data, tensor, pipeline and context; m microbatches on each GPU.
Cost: no message. Everything here is a formula, in bytes, seconds and FLOP.

A layer of Llama 3 has these matrices, and two RMSNorms of h weights:

    query, output    h × h          two of them
    key, value       h × h k / a    two of them
    MLP              h × f          three of them if it is gated, two otherwise
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import ceil, exp, sqrt

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
    show_degrees,
    show_goodput,
)


# ── 3.29 size ───────────────────────────────────────────────────────────────────────
def model_size(model: Model, sequence: int) -> ModelSize:
    """Count the weights of a model, and the operations that training costs per token.

    A product of an m × k and a k × n matrix takes 2 m k n operations. A backward pass
    takes twice as many as the forward pass, because each product has two gradients.
    Attention counts all pairs of tokens, also those that the causal mask hides, as in
    PaLM's definition of MFU. Norms, softmax and the like take no operations.
    C1 `parameters` counts every weight of the model once: matrices, norms and
       embeddings, for any number of key/value heads, with and without a gate, tied or
       not.
    C2 `weight_flops` is 6 operations for each weight that a token is multiplied with. A
       lookup in the embedding isn't a product, but the output layer is one, even if it
       is tied.
    C3 `attention_flops` counts the products of queries with keys and of scores with
       values, forward and backward, in all layers.
    In torch.distributed: nothing; torch.utils.flop_counter.FlopCounterMode counts them
    Example: Llama 3 8B, s = 8,192: 8,030,261,248 weights; 45.0 and 12.9 GFLOP per token
    Cost: no message. Check: distlab check 3.29
    """
    ### BEGIN SOLUTION planning.model_size
    #| which matrices are there, and how many weights do the norms have?
    #| through which matrices does a token go? the input embedding is only looked up
    h, layers = model.hidden, model.layers
    attention = 2 * h * h + 2 * h * model.kv_hidden
    mlp = (3 if model.gated else 2) * h * model.ffn
    matrices = layers * (attention + mlp)
    norms = (2 * layers + 1) * h
    unembedding = model.vocab * h
    embedding = 0 if model.tied else unembedding
    return ModelSize(
        parameters=matrices + norms + unembedding + embedding,
        weight_flops=6 * (matrices + unembedding),
        attention_flops=12 * layers * h * sequence,
    )
    ### END SOLUTION


# ── 3.30 memory ─────────────────────────────────────────────────────────────────────
def layer_parameters(model: Model, layout: Layout) -> int:
    """Return the weights of one layer on one GPU.

    3.30 C1 `layer_parameters` divides each matrix of a layer by t, but not the norms.
    """
    ### BEGIN SOLUTION planning.step_memory
    #| tensor parallelism splits each matrix, and no norm
    h = model.hidden
    attention = 2 * h * h + 2 * h * model.kv_hidden
    mlp = (3 if model.gated else 2) * h * model.ffn
    return (attention + mlp) // layout.tensor + 2 * h
    ### END SOLUTION


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """Return the weights of one pipeline stage on one GPU, before ZeRO shards them.

    The embedding is split by rows, of which a GPU has ⌈v / t⌉.

    3.30 C2 `stage_parameters` adds the input embedding to the first stage, and the last
            norm and the output layer to the last one. A tied matrix exists once if both
            are the same stage, and on both otherwise.
    """
    ### BEGIN SOLUTION planning.step_memory
    #| what does the first stage have beside its layers, and what does the last one?
    #| on a single stage, tied embeddings are one matrix. on two stages?
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    embedding = ceil(model.vocab / layout.tensor) * model.hidden
    size = layout.stage_layers(model, stage) * layer_parameters(model, layout)
    if is_first:
        size += embedding
    if is_last:
        size += model.hidden  # the last norm
        if not (is_first and model.tied):
            size += embedding
    return size
    ### END SOLUTION


def layer_activation_bytes(
    model: Model, layout: Layout, batch: Batch, recompute: Recompute
) -> float:
    """Return the bytes that one layer keeps on a GPU for one microbatch's backward.

    These elements are kept for each token:

        inputs of both norms, and their outputs                     4 h
        queries, and the input of the output matrix                 2 h
        keys and values                                             2 h k / a
        MLP: gate, up, and the input of the last matrix             3 f
             without a gate: input and output of the activation     2 f
        attention: the softmax over all tokens of the sequence      a s

    3.30 C3 `layer_activation_bytes` without recomputation counts the tokens of this
            GPU. The tensor ranks split everything but the inputs and outputs of the
            norms, and sequence parallelism splits these too.
         C4 With selective recomputation, a layer doesn't keep the softmax. With full
            recomputation, it keeps only the input of its first norm.
    """
    ### BEGIN SOLUTION planning.step_memory
    #| which of them are split over the tensor ranks, and which only with
    #| sequence parallelism? how many tokens of the microbatch does this GPU have?
    h, t = model.hidden, layout.tensor
    whole = 4 * h
    split = 2 * h + 2 * model.kv_hidden + (3 if model.gated else 2) * model.ffn
    if recompute == "none":
        split += model.heads * batch.sequence
    if recompute == "full":
        whole, split = h, 0
    elements = whole / (t if layout.sequence_parallel else 1) + split / t
    return layout.tokens(batch) * elements * batch.precision.activations
    ### END SOLUTION


def stage_memory(model: Model, layout: Layout, batch: Batch, stage: int) -> Memory:
    """Return the memory of a GPU of one pipeline stage at the peak of a step.

    Given: the schedule is 1F1B, or interleaved if layout.chunks is above 1. A GPU of
    the last stage also keeps, for one microbatch, the input and output of the last
    norm, 2 h elements for each token, which sequence parallelism splits, and ⌈v / t⌉
    logits of 4 bytes for each token.

    3.30 C5 In `stage_memory`, ZeRO shards the optimizer state (master weights and
            moments) from stage 1 on, the gradients from stage 2 on, and the weights at
            stage 3, which adds the unsharded weights of one layer.
         C6 `activations_bytes` counts all layers of the stage for each microbatch in
            flight, of which there are at most m. With full recomputation, it adds what
            one layer keeps with selective recomputation. On the last stage, it adds the
            last norm and the logits.
    In torch.distributed: nothing; torch.cuda.max_memory_allocated() measures it
    Cost: no message. Check: distlab check 3.30
    """
    ### BEGIN SOLUTION planning.step_memory
    #| which of the three does each ZeRO stage shard? see your 3.12
    #| how many microbatches are in flight on this stage? see your 2.14 and 2.21
    precision, tokens = batch.precision, layout.tokens(batch)
    size, shards = stage_parameters(model, layout, stage), layout.shards
    weights: float = precision.weights * size
    if layout.zero_stage == 3:
        weights = weights / shards + precision.weights * layer_parameters(model, layout)
    gradients = precision.gradients * size
    optimizer = (precision.master_weights + precision.moments) * size

    p, chunks = layout.pipeline, layout.chunks
    in_flight: float = p - stage
    if chunks > 1:
        in_flight = ((chunks - 1) * p + 2 * (p - 1 - stage) + 1) / chunks
    in_flight = min(layout.microbatches(batch), in_flight)
    layers = layout.stage_layers(model, stage)
    kept = layer_activation_bytes(model, layout, batch, layout.recompute)
    activations = in_flight * layers * kept
    if layout.recompute == "full":
        activations += layer_activation_bytes(model, layout, batch, "selective")
    if stage == p - 1:
        split = layout.tensor if layout.sequence_parallel else 1
        norm = 2 * model.hidden * precision.activations / split
        activations += tokens * (norm + 4 * ceil(model.vocab / layout.tensor))
    return Memory(
        weights_bytes=weights,
        gradients_bytes=gradients / (shards if layout.zero_stage >= 2 else 1),
        optimizer_bytes=optimizer / (shards if layout.zero_stage >= 1 else 1),
        activations_bytes=activations,
    )
    ### END SOLUTION


def step_memory(model: Model, layout: Layout, batch: Batch) -> Memory:
    """Return the memory of the stage that needs most, the first one or the last."""
    first = stage_memory(model, layout, batch, 0)
    last = stage_memory(model, layout, batch, layout.pipeline - 1)
    return max(first, last, key=lambda memory: memory.total_bytes)


# ── 3.31 time ───────────────────────────────────────────────────────────────────────
def roofline_s(flops: float, num_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of an operation on one GPU that also moves `num_bytes`.

    Large matmuls reach matmul_efficiency · peak_flops. The GPU computes while it reads
    and writes its memory, so the slower of the two decides.

    3.31 C1 `roofline_s` is limited by the operations or by the bytes, whichever takes
            longer, and `mfu` is correct.
    """
    ### BEGIN SOLUTION planning.step_time
    #| how long does each of the two take alone?
    compute_s = flops / (cluster.peak_flops * cluster.matmul_efficiency)
    return max(compute_s, num_bytes / cluster.memory_bytes_per_s)
    ### END SOLUTION


def ring_s(n: int, num_bytes: float, link: Link) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter over n ranks.

    `num_bytes` is the size of the full tensor, which n equal chunks make up.

    3.31 C2 `ring_s` has the latency and the bytes of all n - 1 steps.
    """
    ### BEGIN SOLUTION planning.step_time
    #| see your 3.6. an all-reduce is both of them, one after the other
    return (n - 1) * (link.alpha_s + num_bytes / n / link.bytes_per_s)
    ### END SOLUTION


def group_link(cluster: Cluster, size: int, stride: int) -> Link:
    """Return the link that limits a ring over `size` ranks, from rank 0 on.

    Given: the ranks are `stride` apart, and stride divides gpus_per_node or the other
    way round. If the group spans nodes, several of its ranks may be on the same node.
    The ring is then cut into that many rings, and each leaves the node through the link
    of another rank. All bytes pass `intra_node` too, so no ring is faster than that.

    3.31 C3 `group_link` is intra_node for a group within a node. Otherwise it has the
            latency of inter_node and the bandwidth of all links by which the group
            leaves a node.
    """
    ### BEGIN SOLUTION planning.step_time
    #| does the group fit into a node? if not, how many of its ranks are on one?
    if size * stride <= cluster.gpus_per_node:
        return cluster.intra_node
    ranks_on_node = max(1, cluster.gpus_per_node // stride)
    return Link(
        alpha_s=cluster.inter_node.alpha_s,
        bytes_per_s=min(
            cluster.intra_node.bytes_per_s,
            ranks_on_node * cluster.inter_node.bytes_per_s,
        ),
    )
    ### END SOLUTION


def pass_times(
    model: Model, layout: Layout, batch: Batch, cluster: Cluster
) -> tuple[float, float]:
    """Return the seconds of a forward and a backward pass over one microbatch.

    They are those of the slowest stage, without its messages. Recomputation is a part
    of the backward pass. The weights are read in the forward pass, and twice in the
    backward pass.
    """
    h, t, tokens = model.hidden, layout.tensor, layout.tokens(batch)
    slowest = (0.0, 0.0)
    for stage in {0, layout.pipeline - 1}:
        layers = layout.stage_layers(model, stage)
        matrices = layers * (layer_parameters(model, layout) - 2 * h)
        attention = 4 * tokens * h * batch.sequence * layers / t
        layers_flops = 2 * tokens * matrices + attention
        output_flops = 0.0
        if stage == layout.pipeline - 1:
            output_flops = 2 * tokens * ceil(model.vocab / t) * h
        forward = layers_flops + output_flops
        again = {"none": 0.0, "selective": attention, "full": layers_flops}
        read = batch.precision.weights * stage_parameters(model, layout, stage)
        seconds = (
            roofline_s(forward, read, cluster),
            roofline_s(2 * forward + again[layout.recompute], 2 * read, cluster),
        )
        slowest = max(slowest, seconds, key=sum)
    return slowest


def tensor_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds of a step's messages between tensor ranks.

    Given: a layer has two all-reduces in a forward pass and two in a backward pass.
    Each sums h elements for each token of the microbatch. With sequence parallelism, a
    reduce-scatter and an all-gather take its place, which together take as long.

    3.31 C4 `tensor_s`, `context_s` and `pipeline_s` have the right messages, in the
            right number, over the right links. Full recomputation repeats the messages
            of a layer's forward pass.
    """
    ### BEGIN SOLUTION planning.step_time
    #| how often does a layer's forward pass run if it is recomputed?
    forwards = 2 if layout.recompute == "full" else 1
    num_bytes = layout.tokens(batch) * model.hidden * batch.precision.activations
    link = group_link(cluster, layout.tensor, 1)
    all_reduce_s = 2 * ring_s(layout.tensor, num_bytes, link)
    passes = layout.microbatches(batch) * layout.stage_layers(model, 0)
    return passes * (2 * forwards + 2) * all_reduce_s
    ### END SOLUTION


def context_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds of a step's messages between context ranks.

    Given: a layer all-gathers the keys and values of the full sequences in the forward
    pass. In the backward pass it gathers them again, and reduce-scatters their
    gradients. A tensor rank has 1 / t of the heads.
    """
    ### BEGIN SOLUTION planning.step_time
    #| how many bytes are the keys and values of a microbatch, and whose are they?
    forwards = 2 if layout.recompute == "full" else 1
    elements = layout.microbatch * batch.sequence * 2 * model.kv_hidden
    num_bytes = elements * batch.precision.activations / layout.tensor
    link = group_link(cluster, layout.context, layout.tensor)
    passes = layout.microbatches(batch) * layout.stage_layers(model, 0)
    return passes * (forwards + 2) * ring_s(layout.context, num_bytes, link)
    ### END SOLUTION


def pipeline_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds of a step's messages between pipeline stages.

    Given: with at least two stages, each microbatch waits for one message forward and
    one backward for each of the q chunks. A message has h elements for each token. With
    sequence parallelism, a tensor rank sends 1 / t of them. If the GPUs need more than
    one node, the messages pass `inter_node`.
    """
    ### BEGIN SOLUTION planning.step_time
    #| α and bytes of one message; how many are there for each microbatch?
    if layout.pipeline == 1:
        return 0.0
    is_one_node = layout.num_gpus <= cluster.gpus_per_node
    link = cluster.intra_node if is_one_node else cluster.inter_node
    num_bytes = layout.tokens(batch) * model.hidden * batch.precision.activations
    split = layout.tensor if layout.sequence_parallel else 1
    message_s = link.alpha_s + num_bytes / split / link.bytes_per_s
    return 2 * layout.microbatches(batch) * layout.chunks * message_s
    ### END SOLUTION


def exposed_data_s(
    model: Model, layout: Layout, batch: Batch, cluster: Cluster
) -> float:
    """Return how long the data-parallel messages last beyond the passes that hide them.

    Given: they are sent layer by layer, and each layer of the larger stage stands for
    an equal part of the stage's weights. A pass hides messages for as long as it
    computes, which pass_times() returns:

        stage 0    an all-reduce of the gradients, in the last microbatch's backward
        stage 1    a reduce-scatter there, and an all-gather of the new weights in the
                   first microbatch's forward
        stage 2    a reduce-scatter in each backward, and the same all-gather
        stage 3    an all-gather in each forward, and an all-gather and a reduce-scatter
                   in each backward

    3.31 C5 `exposed_data_s` is correct at ZeRO stages 0 to 3.
    """
    ### BEGIN SOLUTION planning.step_time
    #| how long does a pass reduce all gradients, or gather all weights?
    #| what is left over of it behind one forward, and behind one backward?
    sizes = [stage_parameters(model, layout, i) for i in (0, layout.pipeline - 1)]
    layers, m = layout.stage_layers(model, 0), layout.microbatches(batch)
    link = group_link(cluster, layout.shards, layout.tensor)

    def all_layers_s(bytes_per_element: int) -> float:
        num_bytes = bytes_per_element * max(sizes) / layers
        return layers * ring_s(layout.shards, num_bytes, link)

    reduce_s = all_layers_s(batch.precision.gradients)
    gather_s = all_layers_s(batch.precision.weights)
    forward_s, backward_s = pass_times(model, layout, batch, cluster)
    if layout.zero_stage == 0:
        return max(0.0, 2 * reduce_s - backward_s)
    if layout.zero_stage == 3:
        backward = max(0.0, gather_s + reduce_s - backward_s)
        return m * (max(0.0, gather_s - forward_s) + backward)
    reductions = m if layout.zero_stage == 2 else 1
    backward = reductions * max(0.0, reduce_s - backward_s)
    return max(0.0, gather_s - forward_s) + backward
    ### END SOLUTION


def update_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds in which the optimizer updates the weights of a GPU.

    Given: it reads and writes master weights and moments, reads gradients and writes
    weights, as fast as the memory allows. The larger stage takes longest. With ZeRO, a
    GPU updates its own shard only.
    """
    ### BEGIN SOLUTION planning.step_time
    #| how many bytes does one weight move, and how many weights are there?
    sizes = [stage_parameters(model, layout, i) for i in (0, layout.pipeline - 1)]
    updated = max(sizes) / (layout.shards if layout.zero_stage else 1)
    precision = batch.precision
    state = 2 * (precision.master_weights + precision.moments)
    moved = updated * (state + precision.gradients + precision.weights)
    return moved / cluster.memory_bytes_per_s
    ### END SOLUTION


def step_time(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> StepTime:
    """Return the seconds of a step by cause.

    A GPU computes m microbatches, one after another, and waits for the messages of the
    tensor, context and pipeline ranks each time. So do the microbatches of the bubble.
    Then come the data-parallel messages that nothing hides, and the update.

    3.31 C6 `update_s` is correct, and `step_time` has the computation of m microbatches
            and the bubble, which lasts as long as p - 1 microbatches, or p - 1 chunks
            if the schedule is interleaved.
    In torch.distributed: nothing; torch.profiler shows where the time of a step goes
    Cost: no message. Check: distlab check 3.31
    """
    ### BEGIN SOLUTION planning.step_time
    #| for how many microbatches does a stage of 1F1B have nothing to do?
    question = model, layout, batch, cluster
    compute_s = layout.microbatches(batch) * sum(pass_times(*question))
    messages_s = tensor_s(*question), context_s(*question), pipeline_s(*question)
    microbatch_s = (compute_s + sum(messages_s)) / layout.microbatches(batch)
    return StepTime(
        compute_s=compute_s,
        tensor_s=messages_s[0],
        context_s=messages_s[1],
        pipeline_s=messages_s[2],
        bubble_s=(layout.pipeline - 1) * microbatch_s / layout.chunks,
        data_s=exposed_data_s(*question),
        update_s=update_s(*question),
    )
    ### END SOLUTION


def mfu(
    model: Model, batch: Batch, cluster: Cluster, num_gpus: int, step_s: float
) -> float:
    """Return the model FLOPs utilization (MFU) of a step that takes step_s.

    Of the operations that the GPUs could have computed at peak_flops in this time, it
    is the share that the model needs. Unlike HFU (hardware FLOPs utilization), it
    doesn't count recomputation.
    """
    ### BEGIN SOLUTION planning.step_time
    #| see your 3.29
    flops = model_size(model, batch.sequence).flops_per_token * batch.tokens
    return flops / (num_gpus * cluster.peak_flops * step_s)
    ### END SOLUTION


# ── 3.32 layout ─────────────────────────────────────────────────────────────────────
def useful_degrees(
    model: Model, batch: Batch, cluster: Cluster, microbatches: int, bubble: float
) -> Degrees:
    """Return the degree of each axis at which both of these take equally long.

    Given: links have no latency, and products take their operations divided by
    matmul_efficiency · peak_flops. `bubble` is below 1.

        data       the products of a backward pass over the whole batch with N weights,
                   on d ranks, and an all-reduce of N gradients over inter_node, in
                   which a rank sends them twice (2 (d - 1) / d is nearly 2)
        tensor     the products of a layer's forward pass with weights, and its two
                   all-reduces over intra_node
        context    the attention of a layer's forward pass, and the all-gather of its
                   keys and values over inter_node
        pipeline   `bubble`, and the bubble's share of m + p - 1 microbatches in 1F1B

    3.32 C1 `useful_degrees` returns for each axis the n at which both times are equal.
    """
    ### BEGIN SOLUTION planning.choose_layout
    #| write down both times with the degree in them, and solve for it. what cancels?
    flops = cluster.peak_flops * cluster.matmul_efficiency
    inside, between = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    precision = batch.precision
    layer = layer_parameters(model, Layout()) - 2 * model.hidden
    heads = model.hidden / model.kv_hidden
    return Degrees(
        data=2 * batch.tokens * between / (precision.gradients * flops),
        tensor=1 + layer * inside / (2 * precision.activations * model.hidden * flops),
        context=1
        + 2 * heads * batch.sequence * between / (precision.activations * flops),
        pipeline=1 + microbatches * bubble / (1 - bubble),
    )
    ### END SOLUTION


def valid_layouts(model: Model, batch: Batch, num_gpus: int) -> Iterator[Layout]:
    """Yield every layout on num_gpus GPUs for which layout.problem() returns "".

    3.32 C2 `valid_layouts` yields each valid layout exactly once, and no other.
    """
    ### BEGIN SOLUTION planning.choose_layout
    #| which degrees can there be, and which microbatches?
    degrees = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    sizes = [n for n in range(1, batch.global_batch + 1) if not batch.global_batch % n]
    for t, p, c in product(degrees, repeat=3):
        if num_gpus % (t * p * c):
            continue
        chunks = range(1, model.layers // p + 1)
        flags = product(chunks, range(4), sizes, RECOMPUTE, (False, True))
        for q, zero_stage, microbatch, recompute, sequence_parallel in flags:
            layout = Layout(
                data=num_gpus // (t * p * c),
                tensor=t,
                pipeline=p,
                context=c,
                chunks=q,
                zero_stage=zero_stage,
                microbatch=microbatch,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
            )
            if not layout.problem(model, batch):
                yield layout
    ### END SOLUTION


def choose_layout(
    model: Model, batch: Batch, cluster: Cluster, num_gpus: int
) -> Layout | None:
    """Return a fast layout on num_gpus GPUs that fits into their memory.

    Given: a layout is valid if layout.problem() returns "". It fits if step_memory() is
    at most cluster.memory_bytes.

    3.32 C3 The chosen layout is valid and fits, even if it needs exactly memory_bytes.
         C4 A step with the chosen layout takes at most 5 % longer than with the best
            one.
         C5 If no layout fits, `choose_layout` returns None.
    In torch.distributed: nothing; torchtitan and Megatron ask you for the degrees
    Cost: no message. Check: distlab check 3.32
    """
    ### BEGIN SOLUTION planning.choose_layout
    #| of all that are valid, which ones fit? which of those is the fastest?
    fitting = [
        layout
        for layout in valid_layouts(model, batch, num_gpus)
        if step_memory(model, layout, batch).total_bytes <= cluster.memory_bytes
    ]
    return min(
        fitting,
        key=lambda layout: step_time(model, layout, batch, cluster).total_s,
        default=None,
    )
    ### END SOLUTION


# ── 3.33 goodput ────────────────────────────────────────────────────────────────────
def checkpoint_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval between checkpoints.

    3.33 C1 `checkpoint_interval_s` is Young's formula.
    """
    ### BEGIN SOLUTION planning.goodput
    #| which interval loses the least, in saves and in lost steps together?
    return sqrt(2 * save_s * mtbf_s)
    ### END SOLUTION


def no_spare_probability(recovery: Recovery, mtbf_s: float) -> float:
    """Return the probability that a failure finds all spare nodes used up.

    Given: with failures every mtbf_s, the number of nodes that are being repaired has a
    Poisson distribution of mean x = repair_s / mtbf_s. It is k with the probability
    x^k / k! · e^-x. Each of them has taken a spare node, if there was one. There are at
    most 100 spare nodes.

    3.33 C2 `no_spare_probability` is the probability that at least spare_nodes nodes
            are being repaired.
    """
    ### BEGIN SOLUTION planning.goodput
    #| how many nodes may be in repair so that one spare node is left?
    mean = recovery.repair_s / mtbf_s
    left, term = 0.0, exp(-mean)
    for used in range(recovery.spare_nodes):
        left += term
        term *= mean / (used + 1)
    return 1 - left
    ### END SOLUTION


def goodput(
    cluster: Cluster, num_gpus: int, recovery: Recovery, training_s: float
) -> Goodput:
    """Return what failures make of a run that would take training_s without them.

    Given: one GPU fails every cluster.gpu_mtbf_s on average, and any failure stops the
    job. While it runs, it saves a checkpoint after every interval of training. A
    failure costs detection, restart and half an interval. If no spare node is left, the
    job also waits for the first node to be repaired. That takes repair_s /
    (spare_nodes + 1) on average, because that many nodes are being repaired.

    3.33 C3 n GPUs fail n times as often as one. `lost_s` is what a failure costs on
            average, including the wait for a repair.
         C4 `share` counts the saves, and the failures during training and saving.
         C5 `wall_s` and `price` are correct. Spare nodes cost as much as the others.
    In torch.distributed: nothing; torchrun restarts a job, and counts no losses
    Cost: no message. Check: distlab check 3.33
    """
    ### BEGIN SOLUTION planning.goodput
    #| how often does the job fail? how much does it lose each time?
    #| how much longer do saves make the run, and failures the longer run?
    mtbf_s = cluster.gpu_mtbf_s / num_gpus
    interval_s = checkpoint_interval_s(recovery.save_s, mtbf_s)
    lost_s = recovery.detection_s + recovery.restart_s + interval_s / 2
    wait_s = recovery.repair_s / (recovery.spare_nodes + 1)
    lost_s += no_spare_probability(recovery, mtbf_s) * wait_s
    share = 1 / ((1 + recovery.save_s / interval_s) * (1 + lost_s / mtbf_s))
    wall_s = training_s / share
    rented = num_gpus + recovery.spare_nodes * cluster.gpus_per_node
    return Goodput(
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        lost_s=lost_s,
        share=share,
        wall_s=wall_s,
        price=rented * wall_s / 3600 * cluster.price_per_gpu_hour,
    )
    ### END SOLUTION


if __name__ == "__main__":
    for show in (partial(show_degrees, useful_degrees), partial(show_goodput, goodput)):
        try:
            show()
        except NotImplementedError as missing:
            print(f"{missing} is not written yet")
