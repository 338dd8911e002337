"""Checks of 3.20, `parameter_server.staleness`: at once, bounded, without the gone."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

from distlab.comm import Factory, PeerLost
from distlab.given.parameter_server import PULL, PUSH
from distlab.grading.checks.parameter_server.messages import (
    CODEC,
    LEAVE,
    LR,
    WATCHED,
    Move,
    ask,
    close,
    drawn_order,
    gradient_of,
    on_processes_with,
    shown,
    steps_of,
    times,
    weights,
    words,
)
from distlab.grading.clause import clause
from distlab.grading.kit.histories import (
    Compared,
    History,
    Model,
    Row,
    compared,
    expect,
    first_by_clause,
    last_rows,
    under,
)
from distlab.grading.kit.plans import worked_out
from distlab.grading.kit.services import SERVICE, play_scripts, played_by_hand
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.sim import random_script

TASK = "parameter_server.staleness"
NUM_PUSHES = 6
BOUNDS = (2, 0, 1, None, 3)
SIZES = (3, 2, 4)
NUM_SCRIPTS = 40  # for each bound
_TIMEOUT_S = 100.0  # of virtual time: far longer than any right server takes
Script = tuple[int, int | None, tuple[Move, ...]]
"""A number of workers, a bound, and an order of their messages within it."""


def orders(seed: int) -> list[Script]:
    """For each bound; then the same where worker 0 leaves in the middle."""
    draw = random.Random(seed)
    found: list[Script] = []
    for bound in BOUNDS:
        limit = math.inf if bound is None else bound
        found += [(n, bound, drawn_order(draw, n, NUM_PUSHES, limit)) for n in SIZES]
    for n, bound, moves in [*found]:
        half = len(moves) // 2
        others = (move for move in moves[half:] if move[0] != 0)
        found.append((n, bound, (*moves[:half], (0, LEAVE, 0), *others)))
    return found


def maker(unit: ModuleType, n: int, bound: int | None) -> Factory:
    """Makes the learner's server."""
    return lambda _: unit.StaleServer(weights(), n, LR, bound)


class Stale(Model):
    """What a right server replies."""

    def __init__(self, num_workers: int, bound: int | None) -> None:
        self.num_workers, self.bound = num_workers, bound
        self.clocks, self.away = [0] * num_workers, set[int]()
        self.weights: list[float] = weights().tolist()

    def offer(self, row: Row) -> Any:
        """See `Model`."""
        kind, number, values = row.request
        if kind == PUSH:
            self.clocks[row.peer] = number
            for k, value in enumerate(values):
                self.weights[k] -= LR / self.num_workers * value
            return "ok"
        return [*self.weights] if number <= self.slowest() + self.limit else None

    @property
    def limit(self) -> float:
        """The bound as a number."""
        return math.inf if self.bound is None else self.bound

    def slowest(self) -> float:
        """The clock of the slowest worker that is there."""
        clocks = [c for rank, c in enumerate(self.clocks) if rank not in self.away]
        return min(clocks, default=math.inf)

    def gone(self, peer: int) -> None:
        """See `Model`."""
        self.away.add(peer)


# ── what is played ──────────────────────────────────────────────────────────────────


def play_orders(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[Script, History]]:
    """The first order that breaks each clause."""

    def play(script: Script) -> History:
        n, bound, moves = script
        return played_by_hand(maker(unit, n, bound), steps_of(moves), WATCHED)

    return first_by_clause(orders(seed), play, faults)


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
            return faults((3, bound, ()), record["history"])

        make = maker(unit, 3, bound)
        found.append(play_scripts(make, worker, 3, scripts, CODEC, flaw=flaw))
    return found


