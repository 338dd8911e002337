"""Checks of 3.20, `parameter_server.staleness`: at once, bounded, without the gone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from distlab.comm import Factory, PeerLost
from distlab.grading.checks.parameter_server.messages import (
    CODEC,
    PULL,
    PUSH,
    Move,
    ask,
    close,
    drawn_order,
    gradient_of,
    shown,
    times,
    words,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.kit.services import (
    SERVICE,
    Difference,
    Gone,
    Step,
    first_difference,
    last_rows,
    play_scripts,
    played_by_hand,
    rows_of,
    under,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence
from distlab.sim import random_script

WEIGHTS, LR = [10.0, -20.0], 0.5
NUM_PUSHES = 6
BOUNDS = (2, 0, 1, None, 3)
NUM_SCRIPTS = 40  # for each bound
_TIMEOUT_S = 100.0  # of virtual time: far longer than any right server takes
_REAL_TIMEOUT_S = 5.0


def orders(seed: int) -> Iterator[tuple[int, int | None, list[Move]]]:
    """Numbers of workers and bounds, each with an order of messages within it."""
    draw = random.Random(seed)
    for bound in BOUNDS:
        for n in (3, 2, 4):
            limit = math.inf if bound is None else bound
            yield n, bound, drawn_order(draw, n, NUM_PUSHES, limit)


def maker(unit: ModuleType, n: int, bound: int | None) -> Factory:
    """Makes the learner's server."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return lambda _: unit.StaleServer(weights, n, LR, bound)


class Stale:
    """What a right server replies."""

    def __init__(self, num_workers: int, bound: int | None) -> None:
        self.num_workers, self.bound = num_workers, bound
        self.clocks, self.away = [0] * num_workers, set[int]()
        self.weights = [*WEIGHTS]

    def offer(self, peer: int, request: list[Any]) -> Any:
        """See `Model`."""
        kind, number, values = request
        if kind == PUSH:
            self.clocks[peer] = number
            for k, value in enumerate(values):
                self.weights[k] -= LR / self.num_workers * value
            return "ok"
        limit = math.inf if self.bound is None else self.bound
        return [*self.weights] if number <= self.slowest() + limit else None

    def slowest(self) -> float:
        """The clock of the slowest worker that is there."""
        clocks = [c for rank, c in enumerate(self.clocks) if rank not in self.away]
        return min(clocks, default=math.inf)

    def gone(self, peer: int) -> None:
        """See `Model`."""
        self.away.add(peer)

    def restart(self) -> None:
        """See `Model`."""


# ── C1 ──────────────────────────────────────────────────────────────────────────────


