"""Recovery: find out which rank has failed, and let the others continue.

Guide: phase4_production/guide/recovery.md.
Source: Z. Jiang et al., MegaScale (NSDI 2024), section 4, for an agent that watches
the ranks; the agent of torch.distributed.elastic, for restarts within a limit.
Symbols: n = world_size; a generation is one group of n processes, counted from 1.

`Supervisor` starts no process and reads no clock. It turns events into actions.

    reports ──▶ detect ──▶ Frozen ─┐
    processes ─ Ready, Ended ──────┼─▶ Supervisor.on ──▶ Start, Signal, Form,
    ranks ───── Completed ─────────┘                     WakeAt, Finish

A process has its own number, which isn't its rank. It imports everything, says Ready
and waits until a Form gives it a rank; until then, it is a standby.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from enum import Enum, auto
from signal import SIGTERM

from distlab.given.process_group import SIGKILL
from distlab.given.recovery import (
    COMPUTE,
    Action,
    Begin,
    Completed,
    Condition,
    Ended,
    Event,
    Finish,
    Form,
    Frozen,
    Interrupted,
    Ready,
    Report,
    Signal,
    Start,
    Tick,
    WakeAt,
    exit_code_of,
    show,
)

LEAST = 5  # with fewer durations nothing is known about a run's steps
SLOW = 2.0  # times the usual step: then a rank is late

# ── dead, frozen or merely slow ─────────────────────────────────────────────────────


def usual_step_s(reports: Sequence[Report]) -> float:
    """Estimate how long a step takes, with its usual jitter; inf means unknown.

    Two neighbors in `steps` give the duration of one step, even if a report
    lacks steps between them. All ranks' durations count together.

    C1 `usual_step_s` returns the median duration plus the usual jitter, which is the
       median of the durations' distances from that median. With fewer than LEAST
       durations, it returns inf.
    Example: times 0 1 2 4 5 6 of steps 3 4 5 6 7 8: durations 1 1 2 1 1 → 1 + 0
    Check: distlab check 4.6
    """
    ### BEGIN SOLUTION recovery.detect
    #| a report may lack a step: what do 3 s between steps 7 and 9 say?
    durations = [
        (later.time_s - earlier.time_s) / (later.number - earlier.number)
        for report in reports
        for earlier, later in zip(report.steps, report.steps[1:], strict=False)
    ]
    if len(durations) < LEAST:
        return math.inf
    median = statistics.median(durations)
    return median + statistics.median(abs(seconds - median) for seconds in durations)
    ### END SOLUTION


def detect(
    reports: Sequence[Report], now_s: float, *, patience: float = 10.0
) -> Condition:
    """Say which ranks are dead, frozen, or merely slow; list no others.

    A rank is idle since the later of since_s and the time of its newest step. The
    limit is patience * usual_step_s(reports). A heartbeat comes from another thread, so
    it continues while the trainer hangs.

    C2 A rank is dead if its process has ended, and a dead rank appears in no other
       list.
    C3 A rank is frozen if it has been idle for longer than the limit without an excuse.
       A rank in WAIT (for another rank) or SAVE is excused as long as its heartbeat is
       not older than the limit, while a rank in COMPUTE has no excuse.
    C4 A rank is slow if it is late without waiting for another rank, which means that
       it has been idle for longer than SLOW * usual_step_s but is not frozen. Because a
       first step may take any amount of time, a rank that hasn't completed one is
       neither slow nor frozen.
    In torch.distributed: torchrun sees ends, a process group's timeout all the rest
    Example: usual 1 s; ranks 0 and 2 WAIT since 5 s, rank 1 COMPUTE since 4 s: at
    11 s → slow [1], at 15 s → frozen [1]. Check: distlab check 4.6
    """
    ### BEGIN SOLUTION recovery.detect
    #| who waits, and for whom? what may take long although nothing is wrong?
    usual_s = usual_step_s(reports)
    limit_s = patience * usual_s
    condition = Condition([], [], [])
    for report in sorted(reports, key=lambda report: report.rank):
        if report.has_ended:
            condition.dead.append(report.rank)
        elif report.steps:
            idle_s = now_s - max(report.since_s, report.steps[-1].time_s)
            silent_s = idle_s if report.doing == COMPUTE else now_s - report.beat_s
            if min(idle_s, silent_s) > limit_s:
                condition.frozen.append(report.rank)
            elif report.doing == COMPUTE and idle_s > SLOW * usual_s:
                condition.slow.append(report.rank)
    return condition
    ### END SOLUTION


# ── what to do about it ─────────────────────────────────────────────────────────────


class Phase(Enum):
    """A supervisor's phase, which decides how it responds to the end of a process."""

    FORMING = auto()  # a group is needed: the first one, or one after a failure
    WHOLE = auto()  # no member has failed since the newest Form
    STOPPING = auto()  # all processes have to end, and then it finishes


