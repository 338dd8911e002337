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
    ask,
    beside,
    close,
    drawn_order,
    gradient_of,
    on_processes_with,
    steps_of,
    weights,
)
from distlab.grading.checks.parameter_server.stale_faults import (
    WATCHED,
    Script,
    Stale,
    faults,
)
from distlab.grading.clause import clause
from distlab.grading.kit.again import played_once
from distlab.grading.kit.histories import (
    History,
    Row,
    expect,
    first_by_clause,
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
_FAR = 10**6  # a bound that no worker comes to
_TIMEOUT_S = 100.0  # of virtual time: far longer than any right server takes


def _left_behind() -> Script:
    """Worker 2's first push comes late; worker 0 is the slowest, and then it leaves."""
    turns = [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3)]
    moves = [(rank, kind, number) for rank, number in turns for kind in (PUSH, PULL)]
    return 3, 2, (*moves, (0, LEAVE, 0), (1, PUSH, 4), (1, PULL, 4))


def orders(seed: int) -> list[Script]:
    """One by hand, and for each bound; then the same where worker 0 leaves midway."""
    draw = random.Random(seed)
    found: list[Script] = [_left_behind()]
    for bound in BOUNDS:
        limit = math.inf if bound is None else bound
        found += [(n, bound, drawn_order(draw, n, NUM_PUSHES, limit)) for n in SIZES]
    for n, bound, moves in found[1:]:
        half = len(moves) // 2
        others = (move for move in moves[half:] if move[0] != 0)
        found.append((n, bound, (*moves[:half], (0, LEAVE, 0), *others)))
    return found


def maker(unit: ModuleType, n: int, bound: int | None) -> Factory:
    """Makes the learner's server."""
    return lambda _: unit.StaleServer(weights(), n, LR, bound)


# ── what is played ──────────────────────────────────────────────────────────────────


def play_orders(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[Script, History]]:
    """The first order that breaks each clause."""

    def play_with(script: Script, bound: int | None) -> History:
        n, _, moves = script
        return played_by_hand(maker(unit, n, bound), steps_of(moves), WATCHED)

    def play(script: Script) -> History:
        try:
            return play_with(script, script[1])
        except TypeError as error:
            if script[1] is None:
                play_with(script, _FAR)  # the error goes with a number: None made it
                error.args = (f"{error}; bound is None here: asynchronous",)
            raise

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


@played_once
def under_scripts(
    context: RankContext, unit: ModuleType, seed: int, deadly: bool
) -> list[Any]:
    """For each bound: three workers, slow, frozen and late; or killed, too."""
    kinds = ("straggler", "freeze", "late") + ("kill", "kill") * deadly
    found = []
    for place, bound in enumerate(BOUNDS):
        first = seed + place * NUM_SCRIPTS
        drawn = (
            random_script(first + number, 3, 1.0, kinds=kinds, most=4)
            for number in range(NUM_SCRIPTS)
        )
        # When all workers are gone, nothing is said about a pull that still waits.
        scripts = (script for script in drawn if len(script.kill) < 3)

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
HARMLESS = on_ranks(under_scripts, deadly=False).when(
    "with slow, frozen and late workers"
)
DEADLY = on_ranks(under_scripts, deadly=True).when("with workers that are killed")
ON_PROCESSES = on_ranks(on_processes).when("with 3 workers on processes")


@clause(TASK, "C1", worlds=(1,), plays=SIZES, runs=[PLAYED])
def applied_at_once(runs: Runs) -> str | None:
    """The weights after each message, at once."""
    expect(runs, PLAYED, "C1", faults)
    return None


@clause(TASK, "C2", worlds=(1,), plays=SIZES, runs=[PLAYED, HARMLESS])
def bounded_by_the_slowest(runs: Runs) -> str | None:
    """Every reply, or "not yet", as it was due, by hand and under scripts."""
    expect(runs, PLAYED, "C2", faults)
    played = _expect_under_scripts(runs, HARMLESS, "C2")
    return f"the same under {played} scripts of slow, frozen and late workers"


def _by_hand_or_on_processes(world_size: int) -> list[RunSpec]:
    return [PLAYED, DEADLY] if world_size == 1 else [ON_PROCESSES]


@clause(TASK, "C3", worlds=(1, 3), plays=SIZES, runs=_by_hand_or_on_processes)
def others_go_on(runs: Runs) -> str | None:
    """Once a worker is gone, replies as if it had never been; under scripts too.

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
            found, expected = beside(values, model.weights)
            raise NotYetError(
                f"on {runs.world_size} processes, after {NUM_PUSHES} pushes of each, "
                f"rank {rank} pulled {found}, expected {expected}"
            )
    return "and on processes: three workers, bound 1"


def _expect_under_scripts(runs: Runs, spec: RunSpec, clause_id: str) -> int:
    records = worked_out(runs, spec).values[0]
    for bound, record in zip(BOUNDS, records, strict=True):
        found = faults((3, bound, ()), record["history"], under(record))
        if clause_id in found:
            raise found[clause_id]
    return sum(record["num_scripts"] for record in records)
