"""What a check works with: the code under judgement, and ranks to run it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from distlab.comm import PointToPointOnly
from distlab.curriculum import UnitSource, load_graft
from distlab.grading.diagnosis import diagnose, diagnose_finished
from distlab.grading.misfits import printed
from distlab.runner import Cluster, Limits, RankContext, Run

Scenario = Callable[..., Any]
"""A function `(context, unit, **values) -> record` that runs on every rank."""

_POINT_TO_POINT_UNITS = {"collectives": "the collectives"}


@dataclass(frozen=True)
class Implementation:
    """A unit's code as it is graded: `grafts` names tasks filled by the reference."""

    source: UnitSource
    reference: UnitSource
    grafts: tuple[str, ...] = ()

    def with_grafts(self, tasks: tuple[str, ...]) -> Implementation:
        """The same with these tasks' functions taken from the reference as well."""
        return replace(self, grafts=tuple(sorted({*self.grafts, *tasks})))


@dataclass
class Bench:
    """`world_size` ranks on which a check runs scenarios; equal runs are run once."""

    cluster: Cluster
    world_size: int
    seed: int
    limits: Limits
    _runs: dict[tuple[Any, ...], Run] = field(default_factory=dict)

    def run(self, impl: Implementation, scenario: Scenario, **values: Any) -> Run:
        """Run `scenario` on every rank to its end.

        Raises:
            NotYetError: it did not finish; with the diagnosis of how it ended.
        """
        run = self.observe(impl, scenario, **values)
        if run.outcome != "finished":
            raise diagnose(run)
        diagnose_finished(run)
        return run

    def observe(self, impl: Implementation, scenario: Scenario, **values: Any) -> Run:
        """The run, however it ended."""
        key = (scenario.__qualname__, impl.grafts, tuple(sorted(values.items())))
        if key not in self._runs:
            self._runs[key] = self.cluster.run(
                perform,
                self.world_size,
                _travelling(impl.source),
                _travelling(impl.reference),
                list(impl.grafts),
                f"{scenario.__module__}:{scenario.__qualname__}",
                {"seed": self.seed, **values},
                limits=self.limits,
                seed=self.seed,
            )
        return self._runs[key]

    def printed(self) -> str:
        """What the ranks of the latest run printed."""
        runs = list(self._runs.values())
        return printed(runs[-1]) if runs else ""


def perform(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    scenario: str,
    values: dict[str, Any],
) -> Any:
    """In each rank: load the unit, hand it its communicator, play the scenario."""
    from distlab.runner.rank import resolve

    unit = _load(source, reference, grafts)
    if source["unit"] in _POINT_TO_POINT_UNITS:
        building = _POINT_TO_POINT_UNITS[source["unit"]]
        guarded = PointToPointOnly(context.comm, building=building)
        context = replace(context, comm=guarded)
    return resolve(scenario)(context, unit, **values)


def _travelling(source: UnitSource) -> dict[str, str]:
    return {
        "unit": source.unit,
        "side": source.side,
        "path": str(source.path),
        "text": source.text,
    }


def _load(
    source: dict[str, str], reference: dict[str, str], grafts: list[str]
) -> ModuleType:
    return load_graft(_arrived(source), _arrived(reference), grafts)


def _arrived(parts: dict[str, str]) -> UnitSource:
    return UnitSource(parts["unit"], parts["side"], Path(parts["path"]), parts["text"])