class Supervisor:
    """Keeps n processes training by replacing those that end, or gives up.

    Events and actions: distlab/given/recovery.py; Interrupted(signal) and the last
    one, Finish(exit_code), as in 3.18. WakeAt(at_s) asks for a Tick; the newest counts.

    phase     event                               what happens         next phase
    --------  ----------------------------------  -------------------  ----------
    FORMING   enough processes are ready          Form                 WHOLE
              a process ends                      replace              FORMING
    WHOLE     a standby ends, all members alive   replace              WHOLE
              a standby ends, some members done   nothing              WHOLE
              a member ends with 0                nothing              WHOLE
              the last member ends with 0         stop(0)              STOPPING
              a member ends with another code     replace              FORMING
              the max_failures-th in a row        stop(exit_code)      STOPPING
    STOPPING  a Tick comes at kill_at_s or later  SIGKILL to all       STOPPING
              the last process ends               Finish(exit_code)    none
    In FORMING, `replace` also forms a group once enough processes are ready. In the
    first two phases, Interrupted stops the run, as does `replace` if too few restarts
    are left.

    C1 At Begin, world_size + num_standbys processes start, and any n of them that are
       ready form generation 1. When all members are done, the supervisor stops with 0.
       As long as some members are done and none has failed, it starts no process.
    C2 After a failure, members that are still alive keep their processes and ranks in
       the next generation, and processes that are ready take the remaining ranks.
    C3 A frozen process gets SIGKILL, and its Ended event comes later. Events that come
       late or twice change nothing.
    C4 Starting a process in place of another counts as a restart, and at most
       max_restarts are allowed within window_s. If this limit would leave fewer than n
       processes alive, none is started, and the run stops with exit_code, or with 1 if
       exit_code is 0.
    C5 The max_failures-th failure without a new step in between stops the run with
       exit_code, and Interrupted stops it with 128 + signal. Each process that is alive
       then gets SIGTERM, and SIGKILL grace_s later.
    Check: distlab check 4.7
    """

    def __init__(
        self,
        world_size: int,
        num_standbys: int = 1,
        *,
        max_restarts: int = 10,
        window_s: float = 3600.0,
        max_failures: int = 5,
        grace_s: float = 30.0,
    ) -> None:
        self.world_size, self.num_standbys = world_size, num_standbys
        self.max_restarts, self.window_s = max_restarts, window_s
        self.max_failures = max_failures  # in a row, without a new step between
        self.grace_s = grace_s  # from SIGTERM to SIGKILL
        self.generation = self.num_started = 0
        self.members: dict[int, int] = {}  # rank → process, of the newest Form
        self.phase = Phase.FORMING
        self.alive: set[int] = set()  # processes that were started and have not ended
        self.ready: set[int] = set()  # of those: they wait, and have no rank
        self.restarts_s: list[float] = []
        self.newest_step = -1  # of the run
        self.step_at_failure = -1  # the newest step when the last group failed
        self.num_failures = 0  # since a new step was completed
        self.exit_code = 0  # the first one other than 0, after the newest step
        self.kill_at_s = math.inf

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Return what to do about an event; `now_s` never decreases.

        Events may come late and twice. A process that has ended, or was not started,
        changes nothing; nor does a Frozen or Completed of an older generation, or the
        Ready of a process that has a rank.

        Frozen means SIGKILL to the process. Interrupted stops with 128 + signal. While
        it stops, only Ended and Tick count, and at a Tick from kill_at_s on, those that
        are still alive get SIGKILL.
        Check: distlab check 4.7
        """
        ### BEGIN SOLUTION recovery.supervise
        #| one case for each kind of event, and the condition under which it counts
        match event:
            case Ended(process, code) if process in self.alive:
                return self.handle_end(process, code, now_s)
            case Tick() if now_s >= self.kill_at_s:
                self.kill_at_s = math.inf
                return [Signal(process, SIGKILL) for process in sorted(self.alive)]
            case _ if self.phase is Phase.STOPPING:
                return []
            case Begin():
                return self.start(self.world_size + self.num_standbys)
            case Ready(process) if process in self.alive - {*self.members.values()}:
                self.ready.add(process)
                return self.form()
            case Frozen(process, generation) if generation == self.generation:
                return [Signal(process, SIGKILL)] if process in self.alive else []
            case Completed(step, generation) if generation == self.generation:
                self.newest_step = max(step, self.newest_step)
            case Interrupted(number):
                return self.stop(128 + number, now_s)
        return []
        ### END SOLUTION

    def start(self, num: int) -> list[Action]:
        """Start this many processes, with new numbers.

        At Begin, they are world_size + num_standbys.
        """
        ### BEGIN SOLUTION recovery.supervise
        #| which numbers has no process had?
        new = range(self.num_started, self.num_started + num)
        self.num_started += num
        self.alive |= set(new)
        return [Start(process) for process in new]
        ### END SOLUTION

    def form(self) -> list[Action]:
        """Form a group as soon as each rank has a process; [] if none is needed.

        In phase FORMING, a group is needed: at the start, or after a failure.

        The first generation is 1, of any processes that are ready. Later, members that
        are alive keep their processes and ranks, processes that are ready take the
        other ranks, and the generation grows by 1.
        Example: n = 3, rank 1 ended, process 3 is ready → Form(2, {0: 0, 1: 3, 2: 2})
        """
        ### BEGIN SOLUTION recovery.supervise
        #| which ranks have no process? are enough processes ready?
        kept = {rank: p for rank, p in self.members.items() if p in self.alive}
        empty = [rank for rank in range(self.world_size) if rank not in kept]
        if self.phase is not Phase.FORMING or len(empty) > len(self.ready):
            return []
        taken = dict(zip(empty, sorted(self.ready), strict=False))
        self.ready -= set(taken.values())
        self.generation, self.members = self.generation + 1, kept | taken
        self.phase = Phase.WHOLE
        return [Form(self.generation, dict(self.members))]
        ### END SOLUTION

    def handle_end(self, process: int, code: int, now_s: float) -> list[Action]:
        """Decide if the end of a process means work done, a failure, or neither.

        While the group is whole, a member that ends with 0 is done, and its rank needs
        no process. One that ends with another code is a failure, so a new group has to
        be formed. Until it is whole, further ends belong to the same failure.

        When all members are done, stop with 0. As long as some are done and none has
        failed, no process is started. Otherwise replace processes, and form a group if
        one is needed. The max_failures-th failure without a new step between them stops
        with exit_code. A step is new if its number is higher than any before. exit_code
        is the first other than 0 after the newest step, of a failure or of any process
        that ends while the group is not whole.
        Check: distlab check 4.7
        """
        ### BEGIN SOLUTION recovery.supervise
        #| in each phase: what was this process to the group, and who is left?
        self.alive.remove(process)
        self.ready.discard(process)
        members = {*self.members.values()}
        match self.phase:
            case Phase.STOPPING:
                return [] if self.alive else [Finish(self.exit_code)]
            case Phase.WHOLE if process in members and code:  # a failure
                if self.newest_step > self.step_at_failure:
                    self.num_failures = self.exit_code = 0
                self.phase, self.step_at_failure = Phase.FORMING, self.newest_step
                self.num_failures += 1
                self.exit_code = self.exit_code or exit_code_of(code)
                if self.num_failures >= self.max_failures:
                    return self.stop(self.exit_code, now_s)
            case Phase.WHOLE if not self.alive >= members:  # some members are done
                return [] if self.alive & members else self.stop(0, now_s)
            case Phase.FORMING:  # not another failure
                self.exit_code = self.exit_code or exit_code_of(code)
        return self.replace(now_s)
        ### END SOLUTION

    def replace(self, now_s: float) -> list[Action]:
        """Start processes until n + num_standbys are alive or the limit is reached.

        Each process started here counts as a restart, and at most max_restarts lie in
        the last window_s. If fewer than n processes would be alive, start none, and
        stop with exit_code, or with 1 if that is 0.
        In torch.distributed: torchrun --max-restarts, over its whole life
        Check: distlab check 4.7
        """
        ### BEGIN SOLUTION recovery.supervise
        #| how many are missing, how many may be started, and are they enough?
        self.restarts_s = [t for t in self.restarts_s if t > now_s - self.window_s]
        missing = self.world_size + self.num_standbys - len(self.alive)
        num = min(missing, self.max_restarts - len(self.restarts_s))
        if len(self.alive) + num < self.world_size:
            return self.stop(self.exit_code or 1, now_s)
        self.restarts_s += [now_s] * num
        return [*self.start(num), *self.form()]
        ### END SOLUTION

    def stop(self, code: int, now_s: float) -> list[Action]:
        """End all processes, then finish with this code; the first reason wins.

        Each process that is alive gets SIGTERM, and a WakeAt asks for the Tick grace_s
        later. Finish comes once all have ended, which is at once if none is alive.
        Check: distlab check 4.7
        """
        ### BEGIN SOLUTION recovery.supervise
        #| what must be remembered until the last process has ended?
        self.phase, self.exit_code = Phase.STOPPING, code
        if not self.alive:
            return [Finish(code)]
        self.kill_at_s = now_s + self.grace_s
        signals = [Signal(process, SIGTERM) for process in sorted(self.alive)]
        return [*signals, WakeAt(self.kill_at_s)]
        ### END SOLUTION


if __name__ == "__main__":
    for path in sys.argv[1:]:
        show(path, detect)
