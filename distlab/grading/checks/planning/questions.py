"""The questions: models, layouts, batches and clusters, by hand and at random.

Those by hand come first, because each of them separates a mistake from the right
answer: few key/value heads, tied embeddings, no gate, a remainder of layers, tensor
ranks on several nodes, context ranks, ZeRO 3, a single stage. The drawn ones are for
solutions that know those by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from distlab.given.planning import (
    RECOMPUTE,
    Batch,
    Cluster,
    Layout,
    Link,
    Model,
    Precision,
    Recovery,
)

DRAWN = 24
HOUR_S = 3600.0

USUAL = Model(layers=4, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=2_000)
GROUPED = Model(layers=6, hidden=512, heads=8, kv_heads=2, ffn=1408, vocab=32_000)
TIED = Model(layers=7, hidden=256, heads=8, kv_heads=8, ffn=640, vocab=5_003, tied=True)
PLAIN = Model(
    layers=4, hidden=384, heads=6, kv_heads=6, ffn=1536, vocab=1_000, gated=False
)
BOTH = Model(
    layers=8,
    hidden=512,
    heads=8,
    kv_heads=4,
    ffn=960,
    vocab=777,
    tied=True,
    gated=False,
)
LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256)
MODELS = {
    "a model of 4 layers with h = 256": USUAL,  # with nothing special
    "a model with few key/value heads": GROUPED,
    "a model with tied embeddings": TIED,
    "a model without a gate": PLAIN,
    "a model with tied embeddings and without a gate": BOTH,
    "Llama 3 8B": LLAMA_8B,
}

MIXED = Precision()
FULL = Precision(weights=4, gradients=4, master_weights=0, activations=4)

NVLINK = Link(alpha_s=3e-6, bytes_per_s=450e9)
PCIE = Link(alpha_s=8e-6, bytes_per_s=20e9)
NIC = Link(alpha_s=6e-6, bytes_per_s=50e9)
SLOW_NIC = Link(alpha_s=20e-6, bytes_per_s=3e9)
FAST = Cluster(
    gpus_per_node=8,
    peak_flops=1e15,
    memory_bytes=80e9,
    memory_bytes_per_s=3e12,
    intra_node=NVLINK,
    inter_node=NIC,
    matmul_efficiency=0.75,
    price_per_gpu_hour=2.5,
    gpu_mtbf_s=5e4 * HOUR_S,
)
SMALL = Cluster(  # three links are wider than a GPU's own link to its node
    gpus_per_node=4,
    peak_flops=5e13,
    memory_bytes=8e9,
    memory_bytes_per_s=4e11,
    intra_node=PCIE,
    inter_node=Link(alpha_s=15e-6, bytes_per_s=8e9),
    matmul_efficiency=0.5,
    price_per_gpu_hour=0.75,
    gpu_mtbf_s=2e4 * HOUR_S,
)
ALONE = Cluster(
    gpus_per_node=1,
    peak_flops=2e14,
    memory_bytes=24e9,
    memory_bytes_per_s=1e12,
    intra_node=NVLINK,
    inter_node=SLOW_NIC,
    gpu_mtbf_s=1e4 * HOUR_S,
)
CLUSTERS = {"8 GPUs a node": FAST, "4 GPUs a node": SMALL, "1 GPU a node": ALONE}


@dataclass(frozen=True)
class Call:
    """One question: a function, what it is called with, and in words."""

    function: str
    arguments: tuple[Any, ...]
    words: str


def told(model: Model, layout: Layout, batch: Batch) -> str:
    """Describe a setting by whatever isn't the default."""
    name = next((name for name, known in MODELS.items() if known == model), "")
    words = [name or f"a model of {model.layers} layers with h = {model.hidden}"]
    words += [
        f"{field.name} = {getattr(layout, field.name)}"
        for field in fields(layout)
        if getattr(layout, field.name) != field.default
    ]
    words.append(f"s = {batch.sequence}, {batch.global_batch} sequences")
    return ", ".join(words)


# ── one layout after another ────────────────────────────────────────────────────────

