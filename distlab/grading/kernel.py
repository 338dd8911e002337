"""One simulated rank's part in a scenario: a module of its own, and its comm."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from distlab.comm import PointToPointOnly
from distlab.grading.runs import POINT_TO_POINT_UNITS, Scenario
from distlab.runner import RankContext


def perform_simulated(
    module: ModuleType,
    scenario: Scenario,
    values: dict[str, Any],
    context: RankContext,
) -> Any:
    """On each simulated rank: a module of its own, the comm that its unit has."""
    building = POINT_TO_POINT_UNITS.get(module.__name__.rpartition(".")[2])
    if building:
        guarded = PointToPointOnly(context.comm, building=building)
        context = replace(context, comm=guarded)
    return scenario(context, _twin(module), **values)


def _twin(module: ModuleType) -> ModuleType:
    """A copy with globals of its own, as each real rank has them.

    Loading it once more would cost ten times as much. Classes stay shared.
    """
    twin = ModuleType(module.__name__)
    scope = vars(twin)
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            own = FunctionType(value.__code__, scope, name, None, value.__closure__)
            own.__defaults__ = copy.deepcopy(value.__defaults__)
            own.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__)
            scope[name] = own
        elif isinstance(value, list | dict | set | Tensor) and name[:2] != "__":
            scope[name] = copy.deepcopy(value)
        else:
            scope[name] = value
    return twin
