"""The agent of node 0: ask the Launcher what to do, and make all nodes do it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distlab.comm.services import Tick, WakeAt
from distlab.given.process_group import (
    Action,
    Begin,
    Ended,
    Event,
    Finish,
    Interrupted,
    Signal,
    Start,
)
from distlab.launch.config import LaunchConfig
from distlab.launch.decisions import LAUNCH, Decisions
from distlab.launch.hangs import Hangs
from distlab.launch.host import as_event
from distlab.launch.inbox import Inbox
from distlab.launch.logs import RankLog, Terminal
from distlab.launch.nodes import NodeLost, Said
from distlab.launch.ranks import Meeting, Ranks
from distlab.launch.records import timestamp, write_error_file
from distlab.launch.report import (
    NUM_LINES,
    Failure,
    Gone,
    apart,
    gave_up,
    going_on,
    hung,
    interrupted,
    not_restarting,
    restarting,
)
from distlab.launch.stage import OtherNodes
from distlab.launch.stores import Store
from distlab.recorder.recorder import FAILED

Say = Callable[[str], None]


class Hub:
    """Runs the ranks of all nodes as process_group.launch decides."""

    def __init__(
        self,
        config: LaunchConfig,
        decisions: Decisions,
        *,
        ranks: Ranks,
        logs: dict[int, RankLog],
        terminal: Terminal,
        inbox: Inbox,
        store: Store,
        stage: OtherNodes | None,
        say: Say,
        hangs: Hangs | None = None,
    ) -> None:
        self._hangs = hangs
        self._config, self._decisions = config, decisions
        self._on = decisions.launcher(config)
        self._ranks, self._logs, self._terminal = ranks, logs, terminal
        self._inbox, self._store, self._stage, self._say = inbox, store, stage, say
        self._alive: set[int] = set()  # of all nodes
        self._generation = 0
        self._num_before = 0  # generations of launchers before this one
        self._failure: Failure | None = None
        self._codes: dict[int, int] = {}  # of the ranks that have ended
        self._stopped_by = 0
        self._wake_at_s = math.inf
        self._forwarded = config.forwarded

    def run(self) -> int:
        """Run until all ranks have ended for good; return the exit code.

        Raises:
            LaunchError: we can't start the ranks.
            DecisionError: the learner's Launcher has a mistake.
        """
        events: list[object] = [Begin()]
        while True:
            for event in events:
                code = self._look_at(event)
                if code is not None:
                    return self._finish(code)
            self._expect_progress()
            self._inbox.wait(self._patience_s())
            events = self._inbox.take()
            if self._stage:
                events += self._stage.silent()
            if time.monotonic() >= self._wake_at_s:
                self._wake_at_s = math.inf
                events.append(Tick())

    # ── what has happened ───────────────────────────────────────────────────────────

    def _look_at(self, event: object) -> int | None:
        """Let the launcher decide; return the exit code if the job has ended."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, NodeLost):
            return self._lost(event.node)
        if isinstance(event, Said):
            if event.words.get("generation", self._generation) != self._generation:
                return None
            event = as_event(event.words)
        if isinstance(event, Ended):
            event = self._ranks.buried(event)
        if isinstance(event, Gone):
            if event.number not in self._alive:  # of a node that was given up
                return None
            self._note_end(event)
            event = Ended(event.number, event.code)
        if isinstance(event, Interrupted):
            self._note_interrupt(event.signal)
        return self._decide(event)  # type: ignore[arg-type]

    def _lost(self, node: int) -> int | None:
        theirs = self._stage.ranks_of(node) if self._stage else range(0)
        if not self._alive.intersection(theirs):
            return None
        self._say(f"[distlab] node {node} is gone, and its ranks with it\n")
        for rank in theirs:
            if rank in self._alive:
                code = self._look_at(
                    Gone(
                        number=rank,
                        code=-signal.SIGKILL,
                        node=f"node {node}",
                        is_lost=True,
                    )
                )
                if code is not None:
                    return code
        return None

    def _note_end(self, gone: Gone) -> None:
        self._alive.discard(gone.number)
        self._codes[gone.number] = gone.code
        is_first = self._failure is None and not self._stopped_by
        if gone.code and is_first:
            self._failure = Failure.of(
                gone, rank=gone.number, generation=self._generation
            )

    def _note_interrupt(self, number: int) -> None:
        self._stopped_by = self._stopped_by or number
        if self._inbox.num_interrupts > 1:  # impatient: no grace
            for rank in sorted(self._alive):
                self._signal(rank, signal.SIGKILL)

    # ── what is done about it ───────────────────────────────────────────────────────

    def _decide(self, event: Event | None) -> int | None:
        if event is None:
            return None
        actions = self._on(event, time.monotonic())
        starts = [action for action in actions if isinstance(action, Start)]
        if starts and self._failure is not None and self._failure.is_usage_error:
            self._say(not_restarting(self._failure))
            return self._failure.code
        if starts and self._has_hung and self._config.on_hang == "abort":
            return FAILED
        if starts:
            self._start(starts)
        for action in actions:
            code = self._do(action)
            if code is not None:
                return code
        return None

    def _do(self, action: Action) -> int | None:
        match action:
            case Signal(rank, number):
                if number == signal.SIGTERM and self._stopped_by in self._forwarded:
                    number = self._stopped_by
                self._signal(rank, number)
            case WakeAt(at_s):
                self._wake_at_s = at_s
            case Finish(exit_code):
                return exit_code
        return None

    def _start(self, starts: Sequence[Start]) -> None:
        generation = self._num_before + max(start.generation for start in starts)
        for start in starts:
            if start.rank in self._alive:
                raise self._decisions.wrong(LAUNCH, f"{start}: rank {start.rank} runs")
        if generation > self._generation:
            if generation > 1:
                text = restarting(self._failure, self._config.max_restarts, generation)
                self._say(text)
            self._begin(generation)
        ranks = [start.rank for start in starts]
        self._alive.update(ranks)
        if self._stage:
            ranks = self._met(self._stage, ranks)
        if ranks:
            self._start_all(ranks, generation)

    def _start_all(self, ranks: list[int], generation: int) -> None:
        meeting = Meeting(
            address=self._config.master_addr,
            port=self._store.port,
            generation=generation,
            nodes=tuple(self._stage.members) if self._stage else (),
        )
        self._store.begin()
        if self._hangs:
            self._hangs.begin(self._store.port, self._num_ranks, generation)
        for rank in ranks:
            if rank in self._logs:
                self._ranks.start(rank, meeting)
        if self._stage:
            others = [rank for rank in ranks if rank not in self._logs]
            self._stage.start(others, meeting)

    def _met(self, stage: OtherNodes, ranks: list[int]) -> list[int]:
        """Return the ranks to start once the nodes have met; none after a signal."""
        self._say(stage.waiting())
        if stage.meet(self._generation):
            return self._resized(ranks, stage.members)
        for rank in ranks:
            self._inbox.put(Gone(number=rank, code=-signal.SIGTERM))
        return []

    def _resized(self, ranks: list[int], nodes: Sequence[int]) -> list[int]:
        """Return the ranks of these nodes, and replace the launcher if necessary."""
        config = self._config
        if len(ranks) == len(nodes) * config.nproc_per_node:
            return ranks
        self._num_before = self._generation - 1
        other = replace(
            config,
            nnodes=len(nodes),
            min_nodes=None,
            max_restarts=max(0, config.max_restarts - self._num_before),
        )
        self._say(going_on(len(nodes), config.nnodes, other.world_size))
        self._on = self._decisions.launcher(other)
        actions = self._on(Begin(), time.monotonic())
        ranks = [action.rank for action in actions if isinstance(action, Start)]
        self._alive = set(ranks)
        return ranks

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._failure, self._wake_at_s = None, math.inf
        self._codes.clear()

    def _signal(self, rank: int, number: int) -> None:
        if rank in self._logs:
            self._ranks.signal(rank, number)
        elif self._stage and rank in self._alive:
            self._stage.signal(rank, number)

    def _finish(self, code: int) -> int:
        text = ""
        if self._stopped_by:
            text = interrupted(self._stopped_by, code)
        elif code and self._has_hung:
            text = hung(code)
        elif code:
            self._failure = self._first_recorded(self._failure)
            text = gave_up(self._failure, code, self._generation)
            if self._failure is not None:
                write_error_file(self._failure.record, self._failure.what, code)
        elif not self._store.was_used and self._num_ranks > 1:
            text = apart(self._num_ranks)
        self._ranks.kill()
        if code:
            self._terminal.hurry()
        self._terminal.catch_up(list(self._logs))
        if text:
            self._say(text)
        if self._stage:
            self._stage.finish(code, text)
        return code

    def _first_recorded(self, failure: Failure | None) -> Failure | None:
        """Return the failure with the earliest exception, by the times of @record.

        This need not be the rank that ended first, because others may take longer to
        end.
        """
        if failure is None or not failure.record or failure.rank not in self._logs:
            return failure
        for rank, log in self._logs.items():
            record = log.record()
            if record and timestamp(record) < timestamp(failure.record):
                code = self._codes.get(rank, failure.code)
                failure = replace(
                    failure,
                    rank=rank,
                    code=code,
                    lines=log.last_lines(NUM_LINES),
                    log=log.where,
                    record=record,
                )
        return failure

    @property
    def _has_hung(self) -> bool:
        return self._hangs is not None and self._hangs.finding is not None

    @property
    def _num_ranks(self) -> int:
        """Return the number of ranks in this generation, on the present nodes."""
        num_nodes = len(self._stage.members) if self._stage else 1
        return num_nodes * self._config.nproc_per_node

    # ── when to look again ──────────────────────────────────────────────────────────

    def _patience_s(self) -> float:
        left_s = max(0.0, self._wake_at_s - time.monotonic())
        return min(self._config.monitor_interval, left_s)

    def _expect_progress(self) -> None:
        if (
            not self._alive
            and self._inbox.queue.empty()
            and math.isinf(self._wake_at_s)
        ):
            raise self._decisions.wrong(
                LAUNCH, "all processes have ended, and on() returned no Start or Finish"
            )
