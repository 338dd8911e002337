"""Checks of 3.25, `parameter_server.exactly_once`: retries, copies, and the log.

Each push adds a digit of its own in base 16, so the first weight says how often each
push was applied; one push has a nan, for the last weight. Crashes are tried at every
operation on the disk, with all that can be left of what was not synced; then under
scripts of faults.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from distlab.comm import Disk, Factory, PeerLost
from distlab.given.parameter_server import LOG, PULL, PUSH, read_records
from distlab.grading.checks.parameter_server.messages import (
    CODEC,
    WATCHED,
    beside,
    close,
    message,
    times,
    words,
)
from distlab.grading.clause import clause
from distlab.grading.kit.histories import History, last_rows, rows_of, under
from distlab.grading.kit.plans import worked_out
from distlab.grading.kit.services import (
    SERVICE,
    Ask,
    play_scripts,
    played_by_hand,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.sim import CrashPoint, SimDisk, crash_points, random_script

TASK = "parameter_server.exactly_once"
RANKS, NUM_PUSHES = 3, 4
HORIZON_S = 1.0
NUM_SCRIPTS = 30
Pushed = tuple[int, int]
"""A push: its rank and its number."""

REPEATED: tuple[Pushed, ...] = (
    *((0, 1), (0, 1), (1, 1), (0, 2), (0, 1), (2, 1), (1, 1), (1, 2)),
    *((0, 2), (1, 1), (2, 1), (2, 2), (1, 3), (0, 3), (2, 1), (1, 3)),
)
"""Pushes in the order in which they arrive: repeated at once, and later."""
FIRST_PUSHES: tuple[Pushed, ...] = ((0, 1), (1, 1))
WITH_NAN: Pushed = (1, 1)
MANY, LATE = 300, (300, 43, 1, 301)  # pushes, then copies of some, and a new one
NOT_EXACT = 1000.1  # in the second element: float32 does not hold it
_FULL_BYTES = 64  # one record and a half

STEP = 2.0
"""lr / n: not 1, which would hide that it was forgotten."""


def digit(push: Pushed) -> int:
    """The place of a push in the sum."""
    return push[0] * NUM_PUSHES + push[1] - 1


def ask(push: Pushed) -> Ask:
    """The message of a push."""
    rank, number = push
    last = math.nan if push == WITH_NAN else 0.0
    return Ask(rank, message(PUSH, number, [float(16 ** digit(push)), NOT_EXACT, last]))


def counts_of(weight: float) -> dict[Pushed, int]:
    """How often each push was applied, by the weights that there are."""
    rest, counts = round(-weight / STEP), {}
    for rank in range(RANKS):
        for number in range(1, NUM_PUSHES + 1):
            counts[rank, number] = rest >> 4 * digit((rank, number)) & 15
    return {push: count for push, count in counts.items() if count}


def weights_with(pushes: Iterable[Pushed]) -> list[float]:
    """The weights when each of these was applied once."""
    there = list(pushes)
    first = -STEP * sum(16 ** digit(push) for push in there)
    second = -STEP * NOT_EXACT * len(there)
    return [first, second, math.nan if WITH_NAN in there else 0.0]


def new_server(unit: ModuleType, disk: Disk) -> Any:
    """A server whose weights are -STEP · the sum of the gradients."""
    weights = torch.zeros(3, dtype=torch.float64)
    return unit.DurableServer(weights, RANKS, STEP * RANKS, disk)


def maker(unit: ModuleType) -> Factory:
    """Makes the learner's server on the disk of its process."""
    return lambda context: new_server(unit, context.disk)


def named(push: Pushed) -> str:
    """A push in a sentence."""
    return f"push {push[1]} of worker {push[0]}"


# ── C1 ──────────────────────────────────────────────────────────────────────────────


def repeat(context: RankContext, unit: ModuleType, seed: int) -> History:
    """The history of pushes that arrive several times."""
    return played_by_hand(maker(unit), map(ask, REPEATED), WATCHED)


def late_copies(context: RankContext, unit: ModuleType, seed: int) -> list[float]:
    """After MANY pushes of worker 0: how many counted then, and after each of LATE."""
    server, counts = new_server(unit, SimDisk()), list[float]()
    for number in (*range(1, MANY + 1), *LATE):
        server.handle(0, message(PUSH, number, [1.0, 0.0, 0.0]))
        counts.append(float(server.weights[0]) / -STEP)
    return counts[MANY - 1 :]


