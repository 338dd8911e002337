"""Let the learner's or the reference's unit recovery decide under --standby."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.comm.services import WakeAt
from distlab.given.process_group import Finish
from distlab.given.recovery import Condition, Form, Report, Signal, Start
from distlab.launch.config import LaunchConfig
from distlab.launch.decisions import UnitDecisions

UNIT = "recovery"
DETECT, SUPERVISE = f"{UNIT}.detect", f"{UNIT}.supervise"
FAILURES = 5  # in a row; a node that is lost counts once for each of its ranks
PATIENCE = 10.0  # × the usual step time, as in detect


class RecoveryDecisions(UnitDecisions):
    """Decides with the unit recovery."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__(UNIT, SUPERVISE)
        self._config = config
        num_at_once = config.nproc_per_node if config.nnodes > 1 else 1
        self._supervisor = self._guarded(
            SUPERVISE,
            lambda: self.module.Supervisor(
                config.world_size,
                config.standby or 0,
                max_restarts=config.max_restarts,
                max_failures=FAILURES * num_at_once,
                grace_s=config.grace_period,
            ),
        )

    @property
    def own(self) -> list[str]:
        """Return the tasks that run the learner's code."""
        return [task for task in (DETECT, SUPERVISE) if self.whose(task) == "yours"]

    def on(self, event: object, now_s: float) -> Sequence[Any]:
        """Ask the Supervisor what to do about an event.

        Raises:
            DecisionError: the learner's code has a mistake.
        """
        actions = self._guarded(SUPERVISE, lambda: self._supervisor.on(event, now_s))
        if not isinstance(actions, Sequence) or isinstance(actions, str):
            raise self.wrong(SUPERVISE, f"on() returned {actions!r}, must be a list")
        for action in actions:
            if not isinstance(action, Start | Signal | Form | WakeAt | Finish):
                raise self.wrong(SUPERVISE, f"on() returned the action {action!r}")
        return actions

    def detect(self, reports: list[Report], now_s: float) -> Condition:
        """Find out which ranks are dead, frozen or slow.

        On a busy machine, a process may not run for a while, however short its steps
        are. A rank therefore counts as frozen only after at least freeze_timeout.

        Raises:
            DecisionError: the learner's code has a mistake.
        """
        usual_s = self._guarded(DETECT, lambda: self.module.usual_step_s(reports))
        patience = max(PATIENCE, self._config.freeze_timeout / max(usual_s, 1e-9))
        condition: Condition = self._guarded(
            DETECT, lambda: self.module.detect(reports, now_s, patience=patience)
        )
        return condition
