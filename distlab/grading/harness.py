"""Runs on real ranks: the code under judgement, and what a task's clauses ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.curriculum import UnitSource, installed_course, load_graft
from distlab.curriculum.compiled import received, sent
from distlab.grading.guard import doors_of, install, resolved
from distlab.grading.kernel import with_own_comm
from distlab.grading.kit.nodes import ranks_per_node
from distlab.grading.mismatches import printed
from distlab.grading.runs import Records, Runs, RunSpec, Scenario
from distlab.grading.together import is_past_first, play_all, taken_apart
from distlab.grading.virtual import play_in_virtual_time, settings_of
from distlab.runner import Cluster, Limits, RankContext, Run, RunnerError
from distlab.runner.rank import resolve

_SECRETS = (
    "solutions",
    "distlab/course/solutions",  # in a wheel
    "distlab/curriculum/mistakes",
    "tests/mutants",
)


@dataclass(frozen=True)
class Implementation:
    """A unit's code as it is graded: `grafts` names tasks filled by the reference."""

    source: UnitSource
    reference: UnitSource
    grafts: tuple[str, ...] = ()

    def with_grafts(self, tasks: tuple[str, ...]) -> Implementation:
        """The same with these tasks' functions taken from the reference as well."""
        return replace(self, grafts=tuple(sorted({*self.grafts, *tasks})))

    @property
    def reference_alone(self) -> Implementation:
        """The reference in place of the code."""
        return Implementation(self.reference, self.reference)


