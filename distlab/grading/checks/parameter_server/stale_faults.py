"""What is wrong with a history of 3.20, `parameter_server.staleness`."""

from __future__ import annotations

import math
import operator
from typing import Any

from distlab.given.parameter_server import PUSH
from distlab.grading.checks.parameter_server.messages import (
    LR,
    Move,
    beside,
    close,
    reply_of,
    request_of,
    shown,
    start,
    times,
    weights,
    words,
)
from distlab.grading.kit.histories import (
    Compared,
    History,
    Model,
    Row,
    compared,
    last_rows,
)
from distlab.grading.kit.services import Codec
from distlab.grading.verdict import NotYetError

Script = tuple[int, int | None, tuple[Move, ...]]
"""A number of workers, a bound, and an order of their messages within it."""


def _state_of(server: Any) -> dict[str, list[Any]]:
    """The weights, and the clocks where they can be read."""
    state = {"weights": server.weights.tolist()}
    try:
        return state | {"clocks": [operator.index(c) for c in server.clocks]}
    except (AttributeError, TypeError):  # they are the learner's own affair
        return state


WATCHED = Codec(request_of, reply_of, _state_of)


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
            if not close(state["weights"], model.weights):
                found["C1"] = _not_applied(one.row, before, model)
            before = [*model.weights]
        if one.is_early_or_late:
            name = "C3" if model.away else "C2"
            return found | {name: _wrong_time(setting, history, one, model)}
    return found


def _not_applied(row: Row, before: list[float], model: Stale) -> NotYetError:
    n, there = model.num_workers, model.num_workers - len(model.away)
    slug, rule, found = "", "", row.state["weights"]
    is_finite = all(map(math.isfinite, row.request[2]))
    if row.request[0] == PUSH and is_finite and close(found, before):
        slug = "push-held-back"
        rule = "an asynchronous server waits for no other push"
    elif there < n and close(found, _moved(before, row.request[2], there)):
        slug = "divided-by-those-left"
    gone = f" ({_gone(model)}, and n stays {n})" if model.away else ""
    now, expected = beside(found, model.weights)
    message = (
        f"after worker {row.peer}'s push of {shown(row.request[2])} with lr {LR}"
        f"{gone}, the weights are {now}, expected {expected}"
    )
    if slug == "push-held-back":
        message = (
            f"worker {row.peer}'s push left the weights at {now}, expected the server "
            f"to apply it at once: {expected}"
        )
    elif slug:
        message = (
            f"when {_gone(model)}, the server divided worker {row.peer}'s gradient by "
            f"{there}, expected division by n, which stays {n}"
        )
    return NotYetError(
        message,
        slug=slug,
        rule=rule,
        played=n,
    )


def _moved(before: list[float], gradient: list[float], n: int) -> list[float]:
    """The weights after a push that is divided by `n`."""
    return [w - LR / n * value for w, value in zip(before, gradient, strict=False)]


def _spaced(clocks: list[int]) -> str:
    return " ".join(map(str, clocks))


def _gone(model: Stale) -> str:
    """Who is gone, in words."""
    return " and ".join(f"worker {rank} is gone" for rank in sorted(model.away))


def _wrong_time(
    setting: str, history: History, one: Compared, model: Stale
) -> NotYetError:
    number, is_early = one.row.request[1], one.expected is None
    own = (one.row.state or {}).get("clocks", model.clocks)
    is_other = ""
    if own != model.clocks:
        right = _spaced(model.clocks)
        is_other = f": the server's clocks are {_spaced(own)}, expected {right}"
    gone = f" when {_gone(model)}," if model.away else ""
    present, model.away = model.slowest(), set()
    blocks = model.slowest() < present and number > model.slowest() + model.limit
    late_slug = "gone-still-counted" if blocks else ""
    bound, ahead = model.bound, "level with the slowest"
    if number > present:
        ahead = f"{times(int(number - present), 'push')} ahead of the slowest"
    due = "the pull to wait" if is_early else "an answer"
    return NotYetError(
        f"{setting}with{'out a' * (bound is None)} staleness bound"
        f"{f' {bound}' * (bound is not None)},{gone} the server "
        f"{'answered' if is_early else 'did not answer'} the pull of worker "
        f"{one.row.peer}{is_other or f', {ahead}, expected {due}'}",
        slug="pull-ahead" if is_early else late_slug,
        evidence=(
            start(model.num_workers),
            *last_rows(history, words, one.place),
        ),
        played=model.num_workers,
    )
