"""Checks of task 3.32, `planning.choose_layout`: all valid layouts, and a fast one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any

from distlab.given.planning import Batch, Cluster, Layout, Link, Model
from distlab.grading.checks.planning import forms
from distlab.grading.checks.planning.asked import answers, expect_answers
from distlab.grading.checks.planning.questions import (
    BOTH,
    FAST,
    GROUPED,
    PLAIN,
    SMALL,
    TIED,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY

SLOWER = 1.05
MOST = 50_000  # layouts that are read of an iterator
_APART = 1000.0  # bytes: far more than rounding
Fields = tuple[Any, ...]


@dataclass(frozen=True)
class Setting:
    """A job to plan; its name says what is special about it: "for one GPU"."""

    name: str
    model: Model
    batch: Batch
    cluster: Cluster
    num_gpus: int


WIDE = Model(layers=4, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=16_000)
DEEP = Model(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1408, vocab=2_000)
SHORT, LONG = Batch(sequence=512, global_batch=4), Batch(sequence=8192, global_batch=1)
TWO = Batch(sequence=64, global_batch=2)
FAR = replace(SMALL, inter_node=Link(alpha_s=5e-5, bytes_per_s=5e8))
FAR_PAIRS = replace(FAR, gpus_per_node=2)
APART = replace(FAR, gpus_per_node=1)
ONLY_TENSOR = Batch(sequence=65, global_batch=1)
"""What can't be divided by 2 in any other way, if the model has one layer."""
SCARCE = Layout(tensor=4, pipeline=2, sequence_parallel=True)
LESS_SCARCE = (
    Layout(data=4, tensor=2, zero_stage=2, recompute="full", sequence_parallel=True),
    Layout(data=4, context=2, zero_stage=3, recompute="selective"),
    Layout(data=2, pipeline=4, zero_stage=1, recompute="full"),
)
"""Layouts that just fit where memory is scarce. Then the fastest ones don't."""
SMALLEST = Layout(tensor=4, recompute="full", sequence_parallel=True)


def settings(seed: int) -> tuple[Setting, ...]:
    """Plenty of memory and little of it, near GPUs and far ones, one GPU and many."""
    draw = random.Random(seed)
    near = Setting("with fast links", WIDE, SHORT, FAST, 8)
    far = Setting("with slow links between two nodes", WIDE, SHORT, FAR, 8)
    pairs = Setting("with slow links between pairs of GPUs", DEEP, SHORT, FAR_PAIRS, 8)
    tied = Setting("with tied embeddings", TIED, SHORT, SMALL, 4)
    return (
        Setting("for one GPU", GROUPED, SHORT, FAST, 1),
        Setting("for six GPUs", PLAIN, Batch(sequence=256, global_batch=6), FAST, 6),
        near,
        far,
        pairs,
        Setting("for one long sequence", GROUPED, LONG, FAST, 4),
        Setting("on nodes of one GPU", replace(DEEP, layers=1), ONLY_TENSOR, APART, 2),
        *(_with_room(kind, SCARCE, _APART, "little memory") for kind in (near, far)),
        _with_room(pairs, SCARCE, _APART, "little memory"),
        _with_room(pairs, draw.choice(LESS_SCARCE), _APART, "some memory"),
        _with_room(tied, SMALLEST, 0, "exactly enough memory for one layout"),
        _with_room(tied, SMALLEST, -1, "a byte too little memory for any layout"),
    )


def _with_room(setting: Setting, layout: Layout, more: float, name: str) -> Setting:
    """The setting with the memory that a layout needs, and `more` bytes."""
    room = more + forms.step_memory(setting.model, layout, setting.batch).total_bytes
    return replace(
        setting,
        name=f"{setting.name} and {name}",
        cluster=replace(setting.cluster, memory_bytes=room),
    )


Costs = tuple[tuple[Layout, float, float], ...]


def _all(setting: Setting) -> Costs:
    """Every valid layout with its bytes and seconds, however little memory there is."""
    return _costs(
        setting.model,
        setting.batch,
        replace(setting.cluster, memory_bytes=0.0),
        setting.num_gpus,
    )


@lru_cache(maxsize=16)
def _costs(model: Model, batch: Batch, cluster: Cluster, num_gpus: int) -> Costs:
    return tuple(
        (
            layout,
            forms.step_memory(model, layout, batch).total_bytes,
            forms.step_time(model, layout, batch, cluster).total_s,
        )
        for layout in forms.valid_layouts(model, batch, num_gpus)
    )


# ── in the rank ─────────────────────────────────────────────────────────────────────