class PlayedRuns(Runs):
    """Runs of one implementation on `world_size` ranks; equal runs are run once.

    Those of `plan` run together as soon as one of them is read.
    """

    def __init__(
        self,
        cluster: Cluster,
        impl: Implementation,
        world_size: int,
        seed: int,
        limits: Limits,
        plan: tuple[RunSpec, ...] = (),
    ) -> None:
        super().__init__(impl.source, world_size, seed)
        self.cluster = cluster
        self.impl = impl
        self.limits = limits
        self.ranks_per_node = ranks_per_node(world_size)
        self.shared: frozenset[RunSpec] = frozenset()  # what ran with something else
        self.records: Records = {}
        self._beside: PlayedRuns | None = None  # the reference
        self._plan = tuple(spec for spec in plan if spec.is_on_ranks)

    def alone(self) -> PlayedRuns:
        """The same without what ran together with something else: it runs again."""
        other = self.of(self.impl)
        kept = self.records.items()
        other.records = {spec: run for spec, run in kept if spec not in self.shared}
        return other

    def of(self, impl: Implementation) -> PlayedRuns:
        """The same runs of another implementation."""
        other = PlayedRuns(self.cluster, impl, self.world_size, self.seed, self.limits)
        other.declared, other.ranks_per_node = self.declared, self.ranks_per_node
        other._beside = self._beside
        return other

    def reference(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        """The record of the reference in the same run, which is played once.

        Raises:
            RunnerError: the reference does not come to its end.
        """
        self._beside = self._beside or self.of(self.impl.reference_alone)
        run = self._beside.ended(scenario, **values)
        if run.outcome != "finished":
            raise RunnerError(f"the reference does not end: {run.outcome}")
        return run

    def with_seed(self, seed: int, world_size: int) -> PlayedRuns:
        """Runs with another seed, or of more ranks; if neither, with what has run."""
        other = PlayedRuns(self.cluster, self.impl, world_size, seed, self.limits)
        if (seed, world_size) == (self.seed, self.world_size):
            other.records, other._beside = dict(self.records), self._beside
        return other

    def on_one_node(self) -> PlayedRuns:
        """The same runs, with ranks whose local rank is their rank."""
        other = self.of(self.impl)
        other.ranks_per_node, other._beside = self.world_size, None
        return other

    def read(self, spec: RunSpec) -> Run:
        """The record of a run, however it ended.

        Raises:
            RunnerError: the ranks could not be started.
        """
        if spec not in self.records and spec in self._plan:
            specs, self._plan = self._plan, ()
            self._together(specs)
        if spec not in self.records:
            self.records[spec] = self._by_itself(spec)
        return self.records[spec]

    def printed(self) -> str:
        """What the ranks of the latest run printed; a program may print as it likes."""
        runs = [run for spec, run in self.records.items() if not spec.launches]
        return printed(runs[-1]) if runs else ""

    def _together(self, specs: tuple[RunSpec, ...]) -> None:
        told: list[list[Any]] = [[] for _ in range(self.world_size)]
        run = self.on_ranks(perform, specs, told)
        if len(specs) == 1 or not is_past_first(told):
            self.records[specs[0]] = run
            return
        parts = taken_apart(run, told, len(specs))
        self.records.update(zip(specs, parts, strict=False))
        self.shared = frozenset(specs[: len(parts)])

    def _by_itself(self, spec: RunSpec) -> Run:
        if spec.is_on_ranks:
            return self.on_ranks(perform, (spec,))
        return self._launched(spec) if spec.launches else self._simulated(spec)

    def on_ranks(
        self,
        program: Callable[..., Any],
        specs: tuple[RunSpec, ...],
        told: list[list[Any]] | None = None,
        *,
        times: int = 1,
    ) -> Run:
        """Run `perform`, or what takes the same arguments, with `times` the limit.

        What rank r reports is appended to `told[r]`.

        Raises:
            RunnerError: the ranks could not be started.
        """
        return self.cluster.run(
            program,
            self.world_size,
            *code_of(self.impl),
            [[spec.name, self._values(spec)] for spec in specs],
            off_limits(self.impl),
            limits=replace(self.limits, seconds=times * self.limits.seconds),
            on_report=None if told is None else lambda r, value: told[r].append(value),
            seed=self.seed,
            backend=transport(self.world_size),
            ranks_per_node=self.ranks_per_node,
        )

    def _simulated(self, spec: RunSpec) -> Run:
        assert spec.network is not None
        return self.cluster.run(
            play_in_virtual_time,
            1,
            *code_of(self.impl),
            spec.name,
            self._values(spec),
            settings_of(spec.network, self.seed),
            off_limits(self.impl),
            limits=self.limits,
            seed=self.seed,
            journal=False,
        )

    def _launched(self, spec: RunSpec) -> Run:
        return self.cluster.run(
            launch,
            1,
            spec.name,
            self.impl.source.path.name,
            self.impl.source.text,
            dict(spec.values),
            limits=self.limits,
            seed=self.seed,
            journal=False,
        )

    def _values(self, spec: RunSpec) -> dict[str, Any]:
        return {"seed": self.seed, **dict(spec.values)}


def perform(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    plays: list[tuple[str, dict[str, Any]]],
    off_limits: dict[str, list[str]],
) -> Any:
    """In each rank: load the unit, hand it its communicator, play the scenarios."""
    context, texts = prepared(context, source, reference, off_limits)

    def play(name: str, values: dict[str, Any]) -> Any:
        return resolve(name)(context, load_graft(*texts, grafts), **values)

    if len(plays) == 1:
        return play(*plays[0])
    return play_all(context, play, plays)


def launch(
    context: RankContext, scenario: str, name: str, text: str, values: dict[str, Any]
) -> Any:
    """In a process of its own: a scenario that starts the file as a program."""
    return resolve(scenario)(context, name, text, **values)


def prepared(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    off_limits: dict[str, list[str]],
) -> tuple[RankContext, tuple[UnitSource, UnitSource]]:
    """In each rank: the guard stands, and the communicator is the unit's own."""
    install(**off_limits, doors=doors_of(context))
    return with_own_comm(context, source["builds"]), (
        received(source),
        received(reference),
    )


def transport(world_size: int) -> str:
    """Two ranks meet on gloo, as real jobs do; more of them on our own sockets.

    The verdicts are the same (see `distlab bench sim`), but on two cores a small
    collective of four ranks takes gloo's threads about ten times as long.
    """
    return "gloo" if world_size <= 2 else "tcp"


def off_limits(impl: Implementation) -> dict[str, list[str]]:
    """The folders that are not the submission's to change, and not to look into."""
    # A course may lie apart from the distlab that judges it: both are kept.
    roots = {impl.reference.path.parents[2], installed_course()}
    kept = {*roots, Path(__file__).parents[1], impl.source.path}
    course = [str(path) for path in sorted(kept)]
    secrets = [str(root / name) for root in sorted(roots) for name in _SECRETS]
    return resolved(course, secrets)


def code_of(impl: Implementation) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """What travels to the ranks: the source, and the reference where it is needed."""
    return sent(impl.source), needed_reference(impl), list(impl.grafts)


def needed_reference(impl: Implementation) -> dict[str, str]:
    """What travels of the reference: no text that is not needed, lest it be read."""
    reference = impl.reference
    return sent(reference if impl.grafts else replace(reference, text=""))
