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
    # TODO(planning.model_size)
    # which matrices are there, and how many weights do the norms have?
    # through which matrices does a token go? the input embedding is only looked up
    raise NotImplementedError("planning.model_size")


# ── 3.30 memory ─────────────────────────────────────────────────────────────────────
def layer_parameters(model: Model, layout: Layout) -> int:
    """Return the weights of one layer on one GPU.

    3.30 C1 `layer_parameters` divides each matrix of a layer by t, but not the norms.
    """
    # TODO(planning.step_memory)
    # tensor parallelism splits each matrix, and no norm
    raise NotImplementedError("planning.step_memory")


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """Return the weights of one pipeline stage on one GPU, before ZeRO shards them.

    The embedding is split by rows, of which a GPU has ⌈v / t⌉.

    3.30 C2 `stage_parameters` adds the input embedding to the first stage, and the last
            norm and the output layer to the last one. A tied matrix exists once if both
            are the same stage, and on both otherwise.
    """
    # TODO(planning.step_memory)
    # what does the first stage have beside its layers, and what does the last one?
    # on a single stage, tied embeddings are one matrix. on two stages?
    raise NotImplementedError("planning.step_memory")


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
    # TODO(planning.step_memory)
    # which of them are split over the tensor ranks, and which only with
    # sequence parallelism? how many tokens of the microbatch does this GPU have?
    raise NotImplementedError("planning.step_memory")


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
    # TODO(planning.step_memory)
    # which of the three does each ZeRO stage shard? see your 3.12
    # how many microbatches are in flight on this stage? see your 2.14 and 2.21
    raise NotImplementedError("planning.step_memory")


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
    # TODO(planning.step_time)
    # how long does each of the two take alone?
    raise NotImplementedError("planning.step_time")


def ring_s(n: int, num_bytes: float, link: Link) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter over n ranks.

    `num_bytes` is the size of the full tensor, which n equal chunks make up.

    3.31 C2 `ring_s` has the latency and the bytes of all n - 1 steps.
    """
    # TODO(planning.step_time)
    # see your 3.6. an all-reduce is both of them, one after the other
    raise NotImplementedError("planning.step_time")


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
    # TODO(planning.step_time)
    # does the group fit into a node? if not, how many of its ranks are on one?
    raise NotImplementedError("planning.step_time")


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
    # TODO(planning.step_time)
    # how often does a layer's forward pass run if it is recomputed?
    raise NotImplementedError("planning.step_time")


def context_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds of a step's messages between context ranks.

    Given: a layer all-gathers the keys and values of the full sequences in the forward
    pass. In the backward pass it gathers them again, and reduce-scatters their
    gradients. A tensor rank has 1 / t of the heads.
    """
    # TODO(planning.step_time)
    # how many bytes are the keys and values of a microbatch, and whose are they?
    raise NotImplementedError("planning.step_time")


def pipeline_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds of a step's messages between pipeline stages.

    Given: with at least two stages, each microbatch waits for one message forward and
    one backward for each of the q chunks. A message has h elements for each token. With
    sequence parallelism, a tensor rank sends 1 / t of them. If the GPUs need more than
    one node, the messages pass `inter_node`.
    """
    # TODO(planning.step_time)
    # α and bytes of one message; how many are there for each microbatch?
    raise NotImplementedError("planning.step_time")


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
    # TODO(planning.step_time)
    # how long does a pass reduce all gradients, or gather all weights?
    # what is left over of it behind one forward, and behind one backward?
    raise NotImplementedError("planning.step_time")


def update_s(model: Model, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the seconds in which the optimizer updates the weights of a GPU.

    Given: it reads and writes master weights and moments, reads gradients and writes
    weights, as fast as the memory allows. The larger stage takes longest. With ZeRO, a
    GPU updates its own shard only.
    """
    # TODO(planning.step_time)
    # how many bytes does one weight move, and how many weights are there?
    raise NotImplementedError("planning.step_time")


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
    # TODO(planning.step_time)
    # for how many microbatches does a stage of 1F1B have nothing to do?
    raise NotImplementedError("planning.step_time")


def mfu(
    model: Model, batch: Batch, cluster: Cluster, num_gpus: int, step_s: float
) -> float:
    """Return the model FLOPs utilization (MFU) of a step that takes step_s.

    Of the operations that the GPUs could have computed at peak_flops in this time, it
    is the share that the model needs. Unlike HFU (hardware FLOPs utilization), it
    doesn't count recomputation.
    """
    # TODO(planning.step_time)
    # see your 3.29
    raise NotImplementedError("planning.step_time")


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
    # TODO(planning.choose_layout)
    # write down both times with the degree in them, and solve for it. what cancels?
    raise NotImplementedError("planning.choose_layout")


def valid_layouts(model: Model, batch: Batch, num_gpus: int) -> Iterator[Layout]:
    """Yield every layout on num_gpus GPUs for which layout.problem() returns "".

    3.32 C2 `valid_layouts` yields each valid layout exactly once, and no other.
    """
    # TODO(planning.choose_layout)
    # which degrees can there be, and which microbatches?
    raise NotImplementedError("planning.choose_layout")


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
    # TODO(planning.choose_layout)
    # of all that are valid, which ones fit? which of those is the fastest?
    raise NotImplementedError("planning.choose_layout")


# ── 3.33 goodput ────────────────────────────────────────────────────────────────────
def checkpoint_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval between checkpoints.

    3.33 C1 `checkpoint_interval_s` is Young's formula.
    """
    # TODO(planning.goodput)
    # which interval loses the least, in saves and in lost steps together?
    raise NotImplementedError("planning.goodput")


def no_spare_probability(recovery: Recovery, mtbf_s: float) -> float:
    """Return the probability that a failure finds all spare nodes used up.

    Given: with failures every mtbf_s, the number of nodes that are being repaired has a
    Poisson distribution of mean x = repair_s / mtbf_s. It is k with the probability
    x^k / k! · e^-x. Each of them has taken a spare node, if there was one. There are at
    most 100 spare nodes.

    3.33 C2 `no_spare_probability` is the probability that at least spare_nodes nodes
            are being repaired.
    """
    # TODO(planning.goodput)
    # how many nodes may be in repair so that one spare node is left?
    raise NotImplementedError("planning.goodput")


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
    # TODO(planning.goodput)
    # how often does the job fail? how much does it lose each time?
    # how much longer do saves make the run, and failures the longer run?
    raise NotImplementedError("planning.goodput")


if __name__ == "__main__":
    for show in (partial(show_degrees, useful_degrees), partial(show_goodput, goodput)):
        try:
            show()
        except NotImplementedError as missing:
            print(f"{missing} is not written yet")
