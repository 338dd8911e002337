"""What a check works with: the code under judgement, and ranks to run it on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distlab.comm import PointToPointOnly
from distlab.curriculum import UnitSource, load_graft
from distlab.curriculum.units import arrived, travelling
from distlab.grading.diagnosis import diagnose, diagnose_finished, only_messages
from distlab.grading.guard import install
from distlab.grading.mismatches import printed
from distlab.grading.together import Play, play_all, play_of, taken_apart
from distlab.grading.together import Scenario as Scenario
from distlab.runner import Cluster, Limits, RankContext, Run

_Key = tuple[Play, tuple[str, ...]]
_SECRETS = ("solutions", "tests/mutants")
POINT_TO_POINT_UNITS = {
    "collectives": "the collectives",
    "ring_allreduce": "all_reduce",
    "topology": "its own all-reduces",
}


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
class RankHarness:
    """`world_size` ranks on which a check runs scenarios; equal runs are run once.

    Those of `plan` are run together as soon as one of them is wanted.
    """

    cluster: Cluster
    world_size: int
    seed: int
    limits: Limits
    plan: tuple[Play, ...] = ()
    latest: Run | None = None  # what the check asked for last
    latest_play: Play | None = None  # and of what it was the run
    _runs: dict[_Key, Run] = field(default_factory=dict)
    _in_company: list[_Key] = field(default_factory=list)

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
        wanted = play_of(scenario, values)
        key = (wanted, impl.grafts)
        if key not in self._runs and wanted in self.plan:
            plays, self.plan = self.plan, ()
            self._play(impl, plays)
        if key not in self._runs:
            self._play(impl, (wanted,))
        self.latest, self.latest_play = self._runs[key], wanted
        return self.latest

    @property
    def has_company(self) -> bool:
        """Whether something was played with something else, and is not forgotten."""
        return bool(self._in_company)

    def forget_company(self) -> bool:
        """Forget what was played with something else; False if nothing was."""
        forgotten, self._in_company = self._in_company, []
        for key in forgotten:
            self._runs.pop(key)
        return bool(forgotten)

    def _play(self, impl: Implementation, plays: tuple[Play, ...]) -> None:
        told: list[list[Any]] = [[] for _ in range(self.world_size)]
        run = self.cluster.run(
            perform,
            self.world_size,
            travelling(impl.source),
            needed_reference(impl),
            list(impl.grafts),
            [[play.name, {"seed": self.seed, **dict(play.values)}] for play in plays],
            off_limits(impl),
            limits=self.limits,
            on_report=lambda rank, value: told[rank].append(value),
            seed=self.seed,
            backend=_transport(self.world_size),
        )
        keys = [(play, impl.grafts) for play in plays]
        if len(plays) == 1 or not any(record.marks for record in run.ranks):
            self._runs[keys[0]] = run  # it got no further than the first
            return
        parts = taken_apart(run, told, len(plays))
        self._runs.update(zip(keys, parts, strict=False))
        self._in_company = keys[: len(parts)]

    def printed(self) -> str:
        """What the ranks of the latest run printed."""
        runs = list(self._runs.values())
        return printed(runs[-1]) if runs else ""


def perform(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    plays: list[tuple[str, dict[str, Any]]],
    off_limits: dict[str, list[str]],
) -> Any:
    """In each rank: load the unit, hand it its communicator, play the scenarios."""
    from distlab.runner.rank import resolve

    install(**off_limits)
    if source["unit"] in POINT_TO_POINT_UNITS:
        building = POINT_TO_POINT_UNITS[source["unit"]]
        guarded = PointToPointOnly(context.comm, building=building)
        context = replace(context, comm=guarded)
    texts = arrived(source), arrived(reference)

    def play(name: str, values: dict[str, Any]) -> Any:
        return resolve(name)(context, load_graft(*texts, grafts), **values)

    if len(plays) == 1:
        return play(*plays[0])
    return play_all(context, play, plays)


def _transport(world_size: int) -> str:
    # Two ranks meet on gloo, as real jobs do; more of them on our own sockets. The
    # verdicts are the same (the corpus holds both to it), but on two cores a small
    # collective of four ranks takes gloo's threads about ten times as long.
    return "gloo" if world_size <= 2 else "tcp"


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
