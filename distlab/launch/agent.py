"""Replace ranks that die while the others stay: the agent of --standby and --elastic.

    processes ── ready, joined, formed ──▶ agent ──▶ detect ──▶ Supervisor
    processes ◀── regroup, go, signals ─── agent ◀── Start, Signal, Form, Finish

The agent keeps the store, the generation and the budget, and isn't a rank. On several
nodes, only node 0 has one, and `hosts` takes its orders to the other nodes. It carries
out a Form in two halves. First, the processes leave their group and join a round. Once
all have joined, the agent tells them to go, and what each of them holds. That way, no
process waits for one that has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.comm.services import Tick, WakeAt
from distlab.given.process_group import Begin, Finish, Interrupted
from distlab.given.recovery import (
    NEWEST,
    Completed,
    Condition,
    Ended,
    Form,
    Frozen,
    Ready,
    Report,
    Signal,
    Start,
    Step,
    exit_code_of,
)
from distlab.launch.elastic_decisions import Ask, ElasticForm, Say, Waits
from distlab.launch.forked import Heard
from distlab.launch.host import LOOK_S, NO_LOOK, Look, Looked
from distlab.launch.hosts import Hosts
from distlab.launch.inbox import Inbox
from distlab.launch.logs import Terminal
from distlab.launch.nodes import NodeCame, NodeLost, Said
from distlab.launch.records import write_error_file
from distlab.launch.report import (
    PREFIX,
    USAGE_ERROR,
    Failure,
    Gone,
    gave_up,
    interrupted,
    recovered,
)

STALE_S = 1.0  # a look that is older says nothing about a process
SPARES_WAIT_S = 30.0  # for the others, which the first group should consist of
FORMING_S = 30.0  # from go to the last formed: longer, and a process hangs
TIMES = "recoveries.jsonl"

On = Callable[[Any, float], Sequence[Any]]
Detect = Callable[[list[Report], float], Condition]


@dataclass
class Process:
    """The agent's knowledge about a process."""

    look: Look = NO_LOOK
    look_s: float = 0.0  # when it came
    steps: list[Step] = field(default_factory=list)
    rank: int | None = None
    must_end: bool = False  # it was sent SIGTERM: its end is no failure


@dataclass
class Round:
    """A group while it is forming."""

    number: int = 0
    generation: int = 0
    members: dict[int, int] = field(default_factory=dict)  # rank → process
    joined: dict[int, dict[str, Any]] = field(default_factory=dict)  # by process
    formed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # they wait for another round
    done: set[int] = field(default_factory=set)
    has_gone: bool = False
    gone_s: float = math.inf
    source: int | None = None  # the rank whose state all take, if it is decided
    grad_accum_steps: int = 1

    @property
    def is_forming(self) -> bool:
        """Return True while some members don't train yet."""
        return len(self.formed) < len(self.members)

    @property
    def is_over(self) -> bool:
        """Return True once all members have completed the last step."""
        return bool(self.members) and len(self.done) == len(self.members)


