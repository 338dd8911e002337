"""The questions and answers of unit `planning`: a model, a cluster, a layout, a batch.

A plan says how to train a model on a cluster. Four descriptions go into it, and none of
them needs a GPU:

    Model      the shape of a transformer, as its configuration file states it
    Batch      how many sequences a step has, how long they are, and in which formats
    Cluster    the GPUs, the links between them, what they cost and how often they fail
    Layout     how many GPUs share what: data, tensor, pipeline, context, ZeRO

The GPUs of a layout have a rank each, in the order tensor, context, data, pipeline:
neighbors share tensors, and pipeline stages are farthest apart. Hence the ranks of one
group are `stride` ranks apart:

    group                  size             stride
    tensor                 t                1
    context                c                t
    shards (ZeRO)          c d              t
    pipeline               p                t c d

All numbers are in bytes, seconds, FLOP (floating-point operations) and dollars. A GB is
10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a transformer without biases, as in Llama 3.

    Each layer has attention and an MLP, with an RMSNorm before both. One more RMSNorm
    follows the last layer.
    """

    layers: int  # L
    hidden: int  # h, the width of the residual stream
    heads: int  # query heads, a; each is hidden / heads wide
    kv_heads: int  # key and value heads; fewer than `heads` in grouped-query attention
    ffn: int  # f, the inner width of the MLP
    vocab: int  # v
    gated: bool = True  # SwiGLU: three matrices in an MLP rather than two
    tied: bool = False  # the output layer uses the matrix of the input embedding

    @property
    def kv_hidden(self) -> int:
        """The width of all keys of a token, which is also that of its values."""
        return self.hidden // self.heads * self.kv_heads


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per element. The defaults are those of mixed precision with Adam."""

    weights: int = 2
    gradients: int = 2
    master_weights: int = 4  # the optimizer's own copy; 0 if it has none
    moments: int = 8  # both of Adam's moments together
    activations: int = 2


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one step, over all GPUs."""

    sequence: int  # s, tokens in a sequence
    global_batch: int  # sequences
    precision: Precision = field(default_factory=Precision)

    @property
    def tokens(self) -> int:
        """All tokens of a step."""
        return self.sequence * self.global_batch


