"""Checks of 3.19, `parameter_server.sync`, C3 and C4: steps that all take."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

from distlab.given.parameter_server import PUSH
from distlab.grading.checks.parameter_server.messages import (
    LR,
    OF_ZEROS,
    WATCHED,
    Move,
    beside,
    close,
    drawn_order,
    gradient_of,
    on_processes_with,
    start,
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
    rows_of,
)
from distlab.grading.kit.services import played_by_hand
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "parameter_server.sync"
NUM_STEPS = 3
Script = tuple[int, tuple[Move, ...]]
"""A number of workers, and an order of their messages in step."""
SIZES = (3, 1, 2, 5)


def play_orders(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[Script, History]]:
    """The first order that breaks each clause."""
    draw = random.Random(seed)
    scripts = [(n, drawn_order(draw, n, NUM_STEPS, 0)) for n in SIZES]

    def play(script: Script) -> History:
        n, moves = script
        return played_by_hand(
            lambda _: unit.SyncServer(weights(), n, LR), steps_of(moves), WATCHED
        )

    return first_by_clause(scripts, play, faults)


def on_processes(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """What each rank pulls."""
    server = unit.SyncServer(weights(), context.world_size, LR)
    return on_processes_with(context, server, NUM_STEPS)


PLAYED = on_ranks(play_orders)
ON_PROCESSES = on_ranks(on_processes).when("with 3 workers on processes")


def after(n: int, num_steps: int, factor: float = 1.0) -> list[float]:
    """The right weights after so many steps of n workers."""
    found: list[float] = weights().tolist()
    for step in range(1, num_steps + 1):
        for k in range(len(found)):
            mean = sum(gradient_of(rank, step)[k] for rank in range(n)) / n
            found[k] -= LR * factor * mean
    return found


class InStep(Model):
    """What a right server replies."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.clocks = num_workers, [0] * num_workers

    def offer(self, row: Row) -> Any:
        """See `Model`."""
        kind, number, _ = row.request
        if kind == PUSH:
            self.clocks[row.peer] = number
            return "ok"
        done = min(self.clocks)
        return after(self.num_workers, done) if done >= number else None


@clause(TASK, "C3", worlds=(1,), plays=SIZES, runs=[PLAYED])
def one_step_of_all(runs: Runs) -> str | None:
    """The weights after each message, in the order in which they arrive."""
    expect(runs, PLAYED, "C3", faults)
    return "the same weights, up to rounding, in whichever order the workers push"


def _orders_or_processes(world_size: int) -> list[RunSpec]:
    return [PLAYED if world_size == 1 else ON_PROCESSES]


@clause(TASK, "C4", worlds=(1, 3), plays=SIZES, runs=_orders_or_processes)
def answered_after_the_step(runs: Runs) -> str | None:
    """Every reply, or "not yet", as it was due; then the same on processes."""
    n = runs.world_size
    if n == 1:
        expect(runs, PLAYED, "C4", faults)
        return None
    for rank, pulled in enumerate(runs.finished(on_processes).values):
        for number, values in enumerate(pulled[:NUM_STEPS], 1):
            if not close(values, after(n, number)):
                found, expected = beside(values, after(n, number))
                raise NotYetError(
                    f"on {n} processes, rank {rank} pulled {found} after push "
                    f"{number}, expected {expected}"
                )
    return "and on processes: three workers, one of them with the server"


def faults(script: Script, history: History) -> dict[str, NotYetError]:
    """C3: the first wrong weights. C4: the first pull answered too early or late."""
    n, _ = script
    found, model, pushes = dict[str, NotYetError](), InStep(n), list[Row]()
    for one in compared(history, model):
        pushes += [one.row] if one.row.request[0] == PUSH else []
        if "C3" not in found and not close(one.row.state, after(n, min(model.clocks))):
            found["C3"] = _wrong_weights(n, pushes, one.row.state)
        if "C4" not in found and one.is_early_or_late:
            found["C4"] = _wrong_time(n, history, one)
    return found


def _wrong_weights(n: int, pushes: list[Row], values: Any) -> NotYetError:
    done, partly = divmod(len(pushes), n)
    found, expected = beside(values, after(n, done))
    why = ", one of whom pushed a nan" * ("nan" in expected and "nan" not in found)
    if done == OF_ZEROS[1] and close(values, after(n, done - 1)):
        why = f", of whom worker {OF_ZEROS[0]} pushed zeros"
    message = (
        f"after step {done} with {times(n, 'worker')}{why}, the weights are {found}, "
        f"expected {expected}"
    )
    slug, rule = "", ""
    if partly == 1 and done and close(values, _with_kept(n, done, pushes)):
        message = (
            f"the first push of step {done + 1} changed the weights to "
            f"{found}, expected them to stay {expected} until all {n} workers "
            "have pushed"
        )
        rule = f"the gradients of step {done} are still kept: forget them"
    elif partly:
        slug = "first-push-steps"
        rule = "the step is taken when the last of the n gradients has arrived"
        message = (
            f"when only {partly} of {n} workers had pushed for step {done + 1}, the "
            f"weights changed to {found}, expected them to stay {expected}"
        )
    elif n > 1 and done == 1 and close(values, after(n, 1, factor=n)):
        slug, rule = "sum-not-mean", "the mean is the sum divided by n"
        message = (
            f"in step 1, the server applied the sum of {n} gradients, expected their "
            f"mean: the weights are {found} instead of {expected}"
        )
    return NotYetError(
        message,
        slug=slug,
        evidence=(start(n), *last_rows(pushes, words)),
        rule=rule,
        played=n,
    )


def _with_kept(n: int, done: int, pushes: list[Row]) -> list[float]:
    """The weights after one step more, of the last gradient that each rank pushed."""
    last = {row.peer: row.request[2] for row in pushes}
    return [
        weight - LR * sum(gradient[k] for gradient in last.values()) / n
        for k, weight in enumerate(after(n, done))
    ]


def _wrong_time(n: int, history: History, one: Compared) -> NotYetError:
    number = one.row.request[1]
    before = rows_of(history)[: one.place]
    pushed = {row.peer for row in before if row.request[:2] == [PUSH, number]}
    did = "answered" if one.expected is None else "did not answer"
    had = f"{len(pushed)} of {times(n, 'worker')} had made that push"
    message = f"the server {did} a pull after push {number}"
    if one.expected is None:
        message += f" when only {had}, expected that pull to wait"
    else:
        message += f" although {had}, expected an answer"
    return NotYetError(
        message,
        slug="pull-ahead" if one.expected is None else "",
        evidence=(start(n), *last_rows(history, words, one.place)),
        played=n,
    )
