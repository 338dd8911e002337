"""The formula behind each number of a plan, with the numbers in it, and its lesson.

Formulas are for reading only, because every value comes from unit `planning`. A test
evaluates the arithmetic that we show, so it can't drift from the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from types import ModuleType

from distlab.given.planning import Link
from distlab.plan.plans import Plan, Question

SYMBOLS = (
    "L layers of width h; a heads and k key/value heads; f the MLP's width; v tokens "
    "in the vocabulary; s tokens in a sequence; B sequences in a step; d, t, p, c the "
    "data, tensor, pipeline and context degrees; q chunks in a stage; b sequences in a "
    "microbatch; F the peak of a GPU, and e the share of it that matmuls reach; α and "
    "β a link's latency and bandwidth"
)


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """One number: its name and value, the formula, and the same with numbers."""

    name: str
    value: float
    unit: str  # "", "B" for bytes, "s", or what is counted
    formula: str
    numbers: str
    lesson: str  # the id of the task that teaches it


def derivations(unit: ModuleType, question: Question, plan: Plan) -> list[Derivation]:
    """Return the derivations of a plan's numbers, in the order of the calculation."""
    return [
        *_size(unit, question),
        *_memory(unit, question, plan),
        *_time(unit, question, plan),
    ]


def n_(value: float) -> str:
    """Format a number as in the derivations: 8,192 or 9.894e+14, 0.4644."""
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:.10g}"


def _size(unit: ModuleType, question: Question) -> list[Derivation]:
    model, batch = question.model, question.batch
    size = unit.model_size(model, batch.sequence)
    h, layers = n_(model.hidden), n_(model.layers)
    mlp = 3 if model.gated else 2
    embeddings = 1 if model.tied else 2
    attention = f"2 · {h}² + 2 · {h} · {n_(model.kv_hidden)}"
    matrices = f"{attention} + {mlp} · {h} · {n_(model.ffn)}"
    return [
        Derivation(
            name="parameters",
            value=size.parameters,
            unit="",
            formula=f"L (2 h² + 2 h² k/a + {mlp} h f + 2 h) + h + {embeddings} v h",
            numbers=f"{layers} · ({matrices} + 2 · {h}) + {h} + "
            f"{embeddings} · {n_(model.vocab)} · {h}",
            lesson="planning.model_size",
        ),
        Derivation(
            name="operations per token",
            value=size.flops_per_token,
            unit="FLOP",
            formula=f"6 (L (2 h² + 2 h² k/a + {mlp} h f) + v h) + 12 L h s",
            numbers=f"6 · ({layers} · ({matrices}) + {n_(model.vocab)} · {h}) + "
            f"12 · {layers} · {h} · {n_(batch.sequence)}",
            lesson="planning.model_size",
        ),
        Derivation(
            name="tokens per step",
            value=batch.tokens,
            unit="tokens",
            formula="B s",
            numbers=f"{n_(batch.global_batch)} · {n_(batch.sequence)}",
            lesson="planning.model_size",
        ),
    ]


# ── memory ──────────────────────────────────────────────────────────────────────────


