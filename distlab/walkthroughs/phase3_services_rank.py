"""Run phase 3's rendezvous, launcher and server log in one rank.

The rank handles them message by message, event by event, and operation by operation on
the disk. `unit` is the learner's module, as in `phase3_rank`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from types import ModuleType
from typing import Any, cast

from distlab.comm import Disk, Pending, Request, ServiceContext
from distlab.grading.checks.parameter_server.exactly_once import (
    HORIZON_S,
    RANKS,
    all_once,
    ask,
    counts_of,
    new_server,
    worker,
)
from distlab.grading.checks.parameter_server.messages import CODEC
from distlab.grading.checks.process_group.launch import play_launcher
from distlab.grading.checks.process_group.lives import FOREVER, Life, Script
from distlab.grading.kit.histories import Row
from distlab.grading.kit.launcher_actions import END
from distlab.grading.kit.services import SERVICE, play_service
from distlab.runner import RankContext
from distlab.sim import (
    Faults,
    SimDisk,
    crash_points,
    random_script,
    script_text,
    shrink,
)
from distlab.sim.scripts import faults_of

CRASH_PUSHES = ((0, 1), (1, 1), (0, 2))
"""The rank and the number of each worker."""
_CHANGES = ("write", "append", "sync", "rename", "sync_folder", "remove")

# ── a rendezvous, message by message ────────────────────────────────────────────────

_FIELDS = {
    "set": ("key", "value"),
    "add": ("key", "amount"),
    "compare_set": ("key", "expected", "value"),
}


def meet(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    messages: tuple[str, ...],
) -> list[tuple[str, int]]:
    """Return each message's reply and when it came, or ("", 0) if it never did.

    The reply comes after the message with that number.
    """
    pending = Pending(unit.Rendezvous(n).handle)
    replies = [("", 0)] * len(messages)
    for number, text in enumerate(messages):
        request = Request(peer=-1, number=number, message=_request(text))
        for answer in pending.take(request, 0.0):
            if answer.error:
                raise answer.error
            reply = json.loads(answer.reply)
            words = "refused" if "refused" in reply else f"{reply['reply']!r}"
            replies[answer.request.number] = words, number + 1
    return replies


def _request(text: str) -> bytes:
    """Turn `2: set address b` into JSON."""
    generation, _, rest = text.partition(":")
    op, *words = rest.split()
    fields: dict[str, Any] = {"op": op, "generation": int(generation)}
    if op == "wait":
        fields["keys"] = words
    else:
        fields.update(zip(_FIELDS.get(op, ("key",)), words, strict=True))
    if op == "add":
        fields["amount"] = int(fields["amount"])
    return json.dumps(fields).encode()


# ── a launcher and its processes ────────────────────────────────────────────────────

NUM_RANKS, FAILING_RANK, CODE = 3, 2, 7
_STOPS_IN_S = (1.0, 2.0, 1.0)  # after SIGTERM
_MOST_GENERATIONS = 60
_LONG_S = 1e6


def launch(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    fails_after_s: float,
    ignores_sigterm: bool,
    window_s: float,
    max_restarts: int,
    grace_s: float,
) -> list[tuple[float, tuple[Any, ...], tuple[Any, ...]]]:
    """Return each event with its time and the launcher's actions.

    In each generation one rank fails after that time. If `ignores_sigterm` is set, rank
    0 ignores SIGTERM.
    """
    lives = {}
    for generation in range(1, _MOST_GENERATIONS):
        for rank in range(NUM_RANKS):
            stops_in_s = FOREVER if ignores_sigterm and rank == 0 else _STOPS_IN_S[rank]
            life = Life(after_s=_LONG_S, stops_in_s=stops_in_s)
            if rank == FAILING_RANK:
                life = Life(after_s=fails_after_s, code=CODE, stops_in_s=stops_in_s)
            lives[generation, rank] = life
    script = Script(
        world_size=NUM_RANKS,
        max_restarts=max_restarts,
        window_s=window_s,
        grace_s=grace_s,
        lives=lives,
    )
    history = (Row(*row) for row in play_launcher(unit, script))
    return [
        (row.time_s, row.request, tuple(row.reply))
        for row in history
        if row.request != END
    ]


# ── a server that may die ───────────────────────────────────────────────────────────


class Ignoring:
    """A disk that does nothing on some operations, but reports success.

    `done` lists the other operations that change the disk.
    """

    def __init__(self, disk: Disk, ignored: str) -> None:
        self._disk, self._ignored = disk, ignored.split()
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self._ignored:
            return lambda *_: None
        operation = getattr(self._disk, name)
        if name not in _CHANGES:
            return operation

        def do(*args: Any) -> None:
            names = [arg for arg in args if isinstance(arg, str)]
            self.done.append(f"{name}({', '.join(names)})")
            operation(*args)

        return do


def crashes(
    context: RankContext, unit: ModuleType, *, seed: int = 0, ignored: str
) -> list[tuple[str, int, int, int]]:
    """Return for each operation the pushes acknowledged before the next one, and disks.

    They are the disks that a crash after this operation can leave but no earlier crash
    can. The last number says how many of the acknowledged pushes the next server lacks,
    on the worst of these disks.
    """

    def program(disk: Disk, tell: Callable[[Any], None]) -> list[str]:
        watched = Ignoring(disk, ignored)
        server = new_server(unit, cast("Disk", watched))
        for push in CRASH_PUSHES:
            if server.handle(push[0], ask(push).message) == b"ok":
                tell(push)
        return watched.done

    operations = ["nothing yet", *program(SimDisk(), lambda _: None)]
    told, disks, lost = ([0] * len(operations) for _ in range(3))
    for point in crash_points(program):
        number = point.num_done
        counts = counts_of(new_server(unit, point.disk()).weights.tolist()[0])
        missing = sum(counts.get(push, 0) != 1 for push in point.told)
        told[number] = max(told[number], len(point.told))
        disks[number] += 1
        lost[number] = max(lost[number], missing)
    told = list(accumulate(told, max))  # also where a crash leaves no new disk
    return list(zip(operations, told, disks, lost, strict=True))


def failing_scripts(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    ignored: str,
    kinds: tuple[str, ...],
    num_scripts: int,
) -> tuple[int, str, str]:
    """Count the scripts of faults that fail, and find the longest, also shrunk.

    A script fails if an acknowledged push is not in the weights exactly once.
    """

    def make(service: ServiceContext) -> Any:
        return new_server(unit, cast("Disk", Ignoring(service.disk, ignored)))

    def fails(script: Faults) -> bool:
        return not all_once(play_service(make, worker, RANKS, script, CODEC))

    scripts = [
        random_script(
            number, RANKS, HORIZON_S, services=(SERVICE,), kinds=kinds, most=6
        )
        for number in range(num_scripts)
    ]
    failing = [script for script in scripts if fails(script)]
    if not failing:
        return 0, "", ""
    longest = max(failing, key=lambda script: len(faults_of(script)))
    least = shrink(longest, fails, most_runs=100)
    return len(failing), script_text(longest), script_text(least)
