"""What a check works with: the code under judgement, and ranks to run it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from distlab.comm import PointToPointOnly
from distlab.curriculum import UnitSource, load_graft
from distlab.curriculum.units import arrived, travelling
from distlab.grading.diagnosis import diagnose, diagnose_finished, only_messages
from distlab.grading.guard import install
from distlab.grading.misfits import printed
from distlab.runner import Cluster, Limits, RankContext, Run

Scenario = Callable[..., Any]
"""A function `(context, unit, **values) -> record` that runs on every rank."""

_SECRETS = ("solutions", "tests/mutants")
POINT_TO_POINT_UNITS = {"collectives": "the collectives"}


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
    latest: Run | None = None  # what the check asked for last
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
        if impl.source.unit in POINT_TO_POINT_UNITS:
            only_messages(run)
        return run

    def observe(self, impl: Implementation, scenario: Scenario, **values: Any) -> Run:
        """The run, however it ended."""
        key = (scenario.__qualname__, impl.grafts, tuple(sorted(values.items())))
        if key not in self._runs:
            self._runs[key] = self.cluster.run(
                perform,
                self.world_size,
                travelling(impl.source),
                needed_reference(impl),
                list(impl.grafts),
                f"{scenario.__module__}:{scenario.__qualname__}",
                {"seed": self.seed, **values},
                off_limits(impl),
                limits=self.limits,
                seed=self.seed,
            )
        self.latest = self._runs[key]
        return self.latest

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
    off_limits: dict[str, list[str]],
) -> Any:
    """In each rank: load the unit, hand it its communicator, play the scenario."""
    from distlab.runner.rank import resolve

    install(**off_limits)
    unit = _load(source, reference, grafts)
    if source["unit"] in POINT_TO_POINT_UNITS:
        building = POINT_TO_POINT_UNITS[source["unit"]]
        guarded = PointToPointOnly(context.comm, building=building)
        context = replace(context, comm=guarded)
    return resolve(scenario)(context, unit, **values)


def off_limits(impl: Implementation) -> dict[str, list[str]]:
    """The folders that are not the submission's to change, and not to look into."""
    # A course may lie apart from the distlab that judges it: both are kept.
    roots = {impl.reference.path.parents[2], Path(__file__).parents[2]}
    course = [str(path) for path in sorted({*roots, impl.source.path})]
    secrets = [str(root / name) for root in sorted(roots) for name in _SECRETS]
    return {"course": course, "secrets": secrets}


def needed_reference(impl: Implementation) -> dict[str, str]:
    """What travels of the reference: no text that is not needed, lest it be read."""
    reference = impl.reference
    return travelling(reference if impl.grafts else replace(reference, text=""))


def _load(
    source: dict[str, str], reference: dict[str, str], grafts: list[str]
) -> ModuleType:
    return load_graft(arrived(source), arrived(reference), grafts)