def _memory(unit: ModuleType, question: Question, plan: Plan) -> list[Derivation]:
    """Derive the memory of the stage that needs the most, as `step_memory` does."""
    model, batch, layout = question.model, question.batch, plan.layout
    stages = sorted({0, layout.pipeline - 1})
    stage = next(
        number
        for number in stages
        if unit.stage_memory(model, layout, batch, number) == plan.memory
    )
    size = unit.stage_parameters(model, layout, stage)
    layer, shards = unit.layer_parameters(model, layout), layout.shards
    precision, zero = batch.precision, layout.zero_stage
    weights = f"{precision.weights} · {n_(size)}", "2 P"
    if zero == 3:
        weights = (
            f"{weights[0]} / {n_(shards)} + {precision.weights} · {n_(layer)}",
            "2 P / (c d) + 2 P of a layer",
        )
    state = precision.master_weights + precision.moments

    def sharded(text: str, since: int) -> str:
        return f"{text} / {n_(shards)}" if zero >= since else text

    return [
        Derivation(
            name="weights on a GPU, P",
            value=size,
            unit="",
            formula=f"of stage {stage}: its layers ÷ t, and embeddings ÷ t",
            numbers=_stage_numbers(question, plan, stage, layer),
            lesson="tensor_parallel.linears",
        ),
        Derivation(
            name="memory: weights",
            value=plan.memory.weights_bytes,
            unit="B",
            formula=weights[1],
            numbers=weights[0],
            lesson="planning.step_memory",
        ),
        Derivation(
            name="memory: gradients",
            value=plan.memory.gradients_bytes,
            unit="B",
            formula="2 P" + (" / (c d)" if zero >= 2 else ""),
            numbers=sharded(f"{precision.gradients} · {n_(size)}", 2),
            lesson="sharded_optimizer.plan" if zero >= 2 else "planning.step_memory",
        ),
        Derivation(
            name="memory: optimizer",
            value=plan.memory.optimizer_bytes,
            unit="B",
            formula=f"{state} P" + (" / (c d)" if zero >= 1 else ""),
            numbers=sharded(f"{state} · {n_(size)}", 1),
            lesson="sharded_optimizer.plan"
            if zero
            else "mixed_precision.master_weights",
        ),
        _activations(unit, question, plan, stage),
    ]


def _stage_numbers(question: Question, plan: Plan, stage: int, layer: int) -> str:
    model, layout = question.model, plan.layout
    rows = n_(ceil(model.vocab / layout.tensor))
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    matrices = (is_first + is_last) if not (model.tied and is_first and is_last) else 1
    numbers = f"{layout.stage_layers(model, stage)} · {n_(layer)}"
    if matrices:
        numbers += f" + {matrices} · {rows} · {n_(model.hidden)}"
    return numbers + (f" + {n_(model.hidden)}" if is_last else "")


def _activations(
    unit: ModuleType, question: Question, plan: Plan, stage: int
) -> Derivation:
    model, batch, layout = question.model, question.batch, plan.layout
    p, q, m = layout.pipeline, layout.chunks, layout.microbatches(batch)
    flight, deepest = f"{p - stage}", float(p - stage)
    if q > 1:
        flight = f"({q - 1} · {p} + 2 · {p - 1 - stage} + 1) / {q}"
        deepest = ((q - 1) * p + 2 * (p - 1 - stage) + 1) / q
    if deepest > m:
        flight = f"{m}"
    kept = unit.layer_activation_bytes(model, layout, batch, layout.recompute)
    numbers = f"({flight}) · {layout.stage_layers(model, stage)} · {n_(kept)}"
    formula = "microbatches in flight · layers · bytes of a layer"
    if layout.recompute == "full":
        more = unit.layer_activation_bytes(model, layout, batch, "selective")
        numbers += f" + {n_(more)}"
        formula += " + one layer, recomputed"
    if stage == p - 1:
        split = layout.tensor if layout.sequence_parallel else 1
        norm = f"2 · {n_(model.hidden)} · {batch.precision.activations} / {split}"
        logits = f"4 · {n_(ceil(model.vocab / layout.tensor))}"
        numbers += f" + {n_(layout.tokens(batch))} · ({norm} + {logits})"
        formula += " + last norm and logits"
    return Derivation(
        name="memory: activations",
        value=plan.memory.activations_bytes,
        unit="B",
        formula=formula,
        numbers=numbers,
        lesson="activation_checkpointing.checkpoint"
        if layout.recompute != "none"
        else "planning.step_memory",
    )


# ── time ────────────────────────────────────────────────────────────────────────────


