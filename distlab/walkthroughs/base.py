"""Provide every walkthrough with ranks and with the code that they run.

For each task, the ranks run the learner's code if it is finished, and the reference's
otherwise. `distlab use` and DISTLAB_IMPL can change that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.curriculum.units import travelling
from distlab.grading.harness import (
    Implementation,
    PlayedRuns,
    needed_reference,
    off_limits,
    perform,
)
from distlab.ranks import new_cluster
from distlab.runner import Limits, Run
from distlab.runner.rank import name_of
from distlab.sim import AlphaBeta, SimRun, run_apart

_LIMITS = Limits(seconds=60)
_NAME = 27  # letters, at least, for the name of a task


class Ranks:
    """Warm ranks on this machine, simulated ranks, and the units of a phase."""

    def __init__(self, phase: int, preload: tuple[str, ...]) -> None:
        self._phase = phase
        self._curriculum = load_curriculum()
        self._cluster = new_cluster(preload=preload)
        self._cluster.start(wait=False)

    def close(self) -> None:
        """End all processes. You can call this twice."""
        self._cluster.close()

    def whose_code(self) -> list[str]:
        """Return a line per task that says whose code runs, with its digest."""
        units = self._curriculum.phase(self._phase).units
        choices = [chosen_unit(self._curriculum, unit.name) for unit in units]
        parts = [part for choice in choices for part in choice.parts]
        width = max(_NAME, *(len(part.task) for part in parts))
        return [part.line(width) for part in parts]

    def run(
        self, unit: str, world_size: int, scenario: Callable[..., Any], **values: Any
    ) -> Run:
        """Run `scenario` on real ranks.

        Raises:
            NotYetError: the scenario did not finish. The error has the verdict.
        """
        impl = self._implementation(unit)
        runs = PlayedRuns(self._cluster, impl, world_size, 0, _LIMITS)
        return runs.finished(scenario, **values)

    def simulate(
        self,
        unit: str,
        world_size: int,
        scenario: Callable[..., Any],
        *,
        net: AlphaBeta | None = None,
        **values: Any,
    ) -> SimRun:
        """Run `scenario` in the simulated cluster, where a hang is not an error."""
        return self._simulated(unit, world_size, scenario, values, net=net)

    def _simulated(
        self,
        unit: str,
        world_size: int,
        scenario: Callable[..., Any],
        values: dict[str, Any],
        **options: Any,
    ) -> SimRun:
        """Run `scenario` with the options of `run_apart`."""
        impl = self._implementation(unit)
        return run_apart(
            self._cluster,
            perform,
            world_size,
            travelling(impl.source),
            needed_reference(impl),
            list(impl.grafts),
            [[name_of(scenario), values]],
            off_limits(impl),
            **{"limits": _LIMITS, **options},
        )

    def _implementation(self, unit: str) -> Implementation:
        choice = chosen_unit(self._curriculum, unit)
        return Implementation(choice.source, choice.reference, choice.grafts)
