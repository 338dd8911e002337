"""What the tasks of `parameter_server` share: messages as plain data, orders of them.

A request is [kind, number, values], a reply "ok" or the weights. An order of messages
is drawn so that each worker keeps to the contract: it pulls after each push, and
pushes again only after its pull has been answered by a right server.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from distlab.given.parameter_server import PULL, PUSH, WEIGHTS, decode, encode
from distlab.grading.kit.apart import apart
from distlab.grading.kit.histories import Row
from distlab.grading.kit.services import Ask, Codec, Gone, Step
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

LR = 0.5
WITH_NAN = (1, 2)
"""The worker and the number of a push whose last element is nan."""
OF_ZEROS = (0, 3)
"""The same of a push of nothing but zeros."""
Move = tuple[int, int, int]
"""A worker, PUSH or PULL (or LEAVE), and the number of its last push (of this one)."""
LEAVE = 0
_TIMEOUT_S = 5.0


def weights() -> Tensor:
    """Those that a server begins with."""
    return torch.tensor([10.0, -20.0, 5.0], dtype=torch.float64)


def request_of(message: bytes) -> list[Any]:
    """A message to a server."""
    kind, number, values = decode(message)
    return [kind, number, values.tolist()]


def reply_of(reply: bytes) -> Any:
    """A server's reply: the weights, or the text."""
    if reply[:1] == bytes([WEIGHTS]) and len(reply) > 4:
        return decode(reply).values.tolist()
    return reply.decode(errors="replace")


def _state(server: Any) -> Any:
    return server.weights.tolist()


def start(num_workers: int) -> Evidence:
    """With what a server begins, as the first line of the evidence."""
    text = f"weights {shown(weights().tolist())}, lr {LR}, n {num_workers}"
    if num_workers > WITH_NAN[0]:
        text += f"; push {WITH_NAN[1]} of worker {WITH_NAN[0]} has a nan on purpose"
    return Evidence(NOBODY, "start", text)


CODEC = Codec(request_of, reply_of)
WATCHED = Codec(request_of, reply_of, _state)
"""The same; after each message the server's weights are looked at."""


def message(kind: int, number: int, values: Sequence[float] = ()) -> bytes:
    """A request as bytes."""
    return encode(kind, number, torch.tensor(values, dtype=torch.float64))


def gradient_of(rank: int, number: int) -> list[float]:
    """A gradient that no other push has, and no sum of a few others.

    Push WITH_NAN has a nan, so that the last weight is nan from then on.
    """
    if (rank, number) == OF_ZEROS:
        return [0.0, 0.0, 0.0]
    gradient = [
        float((7 * rank + 3 * number * number + k) % 11 + rank) for k in range(3)
    ]
    return [*gradient[:2], math.nan] if (rank, number) == WITH_NAN else gradient


def ask(move: Move) -> Ask:
    """The message of a move."""
    return _ask(*move)


@lru_cache(maxsize=1024)
def _ask(rank: int, kind: int, number: int) -> Ask:
    values = gradient_of(rank, number) if kind == PUSH else ()
    return Ask(rank, message(kind, number, values))


def steps_of(moves: Iterable[Move]) -> list[Step]:
    """An order by hand."""
    return [Gone(move[0]) if move[1] == LEAVE else ask(move) for move in moves]


def drawn_order(
    draw: random.Random, num_workers: int, num_pushes: int, bound: float
) -> tuple[Move, ...]:
    """Each worker pushes and pulls `num_pushes` times, in an order that is drawn.

    As the messages of workers of different speeds; nobody is more than `bound` + 1
    pushes ahead of the slowest.
    """
    clocks, has_pulled = [0] * num_workers, [True] * num_workers
    speeds = [draw.choice((1, 1, 3, 9)) for _ in range(num_workers)]
    moves: list[Move] = []
    while True:
        able = [
            rank
            for rank in range(num_workers)
            if not has_pulled[rank]
            or (clocks[rank] < num_pushes and clocks[rank] - min(clocks) <= bound)
        ]
        if not able:
            return tuple(moves)
        rank = draw.choices(able, [speeds[rank] for rank in able])[0]
        clocks[rank] += has_pulled[rank]
        has_pulled[rank] = not has_pulled[rank]
        moves.append((rank, PULL if has_pulled[rank] else PUSH, clocks[rank]))


def on_processes_with(context: RankContext, server: Any, num_pushes: int) -> list[Any]:
    """Every rank is a worker, rank 0 has the server too: what this rank pulled.

    The last pull comes when all have made theirs.
    """
    assert context.endpoint
    assert context.store
    endpoint, store, n = context.endpoint, context.store, context.world_size
    play = store.add(f"play{context.rank}", 1)  # it may be played more than once

    def meet(what: str) -> None:
        store.set(f"{what}{play} {context.rank}", b"")
        store.wait([f"{what}{play} {rank}" for rank in range(n)])

    def call(kind: int, number: int) -> Any:
        asked = ask((context.rank, kind, number)).message
        return reply_of(endpoint.call(0, asked, _TIMEOUT_S))

    if context.rank == 0:
        endpoint.serve(server.handle)
    meet("begins")
    pulled = []
    for number in range(1, num_pushes + 1):
        call(PUSH, number)
        pulled.append(call(PULL, number))
    meet("done")
    pulled.append(call(PULL, num_pushes))
    meet("over")
    return pulled


def close(values: Any, expected: Any) -> bool:
    """Whether a reply is the one that was due, up to rounding; nan is due to nan."""
    if not isinstance(values, list | tuple) or not isinstance(expected, list | tuple):
        return bool(values == expected)
    return len(values) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
        or (math.isnan(a) and math.isnan(b))
        for a, b in zip(values, expected, strict=True)
    )


def shown(values: Any, digits: int = 3) -> str:
    """Numbers in a sentence."""
    if not isinstance(values, list | tuple):
        return repr(values)
    return f"[{', '.join(f'{value:.{digits}g}' for value in values)}]"


def beside(values: Any, expected: Any) -> tuple[str, str]:
    """Both in a sentence, with as many digits as tell them apart."""
    return apart(values, expected, say=shown)


def words(row: Row) -> str:
    """A row of a history as a line of evidence."""
    kind, number, values = row.request
    what = f"push {number}: {shown(values)}" if kind == PUSH else f"pull after {number}"
    if row.reply is None:
        return f"{what} → not yet"
    return f"{what} → {shown(row.reply) if kind == PULL else row.reply}"


def times(count: int, what: str) -> str:
    """`1 push`, `2 pushes`."""
    if count == 1:
        return f"1 {what}"
    if what.endswith("y"):
        return f"{count} {what[:-1]}ies"
    return f"{count} {what}{'es' if what.endswith('sh') else 's'}"
