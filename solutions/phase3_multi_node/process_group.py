"""Process groups: how ranks meet, and how a launcher starts, stops and restarts them.

Guide: phase3_multi_node/guide/process_group.md.
Source: torch.distributed's TCPStore, and the agent of torch.distributed.elastic.
Symbols: n = world_size; a generation is one start of all ranks, counted from 1.
Cost: one message and one reply for each operation of the store.

Both classes are plain objects, which open no connection, start no process and read no
clock. You pass them what happens, and they return what to do about it.

    process ── join, set, get … ──▶ Rendezvous.answer ──▶ a reply, or None: not yet
    Begin, Ended, Tick, Interrupted ──▶ Launcher.on ──▶ Start, Signal, WakeAt, Finish

`run` in distlab/given/process_group.py drives your launcher with real processes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM

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
    run,
)

# ── the rendezvous: a store that also gives each process its rank ───────────────────


@dataclass(frozen=True, kw_only=True)
class Request:
    """One message of a process; fields that its operation doesn't need are empty."""

    op: str  # join, set, get, wait, add or compare_set
    generation: int  # of the process that sends it
    key: str = ""  # join: a name that no other process has
    keys: Sequence[str] = ()  # wait
    value: str = ""  # set and compare_set: what to store
    expected: str = ""  # compare_set
    amount: int = 0  # add


class RefusedError(ValueError):
    """A refusal, whose sentence the process gets instead of a reply."""


