"""What a clause asks to be run, and the records of it that its judge reads.

    @clause("ring_allreduce.all_reduce", "C1", worlds=(3, 2), runs=[on_ranks(sum_once)])
    def the_sum_everywhere(runs: Runs) -> str | None:
        run = runs.finished(sum_once)

The judge has no cluster in its hands. Where a record comes from is the harness's
business: from ranks that run now, from the simulator's kernel, from a file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distlab.curriculum import UnitSource
from distlab.grading.diagnosis import diagnose, diagnose_finished, only_messages
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.rank import name_of

Scenario = Callable[..., Any]
"""A function `(context, unit, **values) -> record` that runs on every rank."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The simulated network of a run in virtual time; messages have no latency.

    Without `bytes_per_s` they take no time at all, and without `added_bytes_per_s`
    neither does what the ranks compute: see `distlab.sim.calibration.charge`.
    """

    world_size: int
    bytes_per_s: float = math.inf
    added_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class RunSpec:
    """One run that a clause asks for: a scenario, its values, and where it runs."""

    scenario: Scenario
    values: tuple[tuple[str, Any], ...] = ()
    network: Network | None = None  # virtual time; None: on ranks of its world size
    launches: bool = False  # the scenario starts the file as a program; see `launched`
    situation: str = field(default="", compare=False)  # said first if it fails

    def when(self, situation: str) -> RunSpec:
        """Name what is special about this run, as in "with an empty tensor".

        A run that doesn't finish, because of an error or a deadlock, would not say it.
        """
        return replace(self, situation=situation)

    @property
    def is_on_ranks(self) -> bool:
        """Whether it plays on real ranks that have the unit in their hands."""
        return not (self.network or self.launches)

    @property
    def name(self) -> str:
        """How a rank finds the scenario."""
        return name_of(self.scenario)

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values)
        return f"{self.name}({values})" + (f" on {self.network}" * bool(self.network))


def on_ranks(scenario: Scenario, **values: Any) -> RunSpec:
    """A run on real ranks; the same values in another order are the same run."""
    return RunSpec(scenario, tuple(sorted(values.items())))


def launched(scenario: Scenario, **values: Any) -> RunSpec:
    """A run of the file as the program that it is, in processes that nothing guards.

    The scenario is called once, as `(context, file_name, text, **values)`.
    """
    return replace(on_ranks(scenario, **values), launches=True)


def in_virtual_time(
    scenario: Scenario,
    world_size: int,
    *,
    bytes_per_s: float = math.inf,
    added_bytes_per_s: float = math.inf,
    **values: Any,
) -> RunSpec:
    """A run on simulated ranks; see Network."""
    network = Network(
        world_size=world_size,
        bytes_per_s=bytes_per_s,
        added_bytes_per_s=added_bytes_per_s,
    )
    return replace(on_ranks(scenario, **values), network=network)


def in_rounds(
    scenario: Scenario, world_size: int, num_bytes: int, **values: Any
) -> RunSpec:
    """A run in virtual time whose `time_s` counts messages of `num_bytes`.

    On a network where a message takes one second, and a rank's messages in one
    direction take turns, the virtual time of a run is the length of its longest chain
    of messages.
    """
    speed = float(num_bytes)
    return in_virtual_time(scenario, world_size, bytes_per_s=speed, **values)


def _spec(scenario: Scenario | RunSpec, values: dict[str, Any]) -> RunSpec:
    if isinstance(scenario, RunSpec):
        return scenario
    return on_ranks(scenario, **values)


class UndeclaredRunError(LookupError):
    """A judge read a run that its clause does not declare: a mistake of the course."""


class MissingRunError(LookupError):
    """A judge read a run that was not recorded."""


class Runs(ABC):
    """The records of a task's runs at one world size; a judge reads those it declared.

    Any two reads of the same run give the same record.
    """

    def __init__(self, source: UnitSource, world_size: int, seed: int) -> None:
        self.source = source
        self.world_size = world_size
        self.seed = seed
        self.declared: frozenset[RunSpec] | None = None  # None: anything may be read
        self.reads: dict[RunSpec, Run] = {}  # by a judge, the latest at the end

    @abstractmethod
    def read(self, spec: RunSpec) -> Run:
        """The record of a run, however it ended."""

    @property
    def latest(self) -> tuple[RunSpec, Run] | None:
        """What a judge read last."""
        return next(reversed(self.reads.items()), None)

    def finished(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        """The record of a run on ranks that came to its end.

        Raises:
            NotYetError: it did not; with the diagnosis of how it ended.
        """
        spec = _spec(scenario, values)
        run = self._declared(spec)
        try:
            if run.outcome != "finished":
                raise diagnose(run)
            diagnose_finished(run)
            if self.source.builds:
                only_messages(run)
        except NotYetError as failure:
            raise failure.but(situation=self._situation(spec)) from None
        return run

    def ended(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        """The record of a run on ranks, however it ended."""
        return self._declared(_spec(scenario, values))

    def reference(self, scenario: Scenario | RunSpec, **values: Any) -> Run:
        """The record of the reference in the same run on ranks.

        Raises:
            MissingRunError: these are records of one implementation only.
        """
        raise MissingRunError("the reference did not run beside these records")

    def simulated(self, spec: RunSpec) -> dict[str, Any]:
        """`time_s` of a run `in_virtual_time`, and the `values` of its ranks.

        Raises:
            NotYetError: the simulated ranks did not come to their end.
        """
        assert spec.network is not None
        run = self._declared(spec)
        if run.outcome != "finished":
            raise diagnose(run).but(situation=self._situation(spec))
        told: dict[str, Any] = run.values[0]
        if told["outcome"] != "finished":
            n = spec.network.world_size
            raise NotYetError(
                f"on {n} simulated ranks: {told['explanation']}",
                kind="DEADLOCK",
                run=run,
                situation=self._situation(spec),
            )
        return told

    def _situation(self, spec: RunSpec) -> str:
        """What was said of the run where it was declared."""
        declared = [each for each in self.declared or () if each == spec]
        return next((each.situation for each in declared), spec.situation)

    def _declared(self, spec: RunSpec) -> Run:
        if self.declared is not None and spec not in self.declared:
            raise UndeclaredRunError(f"no clause of this task declares {spec}")
        run = self.read(spec)
        self.reads.pop(spec, None)
        self.reads[spec] = run
        return run


class RecordedRuns(Runs):
    """Records that are there already: judged again, without ranks."""

    def __init__(
        self, source: UnitSource, world_size: int, seed: int, records: Records
    ) -> None:
        super().__init__(source, world_size, seed)
        self._records = records

    def read(self, spec: RunSpec) -> Run:
        """The record.

        Raises:
            MissingRunError: there is none.
        """
        try:
            return self._records[spec]
        except KeyError:
            raise MissingRunError(f"there is no record of {spec}") from None


Records = dict[RunSpec, Run]

Plan = Callable[[int], Sequence[RunSpec]]
"""By world size: the runs of a clause."""