TELLING: tuple[tuple[Model, Layout, Batch], ...] = (
    *(
        (model, Layout(), Batch(sequence=128, global_batch=4))
        for model in MODELS.values()
    ),
    *(
        (
            model,
            Layout(tensor=2, sequence_parallel=is_split, recompute=recompute),
            Batch(sequence=256, global_batch=2),
        )
        for model, is_split, recompute in product(
            (USUAL, GROUPED, PLAIN), (False, True), RECOMPUTE
        )
    ),
    # the same layout with another batch
    (GROUPED, Layout(tensor=2), Batch(sequence=384, global_batch=4)),
    # tensor ranks on several nodes, and a vocabulary that they do not divide
    (TIED, Layout(tensor=8), Batch(sequence=512, global_batch=3)),
    (TIED, Layout(tensor=8, data=2, zero_stage=1), Batch(sequence=64, global_batch=8)),
    # context ranks, alone and with others; ZeRO shards over them, too
    (GROUPED, Layout(context=4), Batch(sequence=4096, global_batch=2)),
    (
        GROUPED,
        Layout(context=2, tensor=2, recompute="full"),
        Batch(sequence=1024, global_batch=4),
    ),
    *(
        (
            GROUPED,
            Layout(data=4, context=2, zero_stage=stage, microbatch=2),
            Batch(sequence=512, global_batch=24),
        )
        for stage in range(4)
    ),
    # backward hides all messages of ZeRO 3, forward does not, on 4 GPUs a node
    (
        PLAIN,
        Layout(data=2, zero_stage=3, recompute="full", microbatch=2),
        Batch(sequence=256, global_batch=8),
    ),
    # a remainder of layers; the last stage has the larger half, by its vocabulary
    (TIED, Layout(pipeline=2), Batch(sequence=128, global_batch=8)),
    (TIED, Layout(pipeline=3, recompute="full"), Batch(sequence=128, global_batch=5)),
    (
        TIED,
        Layout(pipeline=4, data=2, zero_stage=1),
        Batch(sequence=96, global_batch=2),
    ),
    (
        GROUPED,
        Layout(pipeline=2, recompute="selective"),
        Batch(sequence=64, global_batch=16),
    ),
    (GROUPED, Layout(pipeline=6, tensor=2), Batch(sequence=64, global_batch=12)),
    # fewer microbatches than stages
    (BOTH, Layout(pipeline=8), Batch(sequence=128, global_batch=3)),
    # interleaved; first, with only as many microbatches as stages
    (BOTH, Layout(pipeline=2, chunks=2), Batch(sequence=128, global_batch=2)),
    (BOTH, Layout(pipeline=4, chunks=2), Batch(sequence=128, global_batch=16)),
    (
        GROUPED,
        Layout(pipeline=2, chunks=3, data=2, zero_stage=2),
        Batch(sequence=256, global_batch=8),
    ),
    (
        BOTH,
        Layout(pipeline=2, chunks=4, tensor=4, sequence_parallel=True),
        Batch(sequence=256, global_batch=4),
    ),
    # everything at once
    *(
        (
            BOTH,
            Layout(
                data=2,
                tensor=2,
                pipeline=2,
                context=2,
                zero_stage=stage,
                microbatch=2,
                recompute=recompute,
                sequence_parallel=True,
            ),
            Batch(sequence=512, global_batch=16, precision=precision),
        )
        for stage, recompute, precision in zip(
            (2, 3, 1), RECOMPUTE, (FULL, FULL, MIXED), strict=True
        )
    ),
)


def settings(seed: int) -> list[tuple[Model, Layout, Batch]]:
    """Model, layout and batch: those above, and drawn ones."""
    draw = random.Random(seed)
    return [*TELLING, *(_drawn(draw) for _ in range(DRAWN))]


def _drawn(draw: random.Random) -> tuple[Model, Layout, Batch]:
    while True:
        model, batch = draw_model(draw), draw_batch(draw)
        layout = draw_layout(draw)
        if not layout.problem(model, batch):
            return model, layout, batch