def _time(unit: ModuleType, question: Question, plan: Plan) -> list[Derivation]:
    model, batch, cluster = question.model, question.batch, question.cluster
    layout, time = plan.layout, plan.time
    m = layout.microbatches(batch)
    forward_s, backward_s = unit.pass_times(model, layout, batch, cluster)
    size = unit.model_size(model, batch.sequence)
    steps = [
        Derivation(
            name="microbatches, m",
            value=m,
            unit="",
            formula="B / (d b)",
            numbers=f"{n_(batch.global_batch)} / ({layout.data} · {layout.microbatch})",
            lesson="gradient_accumulation.accumulate",
        ),
        _forward(unit, question, plan, forward_s),
        Derivation(
            name="time: compute",
            value=time.compute_s,
            unit="s",
            formula="m · (forward + backward of the slowest stage, at e F)",
            numbers=f"{m} · ({n_(forward_s)} + {n_(backward_s)})",
            lesson="planning.step_time",
        ),
        *_messages(unit, question, plan),
        *_bubble(plan, m),
    ]
    causes = ("compute", "tensor", "context", "pipeline", "bubble", "data", "update")
    return [
        *steps,
        Derivation(
            name="time: step",
            value=time.total_s,
            unit="s",
            formula="all of them together",
            numbers=" + ".join(n_(getattr(time, f"{cause}_s")) for cause in causes),
            lesson="planning.step_time",
        ),
        Derivation(
            name="MFU",
            value=plan.mfu,
            unit="",
            formula="operations per token · B s / (GPUs · F · step)",
            numbers=f"{n_(size.flops_per_token)} · {n_(batch.tokens)} / "
            f"({n_(question.num_gpus)} · {n_(cluster.peak_flops)} · "
            f"{n_(time.total_s)})",
            lesson="planning.step_time",
        ),
    ]


def _forward(
    unit: ModuleType, question: Question, plan: Plan, seconds: float
) -> Derivation:
    """Derive a microbatch's forward pass on the slower of the first and last stage."""
    model, batch, cluster = question.model, question.batch, question.cluster
    layout = plan.layout
    h, t, tokens = model.hidden, layout.tensor, layout.tokens(batch)
    matrices = unit.layer_parameters(model, layout) - 2 * h
    speed = f"({n_(cluster.matmul_efficiency)} · {n_(cluster.peak_flops)})"
    formula = "(2 · tokens · weights in matrices + 4 · tokens · L h s / t) / (e F)"
    for stage in (layout.pipeline - 1, 0):
        layers = layout.stage_layers(model, stage)
        weights = f"{layers} · {n_(matrices)}"
        if stage == layout.pipeline - 1:
            weights = f"({weights} + {n_(ceil(model.vocab / t))} · {n_(h)})"
        numbers = (
            f"(2 · {n_(tokens)} · {weights} + "
            f"4 · {n_(tokens)} · {layers} · {n_(h)} · {n_(batch.sequence)} / {t}) / "
            f"{speed}"
        )
        flops = 2 * tokens * layers * matrices
        flops += 4 * tokens * layers * h * batch.sequence / t
        if stage == layout.pipeline - 1:
            flops += 2 * tokens * ceil(model.vocab / t) * h
        took_s = flops / (cluster.peak_flops * cluster.matmul_efficiency)
        if abs(took_s - seconds) <= 1e-9 * seconds:
            break
    else:  # with so few tokens, reading the weights takes longer
        size = unit.stage_parameters(model, layout, layout.pipeline - 1)
        formula = "2 P / memory bandwidth, because reading the weights takes longer"
        width = batch.precision.weights
        numbers = f"{width} · {n_(size)} / {n_(cluster.memory_bytes_per_s)}"
    return Derivation(
        name="time: a forward pass",
        value=seconds,
        unit="s",
        formula=formula,
        numbers=numbers,
        lesson="planning.step_time",
    )


def _bubble(plan: Plan, m: int) -> list[Derivation]:
    layout, time = plan.layout, plan.time
    if layout.pipeline == 1:
        return []
    return [
        Derivation(
            name="time: bubble",
            value=time.bubble_s,
            unit="s",
            formula="(p - 1) / q · a microbatch with its messages",
            numbers=f"{layout.pipeline - 1} / {layout.chunks} · "
            f"({n_(time.compute_s)} + {n_(time.tensor_s)} + {n_(time.context_s)} + "
            f"{n_(time.pipeline_s)}) / {m}",
            lesson="pipeline_parallel.interleaved"
            if layout.chunks > 1
            else "pipeline_parallel.one_f_one_b",
        ),
    ]


def _ring(n: int, num_bytes: float, link: Link) -> str:
    return (
        f"{n - 1} · ({n_(link.alpha_s)} + {n_(num_bytes)} / {n} / "
        f"{n_(link.bytes_per_s)})"
    )


