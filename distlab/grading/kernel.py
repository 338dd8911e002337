"""A rank's part in a scenario: the comm of its unit; if simulated, its own module."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from distlab.comm import PointToPointOnly
from distlab.grading.runs import Scenario
from distlab.runner import RankContext


def with_own_comm(context: RankContext, builds: str) -> RankContext:
    """The context of a unit; one that builds collectives gets only messages."""
    if not builds:
        return context
    return replace(context, comm=PointToPointOnly(context.comm, building=builds))


def perform_simulated(
    module: ModuleType,
    scenario: Scenario,
    values: dict[str, Any],
    builds: str,
    context: RankContext,
) -> Any:
    """On each simulated rank: a module of its own, the comm that its unit has."""
    return scenario(with_own_comm(context, builds), _twin(module), **values)


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
