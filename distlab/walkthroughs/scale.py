"""The section at real scale of each walkthrough, computed by unit `planning`.

No ranks run here. The functions are yours where you have passed unit `planning`, and
the reference's otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.given.planning import Batch, Layout, Precision, recovery_with
from distlab.plan.catalog import find_cluster, find_model
from distlab.plan.formulas import UNIT
from distlab.plan.plans import DAY_S, Question, plan_of

Rows = dict[str, dict[str, float | str]]
CLUSTER = "dgx-h100"
_GB = 1e9


def gradients(model: str, world_sizes: Sequence[int], sequence: int) -> Rows:
    """Return how long an all-reduce of a model's gradients takes, and what hides it.

    A row per number of ranks. `star` is the all-reduce of phase 1, in which rank 0
    receives and sends everything through one link. `ring` uses all links of the nodes,
    layer by layer. `backward` is the backward pass of one sequence of `sequence`
    tokens, and `exposed` is how much longer the ring takes.
    """
    unit, cluster = _unit(), find_cluster(CLUSTER).value
    shape = find_model(model).value
    rows: Rows = {}
    for n in world_sizes:
        layout = Layout(data=n, recompute="selective")
        batch = Batch(sequence=sequence, global_batch=n)
        question = shape, layout, batch, cluster
        num_bytes = batch.precision.gradients * unit.stage_parameters(shape, layout, 0)
        one = cluster.intra_node if n <= cluster.gpus_per_node else cluster.inter_node
        star_s = 2 * (n - 1) * (one.alpha_s + num_bytes / one.bytes_per_s)
        link = unit.group_link(cluster, n, 1)
        ring_s = 2 * shape.layers * unit.ring_s(n, num_bytes / shape.layers, link)
        rows[str(n)] = {
            "gradients (GB)": num_bytes / _GB,
            "star (ms)": 1e3 * star_s,
            "ring (ms)": 1e3 * ring_s,
            "backward (ms)": 1e3 * unit.pass_times(*question)[1],
            "exposed (ms)": 1e3 * unit.exposed_data_s(*question),
        }
    return rows


def memory(model: str, sequence: int) -> Rows:
    """Return what a GPU holds in GB, as one technique of phase 2 after another joins.

    The batch has eight sequences. The last two rows start from full recomputation.
    """
    unit, shape = _unit(), find_model(model).value
    single = Precision(
        weights=4, gradients=4, master_weights=0, moments=8, activations=4
    )
    mixed = Batch(sequence=sequence, global_batch=8)
    full = Layout(recompute="full")
    steps = {
        "float32, all 8 sequences at once": (
            Layout(microbatch=8),
            replace(mixed, precision=single),
        ),
        "+ mixed precision": (Layout(microbatch=8), mixed),
        "+ accumulation, 1 sequence at a time": (Layout(), mixed),
        "+ selective recomputation": (Layout(recompute="selective"), mixed),
        "+ full recomputation": (full, mixed),
        "+ 4 pipeline stages": (replace(full, pipeline=4), mixed),
        "or + 4 tensor ranks": (replace(full, tensor=4), mixed),
    }
    rows: Rows = {}
    for name, (layout, batch) in steps.items():
        held = unit.step_memory(shape, layout, batch)
        rows[name] = {
            "weights": held.weights_bytes / _GB,
            "gradients": held.gradients_bytes / _GB,
            "optimizer": held.optimizer_bytes / _GB,
            "activations": held.activations_bytes / _GB,
            "total (GB)": held.total_bytes / _GB,
        }
    return rows


def layouts(
    model: str, num_gpus: int, batch: Batch, candidates: Sequence[Layout]
) -> Rows:
    """Return the time of a step, its causes in percent, and the memory by layout."""
    unit = _unit()
    question = Question(
        model=find_model(model).value,
        batch=batch,
        cluster=find_cluster(CLUSTER).value,
        num_gpus=num_gpus,
    )
    rows: Rows = {}
    for layout in candidates:
        problem = layout.problem(question.model, batch)
        if problem:
            raise ValueError(problem)
        plan = plan_of(unit, question, layout)
        total_s = plan.time.total_s
        rows[_name(layout)] = {
            "step (s)": total_s,
            "MFU (%)": 100 * plan.mfu,
            "tensor (%)": 100 * plan.time.tensor_s / total_s,
            "bubble (%)": 100 * plan.time.bubble_s / total_s,
            "data (%)": 100 * plan.time.data_s / total_s,
            "memory (GB)": plan.memory.total_bytes / _GB,
        }
    return rows


def _name(layout: Layout) -> str:
    axes = {
        "data": layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
    }
    return " × ".join(f"{n} {axis}" for axis, n in axes.items() if n > 1)


def failures(world_sizes: Sequence[int], save_s: float, spares: int) -> Rows:
    """Return what failures make of 30 days of training, by the number of GPUs."""
    unit, cluster = _unit(), find_cluster(CLUSTER).value
    recovery = recovery_with(save_s, spares)
    rows: Rows = {}
    for n in world_sizes:
        found = unit.goodput(cluster, n, recovery, 30 * DAY_S)
        rows[f"{n:,}"] = {
            "a failure every (h)": found.mtbf_s / 3600,
            "saves every (min)": found.interval_s / 60,
            "lost each time (min)": found.lost_s / 60,
            "goodput (%)": 100 * found.share,
            "days": found.wall_s / DAY_S,
        }
    return rows


def _unit() -> ModuleType:
    return chosen_unit(load_curriculum(), UNIT).load()