@dataclass(frozen=True, kw_only=True)
class Link:
    """The α–β model of a GPU's connection, in one direction."""

    alpha_s: float  # the latency of a message
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs. Each GPU has its own link to the other nodes."""

    gpus_per_node: int
    peak_flops: float  # FLOP/s of one GPU, dense, in the format of the weights
    memory_bytes: float  # of one GPU, as far as the training may use it
    memory_bytes_per_s: float
    intra_node: Link  # of one GPU to the others of its node
    inter_node: Link  # of one GPU to other nodes: its share of the node's NICs
    matmul_efficiency: float = 1.0  # the share of peak_flops that large matmuls reach
    price_per_gpu_hour: float = 0.0  # dollars
    gpu_mtbf_s: float = float("inf")  # mean time between failures of one GPU


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the GPUs share a training run."""

    data: int = 1  # d
    tensor: int = 1  # t
    pipeline: int = 1  # p, stages
    context: int = 1  # c, parts of each sequence
    chunks: int = 1  # q, parts of a stage: 1 for 1F1B, more if it is interleaved
    zero_stage: int = 0  # 0 to 3, over the data · context ranks of a group
    microbatch: int = 1  # sequences
    recompute: Recompute = "none"
    sequence_parallel: bool = False  # over the tensor ranks

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """The ranks that hold the same weights. ZeRO shards over them."""
        return self.data * self.context

    def microbatches(self, batch: Batch) -> int:
        """Return the number of microbatches that each GPU computes in a step, m."""
        return batch.global_batch // (self.data * self.microbatch)

    def tokens(self, batch: Batch) -> int:
        """Return the tokens of a microbatch that one GPU computes."""
        return self.microbatch * batch.sequence // self.context

    def stage_layers(self, model: Model, stage: int) -> int:
        """Return a stage's number of layers. The first ones may have one more."""
        few, remainder = divmod(model.layers, self.pipeline)
        return few + (stage < remainder)

    def problem(self, model: Model, batch: Batch) -> str:
        """Return why this layout can't train this model, or "" if it can.

        Memory isn't considered here.
        """
        return self._schedule_problem(model, batch) or self._split_problem(model, batch)

    def _schedule_problem(self, model: Model, batch: Batch) -> str:
        p, q, per_step = self.pipeline, self.chunks, self.data * self.microbatch
        if p > model.layers:
            return f"{model.layers} layers are too few for {p} stages"
        if q > 1 and p == 1:
            return "a single stage can't be interleaved"
        if q > 1 and model.layers % (p * q):
            return f"{p} stages of {q} chunks do not divide {model.layers} layers"
        if batch.global_batch % per_step:
            return f"{per_step} does not divide {batch.global_batch} sequences"
        if q > 1 and self.microbatches(batch) % p:
            return f"{p} stages do not divide {self.microbatches(batch)} microbatches"
        return ""

    def _split_problem(self, model: Model, batch: Batch) -> str:
        t, c = self.tensor, self.context
        if not 0 <= self.zero_stage <= 3:
            return f"there is no ZeRO stage {self.zero_stage}"
        if self.zero_stage and self.shards == 1:
            return f"ZeRO stage {self.zero_stage} has one rank to shard over"
        if model.heads % t or model.kv_heads % t or model.ffn % t:
            return f"{t} tensor ranks do not divide the heads, or the MLP's width"
        if batch.sequence % c:
            return f"{c} context ranks do not divide {batch.sequence} tokens"
        if self.sequence_parallel and (t == 1 or batch.sequence // c % t):
            return f"{t} tensor ranks can't split {batch.sequence // c} tokens"
        return ""


# ── answers ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The weights of a model, and the operations of training it.

    The operations are those of one forward and one backward pass, per token.
    """

    parameters: int
    weight_flops: float  # in products with weights, per token
    attention_flops: float  # in products of activations with each other, per token

    @property
    def flops_per_token(self) -> float:
        """Both together."""
        return self.weight_flops + self.attention_flops


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes that a GPU holds at the peak of a step."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float

    @property
    def total_bytes(self) -> float:
        """All four together."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step, by cause. Only communication that nothing hides counts."""

    compute_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float  # messages between stages
    bubble_s: float  # stages without a microbatch
    data_s: float  # gradients and weights, as far as computation does not hide them
    update_s: float  # the optimizer

    @property
    def total_s(self) -> float:
        """All of them together."""
        return (
            self.compute_s
            + self.tensor_s
            + self.context_s
            + self.pipeline_s
            + self.bubble_s
            + self.data_s
            + self.update_s
        )


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The largest useful degree of each axis, before rounding."""

    data: float
    tensor: float
    context: float
    pipeline: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a failure costs, and what is done against it."""

    save_s: float  # how long the training stops to save a checkpoint; above 0
    detection_s: float  # until a failure is noticed
    restart_s: float  # from then until the first step, once all nodes are there
    repair_s: float  # until a failed node is back
    spare_nodes: int = 0  # nodes that wait to replace a failed one


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The time and the price of a training run with failures.

    It can only be computed if we know how often GPUs fail, so `gpu_mtbf_s` is finite.
    """

    mtbf_s: float  # between failures of the job
    interval_s: float  # between checkpoints
    lost_s: float  # by each failure
    share: float  # of the wall-clock time that goes into steps that count
    wall_s: float
    price: float  # dollars


# ── two tables that your functions fill: degrees, and goodput ─────────────────────────

# Llama 3 70B on DGX H100 nodes. `distlab plan` has more models and clusters, with the
# sources of their numbers.

LLAMA_70B = Model(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128_256
)
BATCH = Batch(sequence=8192, global_batch=512)  # 4 million tokens
DGX_H100 = Cluster(
    gpus_per_node=8,
    peak_flops=989.4e12,
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    intra_node=Link(alpha_s=3e-6, bytes_per_s=450e9),
    inter_node=Link(alpha_s=5e-6, bytes_per_s=50e9),
    matmul_efficiency=0.4644,
    price_per_gpu_hour=2.5,
    gpu_mtbf_s=50_667 * 3600.0,
)
DAY_S = 24 * 3600.0


def show_degrees(
    useful_degrees: Callable[[Model, Batch, Cluster, int, float], Degrees],
) -> None:
    """Print the largest useful degree of each axis, within nodes and between them."""
    print("Llama 3 70B, 4 million tokens per step, 16 microbatches, bubble of 10 %")
    for name, cluster in (
        ("DGX H100", DGX_H100),
        ("no NVLink", replace(DGX_H100, intra_node=DGX_H100.inter_node)),
    ):
        most = useful_degrees(LLAMA_70B, BATCH, cluster, 16, 0.1)
        print(
            f"  {name:9}  data {most.data:6.1f}  tensor {most.tensor:5.1f}  "
            f"context {most.context:5.1f}  pipeline {most.pipeline:4.1f}"
        )


def recovery_with(save_s: float, spare_nodes: int) -> Recovery:
    """Return what recovery takes: 60 s to detect, 300 s to restart, a day to repair."""
    return Recovery(
        save_s=save_s,
        detection_s=60.0,
        restart_s=300.0,
        repair_s=DAY_S,
        spare_nodes=spare_nodes,
    )


def show_goodput(
    goodput: Callable[[Cluster, int, Recovery, float], Goodput],
) -> None:
    """Print what failures make of 30 days, for jobs of several sizes."""
    print("30 days of training on DGX H100")
    print("    GPUs  save  spare nodes  failure every  saved every  goodput     price")
    for num_gpus, save_s, spare_nodes in (
        (64, 60.0, 0),
        (1024, 60.0, 0),
        (1024, 60.0, 2),
        (16_384, 60.0, 2),
        (16_384, 60.0, 16),
        (16_384, 5.0, 16),
    ):
        recovery = recovery_with(save_s, spare_nodes)
        plan = goodput(DGX_H100, num_gpus, recovery, 30 * DAY_S)
        print(
            f"  {num_gpus:6,}  {save_s:2.0f} s  {spare_nodes:11}  "
            f"{plan.mtbf_s / 3600:11.1f} h  {plan.interval_s / 60:7.0f} min  "
            f"{plan.share:7.1%}  ${plan.price / 1e6:5.2f} M"
        )