def choose_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The layout chosen in every setting, as its fields; or None, or words."""
    found: list[Any] = []
    for one in settings(seed):
        with in_call(f"choose_layout, {one.name}"):
            chosen = unit.choose_layout(one.model, one.batch, one.cluster, one.num_gpus)
        found.append(_fields(chosen))
    return found


def list_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The valid layouts of a few settings, as their fields."""
    found: list[Any] = []
    for one in listed(seed):
        with in_call(f"valid_layouts, {one.name}"):
            layouts = unit.valid_layouts(one.model, one.batch, one.num_gpus)
            if layouts is None:
                return ["returned None: is a yield missing?"]
            found.append([_fields(layout) for layout in islice(layouts, MOST)])
    return found


def listed(seed: int) -> list[Setting]:
    """Settings whose layouts are listed."""
    draw = random.Random(seed)
    own = Batch(sequence=64 * draw.randint(1, 9), global_batch=draw.choice((4, 6, 9)))
    num_gpus = draw.choice((2, 4, 7, 12))
    return [
        Setting("for one GPU", GROUPED, SHORT, FAST, 1),
        Setting("for six GPUs", PLAIN, Batch(sequence=96, global_batch=6), FAST, 6),
        Setting("for eight GPUs", BOTH, Batch(sequence=256, global_batch=4), FAST, 8),
        Setting("for one layer", replace(GROUPED, layers=1), TWO, FAST, 4),
        Setting(f"for {num_gpus} GPUs", TIED, own, FAST, num_gpus),
    ]


def _fields(layout: Any) -> Fields | str | None:
    if layout is None:
        return None
    return astuple(layout) if isinstance(layout, Layout) else f"{layout!r:.40}"


def _layout(values: Fields) -> Layout:
    names = (field.name for field in fields(Layout))
    return Layout(**dict(zip(names, values, strict=True)))


# ── the judges ──────────────────────────────────────────────────────────────────────

TASK = "planning.choose_layout"
DEGREES = on_ranks(answers, function="useful_degrees")
LISTS, CHOICES = on_ranks(list_all), on_ranks(choose_all)


@clause(TASK, "C1", worlds=(1,), runs=[DEGREES])
def degrees_are_solved_for(runs: Runs) -> str | None:
    """For models and clusters of any kind."""
    return expect_answers(runs, "useful_degrees")


@clause(TASK, "C2", worlds=(1,), runs=[LISTS])
def every_layout_once(runs: Runs) -> str | None:
    """One GPU, six, eight, and a drawn number."""
    told = worked_out(runs, LISTS).values[0]
    if isinstance(told[0], str):
        raise NotYetError(f"valid_layouts {told[0]}")
    notes = []
    for setting, chosen in zip(listed(runs.seed), told, strict=True):
        right: Counter[Any] = Counter(
            astuple(layout)
            for layout in forms.valid_layouts(
                setting.model, setting.batch, setting.num_gpus
            )
        )
        got: Counter[Any] = Counter(
            one if isinstance(one, str) else tuple(one) for one in chosen
        )
        missing, extra = right - got, got - right
        if missing or extra:
            raise _other_layouts(setting, right, missing, extra)
        notes.append(f"{setting.name}: {len(right)} layouts")
    return "; ".join(notes)


def _other_layouts(
    setting: Setting,
    right: Counter[Any],
    missing: Counter[Any],
    extra: Counter[Any],
) -> NotYetError:
    num_right, num_missing = right.total(), missing.total()
    twice = [one for one in extra if one in right]
    where = f"{setting.name}, valid_layouts"
    if missing:
        first, state = min(missing, key=_num_unusual), "missing"
        words = f"{where} leaves out {num_missing} of {num_right} valid layouts"
    elif twice:
        first, state, n = twice[0], "repeated", len(twice)
        layouts = "1 valid layout" if n == 1 else f"{n} valid layouts"
        words = f"{where} yields {layouts} more than once"
    else:
        first, state, n = min(extra, key=_num_unusual), "not valid", extra.total()
        layouts = "1 layout that isn't" if n == 1 else f"{n} layouts that aren't"
        words = f"{where} yields {layouts} valid"
    shown = first if isinstance(first, str) else str(_layout(first))
    why = _why_not(setting, first) if state == "not valid" else ""
    return NotYetError(
        f"{words}, such as {_in_short(first)}" + f": {why}" * bool(why),
        evidence=[(NOBODY, state, shown)],
    )