def on_processes(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The weights at the end."""
    server = maker(unit, context.world_size, 1)(None)  # type: ignore[arg-type]
    return on_processes_with(context, server, NUM_PUSHES)[-1]


PLAYED = on_ranks(play_orders)
HARMLESS = on_ranks(under_scripts, deadly=False)
DEADLY = on_ranks(under_scripts, deadly=True)


@clause(TASK, "C1", worlds=(1,), plays=SIZES, runs=[PLAYED])
def applied_at_once(runs: Runs) -> str | None:
    """V: the weights after each message, at once."""
    expect(runs, PLAYED, "C1", faults)
    return None


@clause(TASK, "C2", worlds=(1,), plays=SIZES, runs=[PLAYED, HARMLESS])
def bounded_by_the_slowest(runs: Runs) -> str | None:
    """V: every reply, or "not yet", as it was due, by hand and under scripts."""
    expect(runs, PLAYED, "C2", faults)
    played = _expect_under_scripts(runs, HARMLESS, "C2")
    return f"the same under {played} scripts of slow, frozen and late workers"


def _by_hand_or_on_processes(world_size: int) -> list[RunSpec]:
    return [PLAYED, DEADLY] if world_size == 1 else [on_ranks(on_processes)]


@clause(TASK, "C3", worlds=(1, 3), plays=SIZES, runs=_by_hand_or_on_processes)
def others_go_on(runs: Runs) -> str | None:
    """V: once a worker is gone, replies as if it had never been; under scripts too.

    Then a run on processes.
    """
    if runs.world_size == 1:
        expect(runs, PLAYED, "C3", faults)
        played = _expect_under_scripts(runs, DEADLY, "C3")
        return f"the same under {played} scripts that kill workers"
    model = Stale(runs.world_size, None)
    for rank in range(runs.world_size):
        for number in range(1, NUM_PUSHES + 1):
            model.offer(Row(0.0, rank, [PUSH, number, gradient_of(rank, number)], "ok"))
    for rank, values in enumerate(runs.finished(on_processes).values):
        if not close(values, model.weights):
            raise NotYetError(
                f"on {runs.world_size} processes, after {NUM_PUSHES} pushes of each: "
                f"rank {rank} pulled {shown(values)}, expected {shown(model.weights)}"
            )
    return "and on processes: three workers, bound 1"


def _expect_under_scripts(runs: Runs, spec: RunSpec, clause_id: str) -> int:
    records = worked_out(runs, spec).values[0]
    for bound, record in zip(BOUNDS, records, strict=True):
        found = faults((3, bound, ()), record["history"], under(record))
        if clause_id in found:
            raise found[clause_id]
    return sum(record["num_scripts"] for record in records)


# ── what is wrong with it ───────────────────────────────────────────────────────────


def faults(
    script: Script, history: History, setting: str = ""
) -> dict[str, NotYetError]:
    """C1: the first wrong weights. C2 and C3: the first pull at the wrong time.

    What is wrong before a worker is gone is C2's; the rest is C3's.
    """
    n, bound, _ = script
    found, model = dict[str, NotYetError](), Stale(n, bound)
    before = [*model.weights]
    for one in compared(history, model):
        state = one.row.state
        if state is not None and "C1" not in found:
            if not close(state, model.weights):
                found["C1"] = _not_applied(one.row, before, model)
            before = [*model.weights]
        if one.is_early_or_late:
            name = "C3" if model.away else "C2"
            return found | {name: _wrong_time(setting, history, one, model)}
    return found


def _not_applied(row: Row, before: list[float], model: Stale) -> NotYetError:
    n, there = model.num_workers, model.num_workers - len(model.away)
    slug, rule = "", ""
    if row.request[0] == PUSH and close(row.state, before):
        slug = "push-held-back"
        rule = "an asynchronous server waits for no other push"
    elif there < n and close(row.state, _moved(before, row.request[2], there)):
        slug = "divided-by-those-left"
    gone = f"; {_gone(model)}; n stays {n}" if model.away else ""
    return NotYetError(
        f"lr = {LR}: worker {row.peer} pushed {shown(row.request[2])} to "
        f"weights {shown(before)}; they are now {shown(row.state)}, expected "
        f"{shown(model.weights)}{gone}",
        slug=slug,
        rule=rule,
        played=n,
    )


def _moved(before: list[float], gradient: list[float], n: int) -> list[float]:
    """The weights after a push that is divided by `n`."""
    return [w - LR / n * value for w, value in zip(before, gradient, strict=False)]


def _gone(model: Stale) -> str:
    """Who is gone, in words."""
    return " and ".join(f"worker {rank} is gone" for rank in sorted(model.away))


def _wrong_time(
    setting: str, history: History, one: Compared, model: Stale
) -> NotYetError:
    number, is_early = one.row.request[1], one.expected is None
    gone = _gone(model)
    present, model.away = model.slowest(), set()
    blocks = model.slowest() < present and number > model.slowest() + model.limit
    late_slug = "gone-still-counted" if blocks else ""
    return NotYetError(
        f"bound {model.bound}: {setting}worker {one.row.peer} pulled after "
        f"{times(number, 'push')} and was {'' if is_early else 'not '}answered; the "
        f"clocks are {' '.join(map(str, model.clocks))}{', ' * bool(gone)}{gone}",
        slug="pull-ahead" if is_early else late_slug,
        evidence=last_rows(history, words, one.place),
        played=model.num_workers,
    )