def draw_model(draw: random.Random) -> Model:
    """Of any shape, and small."""
    kv_heads = draw.choice((1, 2, 4))
    heads = kv_heads * draw.choice((1, 2, 4))
    return Model(
        layers=draw.randint(1, 12),
        hidden=heads * draw.choice((16, 32, 64)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=8 * draw.randint(10, 300),
        vocab=draw.randint(100, 60_000),
        gated=draw.random() < 0.5,
        tied=draw.random() < 0.5,
    )


def draw_batch(draw: random.Random) -> Batch:
    """Of any length and size."""
    precision = Precision(
        weights=draw.choice((1, 2, 4)),
        gradients=draw.choice((2, 4)),
        master_weights=draw.choice((0, 4)),
        moments=draw.choice((2, 4, 8)),
        activations=draw.choice((1, 2, 4)),
    )
    return Batch(
        sequence=64 * draw.randint(1, 64),
        global_batch=draw.choice((6, 8, 12, 16, 24, 48)),
        precision=precision,
    )


def draw_layout(draw: random.Random) -> Layout:
    """With any degrees; it may be one that no model can have."""
    return Layout(
        data=draw.choice((1, 2, 3, 4, 8)),
        tensor=draw.choice((1, 1, 2, 4)),
        pipeline=draw.choice((1, 1, 2, 3, 4)),
        context=draw.choice((1, 1, 2, 4)),
        chunks=draw.choice((1, 1, 1, 2)),
        zero_stage=draw.randint(0, 3),
        microbatch=draw.choice((1, 2, 3)),
        recompute=draw.choice(RECOMPUTE),
        sequence_parallel=draw.random() < 0.5,
    )


def draw_cluster(draw: random.Random) -> Cluster:
    """With links that are anything from a bottleneck to no matter."""
    node = draw.choice((1, 2, 4, 8))
    near = 10 ** draw.uniform(10, 12)
    return Cluster(
        gpus_per_node=node,
        peak_flops=10 ** draw.uniform(13, 15),
        memory_bytes=10 ** draw.uniform(9, 11),
        memory_bytes_per_s=10 ** draw.uniform(11, 13),
        intra_node=Link(alpha_s=draw.uniform(1e-6, 9e-6), bytes_per_s=near),
        inter_node=Link(
            alpha_s=draw.uniform(1e-5, 9e-5), bytes_per_s=near / draw.uniform(2, 40)
        ),
        matmul_efficiency=draw.uniform(0.3, 1.0),
        price_per_gpu_hour=draw.uniform(0.5, 9.0),
        gpu_mtbf_s=draw.uniform(1e3, 1e5) * HOUR_S,
    )


# ── the questions of each function ──────────────────────────────────────────────────


def _model_size(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    asked = [(name, model, s) for name, model in MODELS.items() for s in (128, 8192)]
    for _ in range(DRAWN):
        model = draw_model(draw)
        asked.append((f"{model}", model, draw.randint(1, 9999)))
    for name, model, sequence in asked:
        yield Call("model_size", (model, sequence), f"{name}, s = {sequence}")


def _layer_parameters(seed: int) -> Iterator[Call]:
    for model, layout, batch in settings(seed):
        yield Call("layer_parameters", (model, layout), told(model, layout, batch))


def _by_stage(function: str, *, with_batch: bool) -> Callable[[int], Iterator[Call]]:
    def calls(seed: int) -> Iterator[Call]:
        for model, layout, batch in settings(seed):
            for stage in range(layout.pipeline):
                arguments: tuple[Any, ...] = (model, layout, batch, stage)
                if not with_batch:
                    arguments = (model, layout, stage)
                words = f"{told(model, layout, batch)}, stage {stage}"
                yield Call(function, arguments, words)

    return calls


def _layer_activations(seed: int) -> Iterator[Call]:
    for model, layout, batch in settings(seed):
        for recompute in RECOMPUTE:
            words = f"{told(model, layout, batch)}, called with {recompute!r}"
            arguments = model, layout, batch, recompute
            yield Call("layer_activation_bytes", arguments, words)


def _roofline(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    asked = [(1e12, 0.0), (0.0, 1e9), (1e12, 1e6), (1e9, 1e12), (3e15, 1e12)]
    asked += [(10 ** draw.uniform(8, 16), 10 ** draw.uniform(5, 13)) for _ in range(9)]
    for (flops, moved), (name, cluster) in product(asked, CLUSTERS.items()):
        words = f"{flops:g} FLOP, {moved:g} bytes, {name}"
        yield Call("roofline_s", (flops, moved, cluster), words)


def _mfu(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    for model, layout, batch in settings(seed):
        cluster, step_s = draw_cluster(draw), draw.uniform(0.1, 20.0)
        n = draw.choice((layout.num_gpus, 64, 1000))
        words = f"{told(model, layout, batch)}, {n} GPUs, {step_s:.3f} s"
        yield Call("mfu", (model, batch, cluster, n, step_s), words)


def _ring(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    sizes = (0.0, 1e6, 3e9, 10 ** draw.uniform(3, 9))
    for n, size, link in product((1, 2, 3, 8, 64, 1000), sizes, (NVLINK, SLOW_NIC)):
        yield Call("ring_s", (n, size, link), f"n = {n}, {size:g} bytes, {link}")


def _group_link(seed: int) -> Iterator[Call]:
    for name, cluster in CLUSTERS.items():
        for size, stride in product((1, 2, 3, 4, 8, 16, 64), (1, 2, 4, 8, 16)):
            if size == 1 and stride > cluster.gpus_per_node:
                continue  # a lone rank sends nothing
            words = f"{size} ranks, {stride} apart, {name}"
            yield Call("group_link", (cluster, size, stride), words)


def _on_cluster(function: str) -> Callable[[int], Iterator[Call]]:
    def calls(seed: int) -> Iterator[Call]:
        draw = random.Random(seed)
        for number, (model, layout, batch) in enumerate(settings(seed)):
            own = [*CLUSTERS.items()]
            if number >= len(TELLING):
                own = [("a drawn cluster", draw_cluster(draw)) for _ in range(2)]
            for name, cluster in own:
                words = f"{told(model, layout, batch)}, {name}"
                yield Call(function, (model, layout, batch, cluster), words)

    return calls


def _useful_degrees(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    for model, layout, batch in settings(seed):
        cluster, m = draw_cluster(draw), draw.randint(1, 64)
        bubble = draw.choice((0.05, 0.1, 0.25, 0.5))
        words = f"{told(model, layout, batch)}, m = {m}, bubble = {bubble}"
        yield Call("useful_degrees", (model, batch, cluster, m, bubble), words)


def _interval(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    asked = [(60.0, 4 * HOUR_S), (2.0, 1e4), (0.5, 0.25)]
    asked += [(draw.uniform(1, 600), draw.uniform(1e3, 1e6)) for _ in range(6)]
    for save_s, mtbf_s in asked:
        words = f"a save of {save_s:g} s, a failure every {mtbf_s:g} s"
        yield Call("checkpoint_interval_s", (save_s, mtbf_s), words)


def recoveries(seed: int) -> list[Recovery]:
    """With no spare node, one, some and many."""
    draw = random.Random(seed)
    return [
        Recovery(
            save_s=draw.uniform(1, 300),
            detection_s=draw.uniform(1, 900),
            restart_s=draw.uniform(10, 1200),
            repair_s=repair_s,
            spare_nodes=spare_nodes,
        )
        for repair_s, spare_nodes in product(
            (600.0, 24 * HOUR_S, draw.uniform(1e3, 1e5)),
            (0, 1, 2, 5, draw.randint(6, 30)),
        )
    ]


def _no_spare(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    for recovery in recoveries(seed):
        for mtbf_s in (recovery.repair_s, 3 * HOUR_S, draw.uniform(1e3, 1e6)):
            spare = f"{recovery.spare_nodes} spare node"
            spare += "s" * (recovery.spare_nodes != 1)
            words = f"{spare}, a repair of {recovery.repair_s:g} s, "
            words += f"a failure every {mtbf_s:g} s"
            yield Call("no_spare_probability", (recovery, mtbf_s), words)


def _goodput(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    for recovery in recoveries(seed):
        for name, cluster in [*CLUSTERS.items(), ("a drawn one", draw_cluster(draw))]:
            n = cluster.gpus_per_node * draw.choice((1, 16, 256))
            training_s = draw.uniform(1, 90) * 24 * HOUR_S
            facts = ", ".join(f"{k} {v:.4g}" for k, v in vars(recovery).items())
            words = f"{n} GPUs, {name}, {facts}, {training_s:.0f} s of training"
            yield Call("goodput", (cluster, n, recovery, training_s), words)


CALLS: dict[str, Callable[[int], Iterator[Call]]] = {
    "model_size": _model_size,
    "layer_parameters": _layer_parameters,
    "stage_parameters": _by_stage("stage_parameters", with_batch=False),
    "layer_activation_bytes": _layer_activations,
    "stage_memory": _by_stage("stage_memory", with_batch=True),
    "roofline_s": _roofline,
    "mfu": _mfu,
    "ring_s": _ring,
    "group_link": _group_link,
    "tensor_s": _on_cluster("tensor_s"),
    "context_s": _on_cluster("context_s"),
    "pipeline_s": _on_cluster("pipeline_s"),
    "exposed_data_s": _on_cluster("exposed_data_s"),
    "update_s": _on_cluster("update_s"),
    "step_time": _on_cluster("step_time"),
    "useful_degrees": _useful_degrees,
    "checkpoint_interval_s": _interval,
    "no_spare_probability": _no_spare,
    "goodput": _goodput,
}
"""By function: seed → what it is asked."""