def _why_not(setting: Setting, values: Any) -> str:
    """Why these aren't the settings of a valid layout."""
    if isinstance(values, str):
        return ""
    layout = _layout(values)
    if layout.num_gpus != setting.num_gpus:
        return f"it uses {layout.num_gpus} of {setting.num_gpus} GPUs"
    return layout.problem(setting.model, setting.batch)


def _num_unusual(values: Any) -> int:
    """How many settings of a layout aren't the default."""
    return 0 if isinstance(values, str) else _in_short(values).count("=")


def _in_short(values: Any) -> str:
    """A layout with the settings that aren't the default."""
    if isinstance(values, str):
        return values
    given = zip(fields(Layout), values, strict=True)
    unusual = [f"{f.name}={v!r}" for f, v in given if v != f.default]
    return f"Layout({', '.join(unusual)})"


def _choices(runs: Runs) -> list[tuple[Setting, Any]]:
    told = worked_out(runs, CHOICES).values[0]
    return list(zip(settings(runs.seed), told, strict=True))


def _fitting(setting: Setting) -> dict[Fields, float]:
    """The seconds of each layout that fits."""
    room = setting.cluster.memory_bytes
    return {astuple(one): s for one, memory, s in _all(setting) if memory <= room}


@clause(TASK, "C3", worlds=(1,), runs=[CHOICES])
def the_choice_fits(runs: Runs) -> str | None:
    """Settings with plenty of memory, with little, and with exactly enough."""
    for setting, chosen in _choices(runs):
        fitting = _fitting(setting)
        if chosen is None or not fitting:
            continue
        if isinstance(chosen, str):
            raise NotYetError(
                f"{setting.name}, choose_layout returned {chosen}, expected a Layout"
            )
        if tuple(chosen) not in fitting:
            raise _unfit(setting, _layout(chosen))
    for setting, chosen in _choices(runs):
        if chosen is None and _fitting(setting):
            n = len(_fitting(setting))
            fit = "the layout that fits" if n == 1 else f"one of the {n} that fit"
            raise NotYetError(
                f"{setting.name}, choose_layout returned None, expected {fit}"
            )
    return None


def _unfit(setting: Setting, layout: Layout) -> NotYetError:
    evidence = [(NOBODY, "chosen", str(layout))]
    where = f"{setting.name}, choose_layout returned"
    if layout.num_gpus != setting.num_gpus:
        return NotYetError(
            f"{where} a layout for {layout.num_gpus} GPUs, expected {setting.num_gpus}",
            evidence=evidence,
        )
    if problem := layout.problem(setting.model, setting.batch):
        return NotYetError(
            f"{where} {_in_short(astuple(layout))}, which is invalid: {problem}",
            evidence=evidence,
        )
    memory = forms.step_memory(setting.model, layout, setting.batch).total_bytes
    return NotYetError(
        f"{where} a layout that needs {memory / 1e9:.3f} GB on a GPU, which has only "
        f"{setting.cluster.memory_bytes / 1e9:.3f} GB",
        evidence=evidence,
    )


@clause(TASK, "C4", worlds=(1,), runs=[CHOICES])
def the_choice_is_fast(runs: Runs) -> str | None:
    """Compared with all layouts that fit."""
    notes = []
    for setting, chosen in _choices(runs):
        fitting = _fitting(setting)
        if not fitting:
            continue
        if chosen is None or isinstance(chosen, str) or tuple(chosen) not in fitting:
            raise NotJudgedError("see C3")
        best = min(fitting, key=lambda one: fitting[one])
        factor = fitting[tuple(chosen)] / fitting[best]
        if factor > SLOWER:
            raise NotYetError(
                f"{setting.name}, a step with choose_layout's layout takes "
                f"{factor:.2f} times as long as with the fastest one that fits",
                evidence=[
                    (NOBODY, "chosen", _shown(setting, _layout(chosen))),
                    (NOBODY, "best", _shown(setting, _layout(best))),
                ],
            )
        notes.append(f"{len(fitting)}")
    return f"the best of {', '.join(notes)} layouts"


def _shown(setting: Setting, layout: Layout) -> str:
    seconds = forms.step_time(
        setting.model, layout, setting.batch, setting.cluster
    ).total_s
    return f"{1000 * seconds:.3f} ms   {layout}"


@clause(TASK, "C5", worlds=(1,), runs=[CHOICES], after=["C3"])
def nothing_fits(runs: Runs) -> str | None:
    """A byte less than the smallest layout needs."""
    for setting, chosen in _choices(runs):
        if chosen is not None and not _fitting(setting):
            raise NotYetError(
                f"{setting.name}, choose_layout returned a layout, expected None",
                evidence=[(NOBODY, "chosen", str(chosen))],
            )
    return None