def worker(context: RankContext) -> list[float]:
    """Pushes until it is told "ok", with pauses; the weights when all must be done."""
    for number in range(1, NUM_PUSHES + 1):
        insist(context, ask((context.rank, number)).message)
        context.clock.sleep(HORIZON_S / NUM_PUSHES)
    context.clock.sleep(max(0.0, 20 * HORIZON_S - context.clock.now_s()))
    weights: list[float] = CODEC.reply(insist(context, message(PULL, NUM_PUSHES)))
    return weights


def insist(context: RankContext, request: bytes) -> bytes:
    """Send the same message until there is a reply."""
    assert context.endpoint
    while context.clock.now_s() < 100 * HORIZON_S:
        try:
            return context.endpoint.call(SERVICE, request, 0.05)
        except PeerLost:
            context.clock.sleep(0.01)
    raise TimeoutError("the server does not reply any more")


def all_once(record: dict[str, Any]) -> bool:
    """Whether every worker came to its end and found each push applied once."""
    return all(close(value or [], EVERYTHING) for value in record["values"])


EVERYTHING = weights_with(
    (rank, number) for rank in range(RANKS) for number in range(1, NUM_PUSHES + 1)
)


def under_scripts(
    context: RankContext, unit: ModuleType, seed: int, crashes: bool
) -> Any:
    """The record of the first script, made short, under which a count is wrong."""
    kinds: tuple[str, ...] = ("loss", "duplicate", "partition", "freeze")
    if crashes:
        kinds = ("restart", "torn", "torn", "loss", "duplicate", "freeze")
    scripts = (
        random_script(
            seed + number, RANKS, HORIZON_S, services=(SERVICE,), kinds=kinds, most=5
        )
        for number in range(NUM_SCRIPTS)
    )

    return play_scripts(
        maker(unit), worker, RANKS, scripts, CODEC, flaw=lambda r: not all_once(r)
    )


MESSAGES = on_ranks(under_scripts, crashes=False).when(
    "with lost and repeated messages"
)
CRASHES = on_ranks(under_scripts, crashes=True).when(
    "with a server that is killed again and again"
)


@clause(
    TASK,
    "C1",
    worlds=(1,),
    plays=(RANKS,),
    runs=[on_ranks(repeat), on_ranks(late_copies), MESSAGES],
)
def each_push_once(runs: Runs) -> str | None:
    """Each push counts once, however often it arrives; each time the reply is ok."""
    history = worked_out(runs, repeat).values[0]
    arrived = Counter[Pushed]()
    for place, row in enumerate(rows_of(history)):
        push = row.peer, row.request[1]
        arrived[push] += 1
        if row.reply != "ok":
            raise NotYetError(
                f"when {named(push)} had arrived {times(arrived[push], 'time')}, the "
                f'server answered {row.reply!r}, expected "ok"',
                evidence=last_rows(history, words, place),
            )
        counts = counts_of(row.state[0])
        for push, count in arrived.items():
            _expect_once(push, counts.get(push, 0), f"arrived {times(count, 'time')}")
        _expect_weights(row.state, weights_with(arrived), f"after {named(push)}")
    _expect_late_copies(worked_out(runs, late_copies).values[0])
    record = worked_out(runs, MESSAGES).values[0]
    expect_all(record)
    return (
        f"the same under {record['num_scripts']} scripts of lost and doubled messages"
    )


def _expect_late_copies(counts: list[float]) -> None:
    if counts[0] != MANY:
        raise NotYetError(
            f"of {MANY} pushes of worker 0, {counts[0]:g} were applied, expected each "
            "of them once"
        )
    for number, before, now in zip(LATE, counts, counts[1:], strict=False):
        is_new = number > MANY
        fact = "arrived" if is_new else f"arrived again after push {MANY}"
        _expect_once((0, number), int(now - before) + (not is_new), fact)


def _expect_once(push: Pushed, count: int, fact: str) -> None:
    if count > 1:
        raise NotYetError(
            f"{named(push)} {fact} and was applied {times(count, 'time')}, expected "
            "once",
            slug="retry-counted",
            rule="the number of a push tells whether it was applied before",
        )
    if not count:
        raise NotYetError(f"{named(push)} {fact} but was never applied, expected once")