def _messages(unit: ModuleType, question: Question, plan: Plan) -> list[Derivation]:
    model, batch, cluster = question.model, question.batch, question.cluster
    layout, time = plan.layout, plan.time
    t, c, p = layout.tensor, layout.context, layout.pipeline
    forwards = 2 if layout.recompute == "full" else 1
    passes = f"{layout.microbatches(batch)} · {layout.stage_layers(model, 0)}"
    width = batch.precision.activations
    num_bytes = layout.tokens(batch) * model.hidden * width
    found = []
    if t > 1:
        ring = _ring(t, num_bytes, unit.group_link(cluster, t, 1))
        found.append(
            Derivation(
                name="time: tensor",
                value=time.tensor_s,
                unit="s",
                formula="m · layers · all-reduces · 2 (t - 1)(α + 2 h tokens / (t β))",
                numbers=f"{passes} · {2 * forwards + 2} · 2 · {ring}",
                lesson="tensor_parallel.block",
            )
        )
    if c > 1:
        keys = layout.microbatch * batch.sequence * 2 * model.kv_hidden * width / t
        ring = _ring(c, keys, unit.group_link(cluster, c, t))
        found.append(
            Derivation(
                name="time: context",
                value=time.context_s,
                unit="s",
                formula="m · layers · gathers · (c - 1)(α + bytes of K and V / (c β))",
                numbers=f"{passes} · {forwards + 2} · {ring}",
                lesson="planning.step_time",
            )
        )
    if p > 1:
        inside = layout.num_gpus <= cluster.gpus_per_node
        link = cluster.intra_node if inside else cluster.inter_node
        split = t if layout.sequence_parallel else 1
        found.append(
            Derivation(
                name="time: pipeline",
                value=time.pipeline_s,
                unit="s",
                formula="2 m q (α + tokens · 2 h / β)",
                numbers=f"2 · {layout.microbatches(batch)} · {layout.chunks} · "
                f"({n_(link.alpha_s)} + {n_(num_bytes)} / {split} / "
                f"{n_(link.bytes_per_s)})",
                lesson="pipeline_parallel.execute",
            )
        )
    if layout.shards > 1:
        found.append(
            Derivation(
                name="time: data",
                value=time.data_s,
                unit="s",
                formula=_DATA[layout.zero_stage],
                numbers=_data_numbers(unit, question, plan),
                lesson="sharded_optimizer.plan"
                if layout.zero_stage
                else "distributed_data_parallel.hooks",
            )
        )
    return found


_DATA = {
    0: "all-reduce of the gradients, beyond the last backward",
    1: "gather beyond the first forward + reduce beyond the last backward",
    2: "gather beyond the first forward + m · (reduce beyond a backward)",
    3: "m · (gather beyond a forward + gather and reduce beyond a backward)",
}


def _data_numbers(unit: ModuleType, question: Question, plan: Plan) -> str:
    model, batch, cluster = question.model, question.batch, question.cluster
    layout = plan.layout
    sizes = [unit.stage_parameters(model, layout, i) for i in (0, layout.pipeline - 1)]
    layers, m = layout.stage_layers(model, 0), layout.microbatches(batch)
    link = unit.group_link(cluster, layout.shards, layout.tensor)

    def all_layers(width: int) -> str:
        seconds = layers * unit.ring_s(layout.shards, width * max(sizes) / layers, link)
        return n_(seconds)

    reduce = all_layers(batch.precision.gradients)
    gather = all_layers(batch.precision.weights)
    forward, backward = map(n_, unit.pass_times(model, layout, batch, cluster))
    if layout.zero_stage == 0:
        return f"max(0, 2 · {reduce} - {backward})"
    if layout.zero_stage == 3:
        return (
            f"{m} · (max(0, {gather} - {forward}) + "
            f"max(0, {gather} + {reduce} - {backward}))"
        )
    times = f"{m} · " if layout.zero_stage == 2 else ""
    return f"max(0, {gather} - {forward}) + {times}max(0, {reduce} - {backward})"