def trace(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The weights after each push of each order."""
    found = []
    for n, bound, moves in orders(seed):
        server = maker(unit, n, bound)(None)  # type: ignore[arg-type]
        weights = []
        for rank, _, number in (move for move in moves if move[1] == PUSH):
            gradient = torch.tensor(gradient_of(rank, number), dtype=torch.float64)
            server.push(rank, number, gradient)  # type: ignore[attr-defined]
            weights.append(server.weights.tolist())  # type: ignore[attr-defined]
        found.append(weights)
    return found


@clause("parameter_server.staleness", "C1", worlds=(1,), runs=[on_ranks(trace)])
def applied_at_once(runs: Runs) -> str | None:
    """V: the weights after each push, at once."""
    found = worked_out(runs, trace).values[0]
    for (n, bound, moves), weights in zip(orders(runs.seed), found, strict=True):
        model, before = Stale(n, bound), [*WEIGHTS]
        pushes = [move for move in moves if move[1] == PUSH]
        for (rank, kind, number), values in zip(pushes, weights, strict=True):
            gradient = gradient_of(rank, number)
            model.offer(rank, [kind, number, gradient])
            if not close(values, model.weights):
                raise _not_applied(n, rank, gradient, before, values, model.weights)
            before = values
    return None


def _not_applied(
    n: int,
    rank: int,
    gradient: list[float],
    before: list[float],
    values: Any,
    expected: list[float],
) -> NotYetError:
    slug, rule = "", ""
    if close(values, before):
        slug = "push-held-back"
        rule = "an asynchronous server waits for no other push"
    return NotYetError(
        f"n = {n}, lr = {LR}: worker {rank} pushed {shown(gradient)} to weights "
        f"{shown(before)}; they are now {shown(values)}, expected {shown(expected)}",
        slug=slug,
        rule=rule,
    )


# ── C2 ──────────────────────────────────────────────────────────────────────────────


def answer(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What the server replies to each order of messages."""
    return [
        played_by_hand(maker(unit, n, bound), map(ask, moves), CODEC)
        for n, bound, moves in orders(seed)
    ]


def worker(context: RankContext) -> list[Any]:
    """Pushes and pulls, and computes in between; says what it waited for in vain."""
    assert context.endpoint
    for number in range(1, NUM_PUSHES + 1):
        context.clock.sleep(0.1)
        for kind in (PUSH, PULL):
            message = ask((context.rank, kind, number)).message
            try:
                context.endpoint.call(SERVICE, message, _TIMEOUT_S)
            except PeerLost:
                return [number, kind]
    return []


def under_scripts(
    context: RankContext, unit: ModuleType, seed: int, deadly: bool
) -> list[Any]:
    """For each bound: three workers, slow, frozen and late; or killed, too."""
    kinds = ("straggler", "freeze", "late") + ("kill", "kill") * deadly
    found = []
    for place, bound in enumerate(BOUNDS):
        first = seed + place * NUM_SCRIPTS
        scripts = (
            random_script(first + number, 3, 1.0, kinds=kinds, most=4)
            for number in range(NUM_SCRIPTS)
        )

        def flaw(record: dict[str, Any], bound: int | None = bound) -> object:
            return first_difference(record["history"], Stale(3, bound), _any)

        make = maker(unit, 3, bound)
        found.append(play_scripts(make, worker, 3, scripts, CODEC, flaw=flaw))
    return found


def _any(reply: Any, expected: Any) -> bool:
    return True


HARMLESS = on_ranks(under_scripts, deadly=False)
DEADLY = on_ranks(under_scripts, deadly=True)


@clause(
    "parameter_server.staleness",
    "C2",
    worlds=(1,),
    runs=[on_ranks(answer), HARMLESS],
)
def bounded_by_the_slowest(runs: Runs) -> str | None:
    """V: every reply, or "not yet", as it was due, by hand and under scripts."""
    found = worked_out(runs, answer).values[0]
    for (n, bound, _), history in zip(orders(runs.seed), found, strict=True):
        _expect(history, n, bound, "", _slug_of_bound)
    records = worked_out(runs, HARMLESS).values[0]
    for bound, record in zip(BOUNDS, records, strict=True):
        _expect(record["history"], 3, bound, under(record), _slug_of_bound)
    played = sum(record["num_scripts"] for record in records)
    return f"the same under {played} scripts of slow, frozen and late workers"


Slug = Callable[[Difference, "Stale"], str]


def _expect(
    history: list[Any], n: int, bound: int | None, setting: str, slug: Slug
) -> None:
    model = Stale(n, bound)
    wrong = first_difference(history, model, _any)
    if wrong is None:
        return
    kind, number, _ = wrong.row.request
    rank = wrong.row.peer
    if kind == PUSH:
        raise NotYetError(f"{setting}a push of worker {rank} got no reply")
    gone = f", {_gone(model)}" if model.away else ""
    clocks = " ".join(map(str, model.clocks))
    did = "was answered" if wrong.expected is None else "was not answered"
    raise NotYetError(
        f"bound {bound}: {setting}worker {rank} pulled after {times(number, 'push')} "
        f"and {did}; the clocks are {clocks}{gone}",
        slug=slug(wrong, model),
        evidence=_shown(history, wrong.place),
    )


def _gone(model: Stale) -> str:
    return " and ".join(f"worker {rank} is gone" for rank in sorted(model.away))


def _shown(history: list[Any], place: int) -> tuple[Evidence, ...]:
    return last_rows(history, words, place)


def _slug_of_bound(wrong: Difference, model: Stale) -> str:
    return "pull-ahead" if wrong.expected is None else ""


# ── C3 ──────────────────────────────────────────────────────────────────────────────


def leave(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """As `answer`; in the middle worker 0 ends, whose clock is the lowest or not."""
    found = []
    for n, bound, moves in orders(seed):
        half = len(moves) // 2
        steps: list[Step] = [
            *map(ask, moves[:half]),
            Gone(0),
            *(ask(move) for move in moves[half:] if move[0] != 0),
        ]
        found.append(played_by_hand(maker(unit, n, bound), steps, CODEC))
    return found


def _slug_of_gone(wrong: Difference, model: Stale) -> str:
    present, model.away = model.slowest(), set()
    with_gone = model.slowest()
    number = wrong.row.request[1]
    limit = math.inf if model.bound is None else model.bound
    if (
        wrong.expected is not None
        and with_gone < present
        and (number > with_gone + limit)
    ):
        return "gone-still-counted"
    return "pull-ahead" if wrong.expected is None else ""


def on_processes(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Every rank is a worker, rank 0 has the server as well; the weights at the end."""
    assert context.endpoint
    assert context.store
    endpoint, store, n = context.endpoint, context.store, context.world_size
    play = store.add(f"play{context.rank}", 1)
    if context.rank == 0:
        endpoint.serve(maker(unit, n, 1)(None).handle)  # type: ignore[arg-type]
        store.set(f"serves{play}", b"")
    store.wait([f"serves{play}"])
    for number in range(1, NUM_PUSHES + 1):
        for kind in (PUSH, PULL):
            message = ask((context.rank, kind, number)).message
            endpoint.call(0, message, _REAL_TIMEOUT_S)
    store.set(f"done{play} {context.rank}", b"")
    store.wait([f"done{play} {rank}" for rank in range(n)])
    message = ask((context.rank, PULL, NUM_PUSHES)).message
    weights = CODEC.reply(endpoint.call(0, message, _REAL_TIMEOUT_S))
    store.set(f"over{play} {context.rank}", b"")
    store.wait([f"over{play} {rank}" for rank in range(n)])
    return weights


def _by_hand_or_on_processes(world_size: int) -> list[RunSpec]:
    return [on_ranks(leave), DEADLY] if world_size == 1 else [on_ranks(on_processes)]


@clause(
    "parameter_server.staleness",
    "C3",
    worlds=(1, 3),
    runs=_by_hand_or_on_processes,
)
def others_go_on(runs: Runs) -> str | None:
    """V: once a worker is gone, replies as if it had never been; under scripts too.

    Then a run on processes.
    """
    if runs.world_size > 1:
        return _all_on_processes(runs)
    found = worked_out(runs, leave).values[0]
    for (n, bound, _), history in zip(orders(runs.seed), found, strict=True):
        _expect_after_gone(history, n, bound, "")
    records = worked_out(runs, DEADLY).values[0]
    for bound, record in zip(BOUNDS, records, strict=True):
        _expect_after_gone(record["history"], 3, bound, under(record))
    played = sum(record["num_scripts"] for record in records)
    return f"the same under {played} scripts that kill workers"


def _expect_after_gone(
    history: list[Any], n: int, bound: int | None, setting: str
) -> None:
    """What is wrong before a worker is gone is the other clause's."""
    wrong = first_difference(history, Stale(n, bound), _any)
    if wrong and any(row.request == "gone" for row in rows_of(history)[: wrong.place]):
        _expect(history, n, bound, setting, _slug_of_gone)


def _all_on_processes(runs: Runs) -> str:
    model = Stale(runs.world_size, None)
    for rank in range(runs.world_size):
        for number in range(1, NUM_PUSHES + 1):
            model.offer(rank, [PUSH, number, gradient_of(rank, number)])
    for rank, values in enumerate(runs.finished(on_processes).values):
        if not close(values, model.weights):
            raise NotYetError(
                f"on {runs.world_size} processes, after {NUM_PUSHES} pushes of each: "
                f"rank {rank} pulled {shown(values)}, expected {shown(model.weights)}"
            )
    return "and on processes: three workers, bound 1"
