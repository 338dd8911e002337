"""Checks of task 2.8, `model_parallel.partition`: many models, split by one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, numbers, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

Costs = list[float]

ENDS = "a stage ends where the next one begins; the last ends the model"
MODELS: tuple[tuple[Costs, int], ...] = (
    ([1.0] * 7, 3),  # the remainder belongs to a stage
    ([1.0, 1.0, 1.0, 5.0], 2),
    ([5.0, 1.0, 1.0, 1.0], 2),
    ([4.0, 1.0, 4.0, 1.0, 4.0], 3),
    ([2.0, 9.0, 2.0, 2.0, 9.0], 4),
    ([1.0] * 8, 4),
    ([3.0, 1.0, 2.0], 3),
    ([7.0, 2.0], 1),
    ([0.0, 0.0, 6.0, 0.0], 2),  # what costs nothing is a layer, too
    ([1.0, 6.0, 4.0, 1.0, 1.0], 3),  # the least sum of squares has a larger maximum
    ([1.5, 1.0, 0.5, 1.0, 1.0], 2),  # between 2 and 3: costs are not integers
    ([1.0], 1),
)
TOO_FEW: tuple[tuple[Costs, int], ...] = (([1.0, 2.0], 3), ([1.0, 2.0], 0), ([], 1))


def models(seed: int) -> list[tuple[Costs, int]]:
    """The models above, and some that depend on the seed: costs and stages."""
    draw = random.Random(seed)
    drawn = [
        ([draw.randint(1, 18) / 2 for _ in range(size)], stages)
        for size, stages in ((9, 4), (10, 3), (7, 5))
    ]
    return [*MODELS, *drawn]


def cut_models(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, list[Any]]:
    """Each model's stages; and what comes of models with too few layers."""
    found = []
    for costs, num_stages in models(seed):
        with in_call(f"partition({costs}, {num_stages})"):
            found.append(_stages(unit.partition(list(costs), num_stages)))
    refused = []
    for costs, num_stages in TOO_FEW:
        try:
            refused.append(f"returned {unit.partition(list(costs), num_stages)!r:.60}")
        except Exception as error:
            refused.append(type(error).__name__)
    return {"found": found, "refused": refused}


def _stages(value: Any) -> list[list[int]] | str:
    if value is None:
        return "returned None: is a return missing?"
    if not isinstance(value, list | tuple):
        return f"returned a {type(value).__name__}, expected a list of lists"
    stages = []
    for stage in value:
        layers = numbers(stage, 64)
        if isinstance(layers, str):
            if not hasattr(stage, "__len__"):
                said = f"returned a list with {stage!r:.20} in it, expected"
                return f"{said} one list of layers per stage"
            return f"returned a stage that {layers}"
        stages.append(layers)
    return stages


def _cuts(runs: Runs) -> Iterator[tuple[Costs, int, list[list[int]]]]:
    run = worked_out(runs, cut_models)
    found = run.values[0]["found"]
    for (costs, num_stages), stages in zip(models(runs.seed), found, strict=True):
        if isinstance(stages, str):
            raise NotYetError(
                f"{_setting(costs, num_stages)} partition {stages}",
                rule="return a list with one list of layer indices per stage",
                fatal=True,
            )
        yield costs, num_stages, stages


@clause("model_parallel.partition", "C1", worlds=(1,), runs=[on_ranks(cut_models)])
def every_layer_has_its_stage(runs: Runs) -> str | None:
    """The stages one after another are the model."""
    for costs, num_stages, stages in _cuts(runs):
        flaw, slug = _flaw(costs, num_stages, stages)
        if flaw:
            raise NotYetError(
                f"{_setting(costs, num_stages)} {flaw}",
                slug=slug,
                evidence=_table(costs, stages),
                rule=ENDS if slug else "",
            )
    return None


def _flaw(costs: Costs, num_stages: int, stages: list[list[int]]) -> tuple[str, str]:
    """What is wrong with these stages, and its name if it has one; or nothing."""
    placed = [layer for stage in stages for layer in stage]
    missing = [layer for layer in range(len(costs)) if layer not in placed]
    if len(stages) != num_stages:
        return f"partition returned {len(stages)} stages, expected {num_stages}", ""
    if missing:
        slug = "layers-dropped" if placed == list(range(len(placed))) else ""
        return f"layer {missing[0]} is in no stage, expected every layer in one", slug
    if [] in stages:
        return f"stage {stages.index([])} has no layer, expected at least one", ""
    if placed != list(range(len(costs))):
        place = next(
            place
            for place, layer in enumerate([*placed, -1])
            if place == len(costs) or layer != place
        )
        where = f"after layer {placed[place - 1]}" if place else "first"
        wanted = f"layer {place}" if place < len(costs) else "no more layers"
        return f"layer {placed[place]} comes {where}, expected {wanted}", ""
    return "", ""


@clause("model_parallel.partition", "C2", worlds=(1,), runs=[on_ranks(cut_models)])
def the_bottleneck_is_cheap(runs: Runs) -> str | None:
    """No split has a cheaper bottleneck. All splits are tried."""
    for costs, num_stages, stages in _cuts(runs):
        most = max(sum(costs[i] for i in s if i < len(costs)) for s in stages)
        best, where = _best(costs, num_stages)
        if most > best:
            by_count = all(_by_count(*cut) for cut in _cuts(runs))
            raise NotYetError(
                f"{_setting(costs, num_stages)} the most expensive stage costs "
                f"{most:g}, expected {best:g} at most",
                slug="cut-by-count" if by_count else "",
                evidence=_table(costs, stages),
                rule=f"{where} has a bottleneck of {best:g}",
            )
    return f"{len(models(runs.seed))} models, each against all of its splits"


def _best(costs: Costs, num_stages: int) -> tuple[float, list[list[int]]]:
    found: list[tuple[float, list[list[int]]]] = []
    for inner in combinations(range(1, len(costs)), num_stages - 1):
        ends = [0, *inner, len(costs)]
        stages = [list(range(a, b)) for a, b in pairwise(ends)]
        found.append((max(sum(costs[i] for i in stage) for stage in stages), stages))
    return min(found)


def _by_count(costs: Costs, num_stages: int, stages: list[list[int]]) -> bool:
    """Whether the stages have equally many layers, up to the remainder."""
    sizes = [len(stage) for stage in stages]
    return max(sizes) - min(sizes) <= max(1, len(costs) % num_stages)


@clause("model_parallel.partition", "C3", worlds=(1,), runs=[on_ranks(cut_models)])
def too_few_layers_are_refused(runs: Runs) -> str | None:
    """A ValueError, not an empty stage and not another error."""
    told = worked_out(runs, cut_models).values[0]["refused"]
    for (costs, num_stages), what in zip(TOO_FEW, told, strict=True):
        if what != "ValueError":
            does = what if what.startswith("returned") else f"raised {what}"
            raise NotYetError(
                f"{_setting(costs, num_stages)} partition {does}, expected a "
                "ValueError",
                rule="look at len(costs) and num_stages first",
            )
    return None


def _setting(costs: Costs, num_stages: int) -> str:
    listed = ", ".join(f"{cost:g}" for cost in costs)
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    return f"for costs [{listed}] and {stages},"


def _table(costs: Costs, stages: list[list[int]]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            number,
            f"costs {sum(costs[i] for i in stage if i < len(costs)):g}",
            "layers " + (" ".join(map(str, stage)) or "none"),
        )
        for number, stage in enumerate(stages)
    )
