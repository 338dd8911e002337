"""Let the learner's or the reference's process_group.launch decide.

Choose with `distlab use mine process_group.launch` or `distlab use reference
process_group.launch`. If that code raises an error, we turn it into one line that names
the task, whose code it is, and the place.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from distlab.comm.services import WakeAt
from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import Choice, chosen_unit
from distlab.given.process_group import Action, Event, Finish, Signal, Start
from distlab.launch.config import LaunchConfig
from distlab.paths import shown

UNIT = "process_group"
LAUNCH, RENDEZVOUS = f"{UNIT}.launch", f"{UNIT}.rendezvous"


class DecisionError(Exception):
    """Raised if the code that decides has a mistake; one line tells its author."""


class UnitDecisions:
    """A unit with the code that `distlab use` has chosen for it."""

    def __init__(self, unit: str, task: str) -> None:
        """Load the unit.

        Raises:
            SourceError: you ask for the learner's file, but it isn't valid Python.
            DecisionError: the code can't be executed; the message names `task`.
        """
        self.choice: Choice = chosen_unit(load_curriculum(), unit)
        self.module: ModuleType = self._guarded(task, self.choice.load)

    def whose(self, task: str) -> str:
        """Return `yours` or `the reference's`."""
        part = next(part for part in self.choice.parts if part.task == task)
        return "yours" if part.whose == "mine" else "the reference's"

    def wrong(self, task: str, what: str) -> DecisionError:
        """Create an error about `task` that says how to get past it."""
        past = f"; past it: distlab use reference {task}"
        is_ours = self.whose(task) != "yours"
        return DecisionError(
            f"{task} ({self.whose(task)}): {what}" + past * (not is_ours)
        )

    def _guarded(self, task: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DecisionError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            file = str(self.choice.source.path)
            lines = [f.lineno for f in frames if f.filename == file]
            place = f"{shown(Path(file))}:{lines[-1]}: " if lines else ""
            said = f"{type(error).__name__}: {error}"
            raise self.wrong(task, f"{place}{said}") from error


class Decisions(UnitDecisions):
    """Decides with the unit process_group."""

    def __init__(self) -> None:
        super().__init__(UNIT, LAUNCH)

    def launcher(self, config: LaunchConfig) -> Callable[[Event, float], list[Action]]:
        """Return a launcher's `on`, whose mistakes become DecisionErrors."""
        made = self._guarded(
            LAUNCH,
            lambda: self.module.Launcher(
                config.world_size,
                max_restarts=config.max_restarts,
                grace_s=config.grace_period,
            ),
        )

        def on(event: Event, now_s: float) -> list[Action]:
            actions = self._guarded(LAUNCH, lambda: made.on(event, now_s))
            return self._expect_actions(actions, config.world_size)

        return on

    def rendezvous(self, num_agents: int) -> Callable[[int, bytes], bytes | None]:
        """Return a rendezvous' `handle`, whose mistakes become DecisionErrors."""
        made = self._guarded(RENDEZVOUS, lambda: self.module.Rendezvous(num_agents))

        def handle(peer: int, message: bytes) -> bytes | None:
            reply: bytes | None = self._guarded(
                RENDEZVOUS, lambda: made.handle(peer, message)
            )
            return reply

        return handle

    def _expect_actions(self, actions: object, world_size: int) -> list[Action]:
        if not isinstance(actions, Sequence) or isinstance(actions, str):
            raise self.wrong(LAUNCH, f"on() returned {actions!r}, must be a list")
        ranks = range(world_size)
        for action in actions:
            if not isinstance(action, Start | Signal | WakeAt | Finish):
                raise self.wrong(LAUNCH, f"on() returned the action {action!r}")
            if isinstance(action, Start | Signal) and action.rank not in ranks:
                raise self.wrong(LAUNCH, f"{action}: there is no rank {action.rank}")
        return list(actions)