class Rendezvous:
    """A service that makes n processes the ranks 0 … n - 1 of one generation."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.generation = 0  # the newest that any message named
        self.members: list[str] = []  # the names that joined this generation
        self.values: dict[str, str] = {}  # of this generation

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """Answer a message, both in JSON; None means not yet: offer it again."""
        request = Request(**json.loads(message))
        try:
            self.enter_generation(request.generation)
            reply = self.answer(request)
        except RefusedError as error:
            return json.dumps({"refused": str(error)}).encode()
        return None if reply is None else json.dumps({"reply": reply}).encode()

    def enter_generation(self, generation: int) -> None:
        """Refuse a message of an older generation, and begin a newer one.

        It is called first, for every message. After a restart, a process of the last
        generation may still run, but it must not change what the new processes share.

        C4 A message from an older generation is refused with RefusedError and changes
           nothing. A newer generation becomes the current one, and it begins without
           members or values.
        In torch.distributed: torchrun's PrefixStore for each round of its rendezvous
        Example: in generation 2, `set` of generation 1 is refused
        """
        ### BEGIN SOLUTION process_group.rendezvous
        #| three cases: the message's generation is older, the current one, newer
        if generation < self.generation:
            raise RefusedError(f"generation {generation}; now it is {self.generation}")
        if generation > self.generation:
            self.generation = generation
            self.members.clear()
            self.values.clear()
        ### END SOLUTION

    def answer(self, request: Request) -> str | int | None:
        """Return the reply to a request of the current generation; None means not yet.

            set key value        store it
            get key              the value, once there is one
            wait keys            once each of them has a value
            add key amount       the new sum; a key without a value counts as 0
            compare_set          store value if the key has the value expected; returns
                                 what is stored afterwards; no value counts as ""
            join                 see below

        set and wait reply with any value but None, such as "".

        C1 The requests set, get, add and compare_set store values and reply as the
           docstring describes. Values are strings, and sums are ints.
        C2 get and wait return None until their keys have values. An empty string counts
           as a value.
        In torch.distributed: TCPStore.set, get, wait, add, compare_set
        Example: add n 5, add n -2, get n → 5, 3, "3"
        Check: distlab check 3.17
        """
        ### BEGIN SOLUTION process_group.rendezvous
        #| what does each operation do with self.values? None is the only "not yet"
        key, values = request.key, self.values
        match request.op:
            case "join":
                return self.join(key)
            case "get":
                return values.get(key)
            case "wait":
                return None if any(key not in values for key in request.keys) else ""
            case "add":
                values[key] = str(int(values.get(key, "0")) + request.amount)
                return int(values[key])
            case "compare_set":
                if values.get(key, "") == request.expected:
                    values[key] = request.value
                return values.get(key, "")
        values[key] = request.value
        return ""
        ### END SOLUTION

    def join(self, name: str) -> int | None:
        """Return the rank of this process once n have joined; None means not yet.

        Until you answer, the same message is offered again and again. A process
        that lost the reply also asks again under the same name.

        C3 Once all n names have joined, they get the ranks 0 to n - 1, in any order. If
           a name asks again, it gets the same rank, and any further name is refused.
        In torch.distributed: torchrun's rendezvous; join_timeout limits the waiting
        Example: n = 2: a → None, a → None, b → 1, a → 0, c → RefusedError
        """
        ### BEGIN SOLUTION process_group.rendezvous
        #| is the name known? is there a rank left for it? have all n joined?
        if name not in self.members:
            if len(self.members) == self.world_size:
                raise RefusedError(f"all {self.world_size} ranks are taken")
            self.members.append(name)
        if len(self.members) < self.world_size:
            return None
        return self.members.index(name)
        ### END SOLUTION


# ── the launcher: what happens to its processes, and what it does about it ──────────


class Launcher:
    """Starts all ranks; if one fails, it stops the others and restarts them all.

    Events: Begin(), once and first; Ended(rank, code), where code -s means signal s;
    Interrupted(signal), when the launcher itself got it; Tick(), when time has passed.
    Actions: Start(rank, generation), Signal(rank, signal); WakeAt(at_s), to have one
    Tick at that time, or at that of a later WakeAt; Finish(exit_code), the last one.
    """

    def __init__(
        self,
        world_size: int,
        *,
        max_restarts: int = 3,
        window_s: float = 3600.0,
        grace_s: float = 30.0,
    ) -> None:
        self.world_size = world_size
        self.max_restarts, self.window_s = max_restarts, window_s
        self.grace_s = grace_s  # from SIGTERM to SIGKILL
        self.generation = 0
        self.alive: set[int] = set()  # the ranks whose process has not ended
        self.exit_code = 0  # what stopped this generation; 0 while nothing has
        self.kill_at_s = math.inf
        self.is_interrupted = False
        self.restarts_s: list[float] = []  # the times of all restarts

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Return what to do about an event; `now_s` never decreases.

        C1 Each generation starts every rank once, and generations are numbered from 1.
           When all ranks have exited with 0, the launcher returns Finish(0).
        C2 When a process exits with a nonzero code, the launcher stops all others. Each
           process that is still alive gets SIGTERM once, and SIGKILL if it is still
           alive at a Tick grace_s later.
        C3 After a failure, the launcher restarts all ranks in the next generation,
           including ranks that had exited with 0. It does so only if fewer than
           max_restarts restarts happened less than window_s ago.
        C4 If no restart is allowed, the launcher finishes with the exit code of the
           first failure, or with 128 + s if the reason was signal s. Interrupted stops
           all processes, and none is started afterwards.
        In torch.distributed: torchrun looks every 0.1 s whether a process has ended
        Check: distlab check 3.18
        """
        ### BEGIN SOLUTION process_group.launch
        #| one case for each kind of event; which processes are alive after it?
        #| a Tick may come late: look at the time, and at what is to be done then
        match event:
            case Begin():
                return self.start_all()
            case Ended(rank, code):
                self.alive.remove(rank)
                signals = self.stop(code, now_s) if code else []
                return signals if self.alive else self.restart_or_finish(now_s)
            case Interrupted(number):
                self.is_interrupted = True
                return self.stop(-number, now_s)
            case Tick() if now_s >= self.kill_at_s:
                self.kill_at_s = math.inf
                return [Signal(rank, SIGKILL) for rank in sorted(self.alive)]
        return []
        ### END SOLUTION

    def start_all(self) -> list[Action]:
        """Begin the next generation, on which nothing of the previous one may act.

        It starts every rank, with a Start each.
        In torch.distributed: TORCHELASTIC_RESTART_COUNT is the generation minus 1
        """
        ### BEGIN SOLUTION process_group.launch
        #| which of this object's fields belong to one generation only?
        self.generation += 1
        self.alive = set(range(self.world_size))
        self.exit_code, self.kill_at_s = 0, math.inf
        return [Start(rank, self.generation) for rank in range(self.world_size)]
        ### END SOLUTION

    def stop(self, code: int, now_s: float) -> list[Action]:
        """Stop all ranks that are alive because of this code; -s stands for signal s.

        The processes that you stop end as well, most of them with code -15. Their
        codes say nothing about the cause.

        Each rank that is alive gets SIGTERM, once per generation, and a WakeAt asks for
        the Tick at which SIGKILL is due. self.exit_code is that of the first failure,
        the code itself or 128 + s for signal s.
        In torch.distributed: torchrun waits 30 s from SIGTERM to SIGKILL
        """
        ### BEGIN SOLUTION process_group.launch
        #| is this the first reason to stop? what must be remembered until all ended?
        if self.exit_code:
            return []
        self.exit_code = code if code > 0 else 128 - code
        self.kill_at_s = now_s + self.grace_s
        signals = [Signal(rank, SIGTERM) for rank in sorted(self.alive)]
        return [*signals, WakeAt(self.kill_at_s)]
        ### END SOLUTION

    def restart_or_finish(self, now_s: float) -> list[Action]:
        """Decide what comes next once all processes have ended.

        A rank that fails at once would restart forever, so we limit restarts.
        In torch.distributed: torchrun --max-restarts, counted over its whole life
        """
        ### BEGIN SOLUTION process_group.launch
        #| which restarts still count? what forbids another one?
        self.restarts_s = [t for t in self.restarts_s if t > now_s - self.window_s]
        is_over = self.is_interrupted or len(self.restarts_s) >= self.max_restarts
        if is_over or not self.exit_code:
            return [Finish(self.exit_code)]
        self.restarts_s.append(now_s)
        return self.start_all()
        ### END SOLUTION


if __name__ == "__main__":
    num_ranks, *program = sys.argv[1:] or sys.exit("say: NUM_RANKS PROGRAM [ARGUMENTS]")
    sys.exit(run(Launcher(int(num_ranks)), [sys.executable, *program]))
