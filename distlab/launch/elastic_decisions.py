"""Let the learner's or the reference's elastic.resize decide under --elastic.

Processes become members, and the Membership's answers become the agent's actions. We
decide here how many processes there are: MAX at first, and then a new one for each that
ends, as long as max_restarts allows it. If you write a number from MIN to MAX into
LOG_DIR/ranks, you change the size while the job runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

from distlab.comm.services import Tick, WakeAt
from distlab.given import elastic as given
from distlab.given.process_group import SIGKILL, Begin, Finish, Interrupted
from distlab.given.recovery import Ended, Frozen, Ready, Signal, Start, exit_code_of
from distlab.launch.config import LaunchConfig
from distlab.launch.decisions import UnitDecisions

UNIT = "elastic"
RESIZE = f"{UNIT}.resize"
RANKS = "ranks"  # the file that sets another size


@dataclass(frozen=True)
class Waits:
    """Event: this process has left its group, with the state of this step."""

    process: int
    step: int


@dataclass(frozen=True)
class Ask:
    """Action: tell these processes to leave their group, now or after their step."""

    processes: tuple[int, ...]
    now: bool


@dataclass(frozen=True)
class ElasticForm:
    """Action: form a group of any size, whose ranks all take the state of `source`."""

    generation: int
    members: dict[int, int]  # rank → process
    source: int  # a rank
    grad_accum_steps: int


@dataclass(frozen=True)
class Say:
    """Action: tell the user."""

    text: str


def forget_resize(folder: Path) -> None:
    """Remove the file that sets another size, because an earlier job left it."""
    with contextlib.suppress(OSError):
        (folder / RANKS).unlink(missing_ok=True)


class ElasticDecisions(UnitDecisions):
    """Decides with the unit elastic, and controls the number of processes."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__(UNIT, RESIZE)
        self._config = config
        self._least, self._most = config.sizes
        self._membership = self._new_membership()
        self._generations_before = 0  # those of earlier Memberships
        self._wanted = self._room = self._most
        self._num_started = self._num_restarts = 0
        self._alive: set[int] = set()
        self._ready: set[int] = set()  # of those alive, with no group yet
        self._members: dict[int, int] = {}  # rank → process
        self._generation = 0
        self._first_code = 0
        self._is_stopping, self._is_ended_by_us = False, set[int]()
        self._kill_at_s: float | None = None

    @property
    def own(self) -> list[str]:
        """Return the tasks that run the learner's code."""
        return [RESIZE] if self.whose(RESIZE) == "yours" else []

    def on(self, event: object, now_s: float) -> Sequence[Any]:
        """Decide what to do about an event.

        Raises:
            DecisionError: the learner's code has a mistake.
        """
        if isinstance(event, Ended):
            return self._ended(event, now_s)
        if isinstance(event, Interrupted):
            return self._stop(128 + event.signal, now_s)
        if isinstance(event, Tick) and self._is_due(now_s):
            return [Signal(process, SIGKILL) for process in sorted(self._alive)]
        if self._is_stopping:
            return []
        match event:
            case Begin():
                return self._start(self._num_missing)
            case Ready(process):
                self._ready.add(process)
                return self._tell(given.Join(str(process), 0), now_s)
            case Waits(process, step):
                return self._tell(self._join(process, step), now_s)
            case Frozen(process, generation) if generation == self._generation:
                return [Signal(process, SIGKILL)]
            case Tick():
                return self._tell(event, now_s)
        return []

    def resize(self, room: int | None = None) -> list[Any]:
        """Return the actions for the size in the file LOG_DIR/ranks, if any.

        `room` is the number of processes that the nodes have room for. If a node has
        come, it gets processes.
        """
        has_grown = room is not None and room > self._room
        self._room = self._room if room is None else room
        wanted = self._wanted_by_file()
        if not self._num_started or self._is_stopping:
            return []
        if wanted == self._wanted:
            return self._start(self._num_missing) if has_grown else []
        before, self._wanted = self._wanted, wanted
        what = "1 rank is" if wanted == 1 else f"{wanted} ranks are"
        said = [Say(f"{what} wanted; before it was {before}")]
        if wanted > len(self._alive):
            return [*said, *self._start(self._num_missing)]
        rank_of = {process: rank for rank, process in self._members.items()}
        by_rank = sorted(self._alive, key=lambda p: rank_of.get(p, self._most + p))
        leaving = by_rank[wanted:]
        self._is_ended_by_us |= set(leaving)
        # No step is lost by it: the others have copies of what only these ranks have.
        return [*said, *(Signal(process, SIGKILL) for process in leaving)]

    def _wanted_by_file(self) -> int:
        try:
            wanted = int((Path(self._config.log_dir or ".") / RANKS).read_text())
        except (OSError, ValueError):
            return self._wanted
        return wanted if self._least <= wanted <= self._most else self._wanted

    @property
    def _num_missing(self) -> int:
        return max(0, min(self._wanted, self._room) - len(self._alive))

    def _join(self, process: int, step: int) -> given.Join:
        is_member = process in self._members.values()
        generation = self._generation - self._generations_before
        return given.Join(str(process), step, generation if is_member else 0)

    def _start(self, num: int) -> list[Any]:
        new = range(self._num_started, self._num_started + num)
        self._num_started += num
        self._alive |= set(new)
        return [Start(process) for process in new]

    def _ended(self, event: Ended, now_s: float) -> list[Any]:
        process, code = event.process, event.code
        self._alive.discard(process)
        self._ready.discard(process)
        is_ours = process in self._is_ended_by_us
        if code and not is_ours and not self._is_stopping:
            self._first_code = self._first_code or exit_code_of(code)
        if self._is_stopping:
            return [] if self._alive else [Finish(self._first_code)]
        if not code and not is_ours:  # all ranks have completed the last step
            is_over = self._alive.isdisjoint(self._members.values())
            return self._stop(0, now_s) if is_over else []
        has_lost_all = self._has_lost_all
        actions = self._replace() + self._tell(given.Lost(str(process)), now_s)
        if has_lost_all:
            actions += self._begin_anew(now_s)
        if len(self._alive) < self._least:
            actions += self._stop(self._first_code or 1, now_s)
        return actions

    @property
    def _has_lost_all(self) -> bool:
        """Return True if no process has the state, so a checkpoint must supply it."""
        members = self._members.values()
        return bool(members) and self._alive.isdisjoint(members)

    def _begin_anew(self, now_s: float) -> list[Any]:
        # They all ran here and have ended: no part of the job can go on elsewhere.
        # A Membership, which may be on one side of a cut link, cannot know that.
        self._membership = self._new_membership()
        self._generations_before, self._members = self._generation, {}
        actions: list[Any] = []
        for process in sorted(self._ready):
            actions += self._tell(given.Join(str(process), 0), now_s)
        return actions

    def _new_membership(self) -> Any:
        config = self._config
        batch = config.global_batch_size or self._most
        return self._guarded(
            RESIZE,
            lambda: self.module.Membership(
                self._least,
                self._most,
                global_batch_size=batch,
                microbatch_size=config.microbatch_size or batch,
                grace_s=config.join_grace,
            ),
        )

    def _replace(self) -> list[Any]:
        left = self._config.max_restarts - self._num_restarts
        num = max(0, min(self._num_missing, left))
        self._num_restarts += num
        return self._start(num)

    def _stop(self, code: int, now_s: float) -> list[Any]:
        if self._is_stopping:
            return []
        self._is_stopping, self._first_code = True, code
        if not self._alive:
            return [Finish(code)]
        self._kill_at_s = now_s + self._config.grace_period
        signals = [Signal(process, SIGTERM) for process in sorted(self._alive)]
        return [*signals, WakeAt(self._kill_at_s)]

    def _is_due(self, now_s: float) -> bool:
        return self._kill_at_s is not None and now_s >= self._kill_at_s

    # ── the Membership's actions as the agent's ─────────────────────────────────────

    def _tell(self, event: given.Event, now_s: float) -> list[Any]:
        actions = self._guarded(RESIZE, lambda: self._membership.on(event, now_s))
        if not isinstance(actions, Sequence) or isinstance(actions, str):
            raise self.wrong(RESIZE, f"on() returned {actions!r}, must be a list")
        found: list[Any] = []
        for action in actions:
            found += self._as_ours(action, isinstance(event, given.Lost), now_s)
        return found

    def _as_ours(self, action: object, is_lost: bool, now_s: float) -> list[Any]:
        match action:
            case given.Regroup(members):
                return [Ask(tuple(int(member) for member in members), now=is_lost)]
            case given.Form(own_generation, members, source, num_steps):
                generation = self._generations_before + own_generation
                self._generation = generation
                self._members = {rank: int(member) for rank, member in members.items()}
                self._ready -= set(self._members.values())
                ranks = {member: rank for rank, member in members.items()}
                said = f"generation {generation}: {len(members)} ranks"
                form = ElasticForm(
                    generation, dict(self._members), ranks[source], num_steps
                )
                return [Say(said), form]
            case given.Refuse(member, reason):
                self._is_ended_by_us.add(int(member))
                return [
                    Say(f"process {member} is not taken: {reason}"),
                    Signal(int(member), SIGKILL),
                ]
            case given.Stop(reason):
                return [Say(reason), *self._stop(self._first_code or 1, now_s)]
            case WakeAt():
                return [] if self._kill_at_s is not None else [action]
        raise self.wrong(RESIZE, f"on() returned the action {action!r}")