def _expect_weights(weights: list[float], right: list[float], when: str) -> None:
    if not close(weights, right):
        found, expected = beside(weights, right)
        why = ", with a nan in a push" * ("nan" in found + expected)
        raise NotYetError(f"{when}{why}, the weights are {found}, expected {expected}")


def expect_all(record: dict[str, Any]) -> None:
    """Under a script: what the weights at the end say."""
    if all_once(record):
        return
    history, setting = record["history"], under(record)
    weights = [value for value in record["values"] if value]
    if len(weights) < RANKS:
        raise NotYetError(
            f"{setting}{RANKS - len(weights)} of {RANKS} workers got no more replies, "
            "expected a reply to each message",
            evidence=last_rows(history, words),
        )
    counts = counts_of(weights[0][0])
    for rank in range(RANKS):
        for number in range(1, NUM_PUSHES + 1):
            count = counts.get((rank, number), 0)
            if count != 1:
                about = (rank, [PUSH, number])
                raise NotYetError(
                    f"{setting}{named((rank, number))} was acknowledged but applied "
                    f"{times(count, 'time')}, expected once",
                    evidence=last_rows(
                        [
                            row
                            for row in history
                            if isinstance(row[2], str) or (row[1], row[2][:2]) == about
                        ],
                        words,
                    ),
                )
    for pulled in weights:
        _expect_weights(pulled, EVERYTHING, f"{setting}at the end")


# ── C2 ──────────────────────────────────────────────────────────────────────────────


def logged(log: bytes) -> set[Pushed]:
    """The pushes of a log, up to the first torn record."""
    return {(rank, number) for rank, number, _ in read_records(log)[0]}


def is_torn(log: bytes) -> bool:
    """Whether there is more behind the complete records."""
    return read_records(log)[1] < len(log)


def crashes_of(
    unit: ModuleType,
    pushes: Sequence[Pushed],
    files: dict[str, bytes] | None = None,
    has_recovered: bool = False,
    capacity_bytes: int | None = None,
) -> Iterator[CrashPoint]:
    """Every crash of a server that meets these pushes; told: those acknowledged.

    On a disk with a capacity it may end with an error of any kind.
    """

    def program(disk: Disk, tell: Callable[[Any], None]) -> None:
        server = new_server(unit, SimDisk() if has_recovered else disk)
        server.disk = disk
        for push in pushes:
            try:
                is_done = server.handle(push[0], ask(push).message) == b"ok"
            except Exception:
                if capacity_bytes is None:
                    raise
                return
            if is_done:
                tell(push)

    return crash_points(program, files=files, limit=200, capacity_bytes=capacity_bytes)


def log_after_crash(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The first crash after which the log lacks what was acknowledged, or nothing.

    The server has recovered elsewhere: this is about `push` alone. Then the same on a
    disk that is full in the second push.
    """
    for capacity in (None, _FULL_BYTES):
        for point in crashes_of(unit, FIRST_PUSHES, {LOG: b""}, True, capacity):
            there = logged(point.files.get(LOG, b""))
            missing = [push for push in point.told if push not in there]
            if missing:
                facts = {"push": missing[0], "when": when(point)}
                return facts | {"is_full": capacity is not None}
    return None


def when(point: CrashPoint) -> str:
    """`after sync('log')`; before the first operation nothing."""
    return f"after {point.last.partition(', b')[0].rstrip(')')})" if point.last else ""


def files_of(point: CrashPoint) -> list[list[Any]]:
    """The names and sizes of what is on the disk."""
    return [[name, len(data)] for name, data in point.files.items()]


@clause(
    TASK,
    "C2",
    worlds=(1,),
    plays=(RANKS,),
    runs=[on_ranks(log_after_crash).when("with a disk that may be full")],
)
def in_the_log_first(runs: Runs) -> str | None:
    """At every crash, the log has the pushes that were acknowledged until then."""
    wrong = worked_out(runs, log_after_crash).values[0]
    if wrong is None:
        return "at every crash, with all that can be left of what was not synced"
    if wrong["is_full"]:
        raise NotYetError(
            f"when the disk was full, the server answered {named(wrong['push'])} with "
            '"ok", but the log lacks that push'
        )
    raise NotYetError(
        f"when the server was killed {wrong['when'] or 'at its start'}, the log lacked "
        f"{named(wrong['push'])}, which the server had already acknowledged",
        slug="acknowledged-before-sync",
        rule="append, sync, and only then return",
    )