class Agent:
    """Drives a Supervisor or a Membership with the processes of all nodes."""

    def __init__(
        self,
        *,
        on: On,
        detect: Detect,
        resize: Callable[[int], list[Any]],
        hosts: Hosts,
        folder: Path,
        forwarded: frozenset[int] = frozenset(),
        terminal: Terminal,
        inbox: Inbox,
        say: Callable[[str], None],
    ) -> None:
        self._on, self._detect, self._resize = on, detect, resize
        self._hosts, self._folder, self._terminal = hosts, folder, terminal
        self._inbox, self._say, self._forwarded = inbox, say, forwarded
        self._processes: dict[int, Process] = {}
        self._round = Round()
        self._num_rounds = 0
        self._completed = -1
        self._failure: Failure | None = None  # the newest
        self._told: Failure | None = None  # the newest after which all went on
        self._stopped_by = self._code = self._usage_error = 0
        self._wake_at_s, self._look_at_s = math.inf, 0.0
        self._spares_at_s = 0.0  # from then on, a spare may become a rank
        self._early: list[int] = []  # spares that were ready before that
        self._times: list[dict[str, Any]] = []

    def run(self) -> int:
        """Run until all processes have ended for good; return the exit code."""
        if not self._hosts.begin():
            return self._finish_early()
        self._spares_at_s = time.monotonic() + SPARES_WAIT_S
        events: list[object] = [Begin()]
        while True:
            for action in self._resize(self._hosts.room):
                self._do(action)
            for event in events:
                for action in self._on(event, time.monotonic()):
                    if isinstance(action, Finish):
                        return self._finish(action.exit_code or self._code)
                    self._do(action)
            events = self._wait()

    # ── what happens ────────────────────────────────────────────────────────────────

    def _wait(self) -> list[object]:
        now_s = time.monotonic()
        limit_s = min(self._wake_at_s, self._look_at_s) - now_s
        readable = self._inbox.wait_beside(self._hosts.sockets, limit_s)
        events: list[object] = []
        for event in (*self._inbox.take(), *self._hosts.take(readable)):
            events += self._happened(event)
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for event in self._hosts.look():
                events += self._happened(event)
            events += self._look(now_s)
        if now_s >= self._wake_at_s:
            self._wake_at_s = math.inf
            events.append(Tick())
        return events

    def _happened(self, event: object) -> list[object]:
        """Return the events for the Supervisor that follow from this one."""
        match event:
            case Said():
                return self._happened(self._hosts.heard(event))
            case Exception():
                raise event
            case Heard():
                return self._heard(event)
            case Looked(looks):
                self._note_looks(looks)
            case Gone():
                return self._ended(event)
            case NodeLost():
                return self._lost(event)
            case NodeCame(node) if self._hosts.came(event):
                self._say(f"{PREFIX} node {node} takes part from now on\n")
            case Interrupted(number):
                self._interrupted(number)
                return [event]
        return []

    def _note_looks(self, looks: Mapping[int, Look]) -> None:
        for number in looks.keys() & self._processes.keys():
            self._processes[number].look = looks[number]
            self._processes[number].look_s = time.monotonic()

    def _interrupted(self, number: int) -> None:
        self._stopped_by = self._stopped_by or number
        if self._inbox.num_interrupts > 1:  # impatient: no grace
            for process in self._processes:
                self._hosts.signal(process, signal.SIGKILL)

    def _lost(self, event: NodeLost) -> list[object]:
        gone = self._hosts.lost(event)
        if gone:
            text = f"node {event.node} is gone, and its processes with it"
            self._say(f"{PREFIX} {text}\n")
        # Those without a rank first, so that none of them takes that of another.
        gone.sort(key=lambda one: self._processes[one.number].rank is not None)
        return [event for one in gone for event in self._ended(one)]

    def _heard(self, heard: Heard) -> list[object]:
        words, number, group = heard.words, heard.number, self._round
        if "ready" in words:
            self._early.append(number)
            return self._ready(time.monotonic())
        if words.get("joined") == group.number and number in group.members.values():
            group.joined[number] = words
            self._go_if_all_joined()
        elif words.get("joined") == self._num_rounds:
            return [Waits(number, words["step"])]
        if words.get("formed") == group.number:
            group.formed.add(number)
        if words.get("failed") == group.number:
            group.failed.add(number)
        if words.get("done") == group.number:
            group.done.add(number)
            if group.is_over:
                for member in group.members.values():
                    self._hosts.tell(member, over=group.number)
        if "times" in words:
            self._note_times(words)
        return []

    def _ready(self, now_s: float) -> list[object]:
        """Report processes that are ready, but hold back spares at the beginning.

        Otherwise the first group would depend on which node starts faster.
        """
        held = self._hosts.spares if now_s < self._spares_at_s else set()
        ready = [number for number in self._early if number not in held]
        self._early = [number for number in self._early if number in held]
        return [Ready(number) for number in ready]

    def _ended(self, exited: Gone) -> list[object]:
        if exited.number not in self._processes:
            return []
        self._spares_at_s = 0.0
        events = self._note_steps()
        process = self._processes.pop(exited.number)
        if self._is_failure(process, exited):
            self._note_failure(process, exited)
        if exited.code == USAGE_ERROR and process.rank is None and not process.must_end:
            # The next process would end in the same way.
            self._usage_error = USAGE_ERROR
            return [
                *events,
                Ended(exited.number, exited.code),
                Interrupted(signal.SIGTERM),
            ]
        if self._round.is_over and exited.number in self._round.members.values():
            # There is no step left: what went wrong is the code of the job.
            self._code = self._code or exit_code_of(exited.code)
            return [*events, Ended(exited.number, 0)]
        return [*events, Ended(exited.number, exited.code)]

    def _look(self, now_s: float) -> list[object]:
        events = [*self._ready(now_s), *self._note_steps()]
        group = self._round
        if group.has_gone and group.is_forming and now_s > group.gone_s + FORMING_S:
            late = set(group.members.values()) - group.formed
            numbers = sorted(late - group.failed or late)
            return [*events, *(Frozen(number, group.generation) for number in numbers)]
        reports = []
        for rank, number in group.members.items():
            process = self._processes.get(number)
            if process is None or now_s > process.look_s + STALE_S:
                continue  # of a node that is silent we know nothing
            if number not in group.done:
                reports.append(_report(rank, process))
        frozen = self._detect(reports, now_s).frozen
        return [*events, *(Frozen(group.members[r], group.generation) for r in frozen)]

    def _note_steps(self) -> list[object]:
        """Read the pages; return a Completed if all ranks have completed a new step."""
        newest = []
        for number in self._round.members.values():
            process = self._processes.get(number)
            if process is None:
                return []
            step, step_s = process.look.step, process.look.step_s
            if step >= 0 and (not process.steps or step > process.steps[-1].number):
                process.steps[:] = [*process.steps[1 - NEWEST :], Step(step, step_s)]
            newest.append(step)
        if not newest or min(newest) <= self._completed or self._round.is_forming:
            return []
        self._completed = min(newest)
        return [Completed(self._completed, self._round.generation)]

    # ── what is done ────────────────────────────────────────────────────────────────

    def _do(self, action: object) -> None:
        match action:
            case Start(number):
                self._processes[number] = Process()
                self._hosts.start(number)
            case Signal(number, which):
                self._signal(number, which)
            case Form(generation, members):
                self._form(Round(generation=generation, members=members))
            case ElasticForm(generation, members, source, num_steps):
                self._form(
                    Round(
                        generation=generation,
                        members=members,
                        source=source,
                        grad_accum_steps=num_steps,
                    )
                )
            case Ask(processes, now):
                self._num_rounds += 1
                for number in processes:
                    self._hosts.tell(number, regroup=self._num_rounds, now=now)
            case Say(text):
                self._say(f"{PREFIX} {text}\n")
            case WakeAt(at_s):
                self._wake_at_s = at_s
            case _:
                raise TypeError(f"{action!r} is no action of a Supervisor")

    def _signal(self, number: int, which: int) -> None:
        if which == signal.SIGTERM and number in self._processes:
            self._processes[number].must_end = True
            if self._stopped_by in self._forwarded:
                which = self._stopped_by
        self._hosts.signal(number, which)

    def _form(self, group: Round) -> None:
        self._num_rounds += 1
        group.number, self._round = self._num_rounds, group
        self._spares_at_s = 0.0
        for number in group.members.values():
            self._hosts.tell(number, regroup=group.number, now=True)

    def _go_if_all_joined(self) -> None:
        group = self._round
        members = set(group.members.values())
        # One of them may have ended meanwhile: then there will be another round.
        if (
            group.has_gone
            or not members <= group.joined.keys() & self._processes.keys()
        ):
            return
        group.has_gone, group.gone_s = True, time.monotonic()
        ranks = sorted(group.members)
        reports = [{"holds": group.joined[group.members[r]]["holds"]} for r in ranks]
        places = self._hosts.places(group.members)
        for rank in ranks:
            number = group.members[rank]
            self._processes[number].rank = rank
            self._hosts.tell(
                number,
                go=group.number,
                generation=group.generation,
                rank=rank,
                source=group.source,
                reports=reports,
                grad_accum_steps=group.grad_accum_steps,
                **places[rank],
            )

    # ── what is said ────────────────────────────────────────────────────────────────

    def _is_failure(self, process: Process, exited: Gone) -> bool:
        if process.must_end or self._stopped_by:
            return False
        # A script that joins no group may end with 0 on all of its processes.
        has_joined_none = process.rank is None and self._failure is None
        return exited.code != 0 or has_joined_none

    def _note_failure(self, process: Process, exited: Gone) -> None:
        self._failure = Failure.of(
            exited,
            rank=-1 if process.rank is None else process.rank,
            generation=self._round.generation,
            ended_s=time.monotonic(),
        )

    def _note_times(self, words: dict[str, Any]) -> None:
        """Report how long all ranks took to complete a first step of a new group."""
        group, times = self._round, words["times"]
        if times.get("generation") != group.generation or group.generation == 1:
            return
        self._times = [t for t in self._times if t["generation"] == group.generation]
        self._times.append(times)
        failure = self._failure
        if len(self._times) < len(group.members) or failure is None:
            return
        if failure.generation >= group.generation or self._told == failure:
            return  # the group has changed, and none has failed
        self._told = failure
        stages = ("lost_s", "joined_s", "formed_s", "restored_s", "completed_s")
        last = {s: max(t.get(s, -1.0) for t in self._times) for s in stages}
        row = {
            "generation": group.generation,
            "rank": failure.rank,
            "code": failure.code,
            "step": words["step"],
            "ended_s": failure.ended_s,
            **last,
        }
        times_file = self._folder / TIMES
        with (
            contextlib.suppress(OSError),
            open(times_file, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(row) + "\n")  # a full disk ends no training
        seconds = row["completed_s"] - row["ended_s"]
        self._say(recovered(failure, len(group.members), words["step"], seconds))

    def _finish(self, code: int) -> int:
        if code:
            self._terminal.hurry()
        self._terminal.catch_up()
        text = ""
        if self._usage_error and not self._stopped_by:
            code = self._usage_error
        if self._stopped_by:
            text = interrupted(self._stopped_by, code)
        elif code:
            text = gave_up(self._failure, code, self._round.generation)
            if self._failure is not None:
                write_error_file(self._failure.record, self._failure.what, code)
        if text:
            self._say(text)
        self._hosts.finish(code, text)
        return code

    def _finish_early(self) -> int:
        """End before there are any processes, because of a signal."""
        for event in self._inbox.take():
            self._happened(event)
        return self._finish(128 + (self._stopped_by or signal.SIGTERM))


def _report(rank: int, process: Process) -> Report:
    look = process.look
    return Report(
        rank=rank,
        steps=tuple(process.steps),
        doing=look.doing,
        since_s=look.since_s,
        beat_s=look.beat_s,
    )
