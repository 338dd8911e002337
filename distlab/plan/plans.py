"""Rank all layouts of a model that fit on a cluster, by the unit's formulas."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil, isfinite
from types import ModuleType

from distlab.given.planning import (
    RECOMPUTE,
    Batch,
    Cluster,
    Goodput,
    Layout,
    Memory,
    Model,
    Recovery,
    StepTime,
)
from distlab.sim.net.quantities import nearest, whole

DAY_S = 86400.0
LAYOUT_FIELDS = {
    "data": "data",
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "chunks": "chunks",
    "zero": "zero_stage",
    "microbatch": "microbatch",
    "recompute": "recompute",
    "sequence": "sequence_parallel",
}
"""The fields of `Layout` by the names that people type."""
Fixed = dict[str, int | str | bool]
"""Fields of a layout that mustn't vary."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model and a batch to train it with, and the cluster to train it on."""

    model: Model
    batch: Batch
    cluster: Cluster
    num_gpus: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its memory and time on one GPU."""

    layout: Layout
    memory: Memory
    time: StepTime
    mfu: float

    @property
    def exposed_s(self) -> float:
        """The seconds of a step during which a GPU waits for messages."""
        time = self.time
        return time.tensor_s + time.context_s + time.pipeline_s + time.data_s

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The degrees of the four axes."""
        return _shape(self.layout)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best plan of each shape, among those that fit, fastest first."""

    plans: tuple[Plan, ...]
    num_valid: int
    num_fitting: int
    smallest: Plan | None  # the one that needs the least memory, even if it doesn't fit


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    return layout.data, layout.tensor, layout.pipeline, layout.context


def plan_of(unit: ModuleType, question: Question, layout: Layout) -> Plan:
    """Return a layout with its memory, time and MFU by the unit's formulas."""
    model, batch, cluster = question.model, question.batch, question.cluster
    time = unit.step_time(model, layout, batch, cluster)
    return Plan(
        layout=layout,
        memory=unit.step_memory(model, layout, batch),
        time=time,
        mfu=unit.mfu(model, batch, cluster, question.num_gpus, time.total_s),
    )


def ranked(unit: ModuleType, question: Question, fixed: Fixed | None = None) -> Ranking:
    """Return the layouts that the unit finds valid and that fit, the fastest first.

    If two are equally fast, the one that needs less memory comes first.
    """
    model, batch, cluster = question.model, question.batch, question.cluster
    wanted = (fixed or {}).items()
    best: dict[tuple[int, int, int, int], tuple[tuple[float, float], Layout]] = {}
    least: tuple[float, Layout] | None = None
    num_valid = num_fitting = 0
    for layout in unit.valid_layouts(model, batch, question.num_gpus):
        if any(getattr(layout, name) != value for name, value in wanted):
            continue
        num_valid += 1
        num_bytes = unit.step_memory(model, layout, batch).total_bytes
        if least is None or num_bytes < least[0]:
            least = num_bytes, layout
        if num_bytes > cluster.memory_bytes:
            continue
        num_fitting += 1
        key = unit.step_time(model, layout, batch, cluster).total_s, num_bytes
        shape = _shape(layout)
        if shape not in best or key < best[shape][0]:
            best[shape] = key, layout
    in_order = sorted(best.values(), key=lambda pair: pair[0])
    return Ranking(
        plans=tuple(plan_of(unit, question, layout) for _, layout in in_order),
        num_valid=num_valid,
        num_fitting=num_fitting,
        smallest=plan_of(unit, question, least[1]) if least else None,
    )


def problem_of(question: Question, fixed: Fixed | None = None) -> str:
    """Return why a layout with these fields can't train on these GPUs, or "".

    Degrees that aren't fixed are 1, except for the data ranks, which get the remaining
    GPUs.
    """
    layout = Layout(**(fixed or {}))  # type: ignore[arg-type]
    if question.num_gpus % layout.num_gpus:
        return f"{layout.num_gpus:,} ranks do not divide {question.num_gpus:,} GPUs"
    remaining = question.num_gpus // layout.num_gpus
    layout = replace(layout, data=layout.data * remaining)
    return layout.problem(question.model, question.batch)


def recovery_of(question: Question) -> Recovery:
    """Return our assumptions about failures: round figures, not from any source.

    A save stops the training for half a minute. A failure is noticed after a minute,
    and a restart takes five. A node is back after a day, and one in a hundred is spare.
    """
    nodes = question.num_gpus / question.cluster.gpus_per_node
    return Recovery(
        save_s=30.0,
        detection_s=60.0,
        restart_s=300.0,
        repair_s=DAY_S,
        spare_nodes=ceil(nodes / 100),
    )


def goodput_of(
    unit: ModuleType, question: Question, training_s: float
) -> Goodput | None:
    """Return how failures affect a run, or None if we don't know their rate."""
    cluster = question.cluster
    if not isfinite(cluster.gpu_mtbf_s):
        return None
    found: Goodput = unit.goodput(
        cluster, question.num_gpus, recovery_of(question), training_s
    )
    return found


def parse_fixed(text: str) -> Fixed:
    """Read `tensor=8,zero=1,recompute=full` into fields of a layout.

    Raises:
        ValueError: a name is unknown, or its value is of the wrong kind.
    """
    fixed: Fixed = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in LAYOUT_FIELDS or not equals:
            near = nearest(name, LAYOUT_FIELDS)
            raise ValueError(
                f'--layout: "{part}" isn\'t NAME=VALUE{near}; known names are '
                f"{', '.join(LAYOUT_FIELDS)}"
            )
        fixed[LAYOUT_FIELDS[name]] = _value(name, value)
    return fixed


def _value(name: str, value: str) -> int | str | bool:
    choices = {
        "recompute": RECOMPUTE,
        "sequence": ("yes", "no"),
    }.get(name)
    if choices is None:
        try:
            return whole(value)
        except ValueError as error:
            raise ValueError(f"--layout: {name}: {error}") from None
    if value not in choices:
        raise ValueError(
            f"--layout: {name} is {value!r}; choose {', '.join(choices[:-1])} or "
            f"{choices[-1]}"
        )
    return value == "yes" if name == "sequence" else value


def shares_of(time: StepTime) -> dict[str, float]:
    """Return each cause's share of a step, by the name of its field without `_s`."""
    total = time.total_s
    return {
        field.name.removesuffix("_s"): getattr(time, field.name) / total
        for field in fields(time)
    }
