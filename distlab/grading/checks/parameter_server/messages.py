"""What the tasks of `parameter_server` share: messages as plain data, orders of them.

A request is [kind, number, values], a reply "ok" or the weights. An order of messages
is drawn so that each worker keeps to the contract: it pulls after each push, and
pushes again only after its pull has been answered by a right server.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import torch

from distlab.grading.kit.services import Ask, Codec, Row

PUSH, PULL, WEIGHTS = 1, 2, 3
_HEADER = struct.Struct("!BI")
Move = tuple[int, int, int]
"""A worker, PUSH or PULL, and the number of its last push (of this one)."""


def request_of(message: bytes) -> list[Any]:
    """A message to a server."""
    kind, number = _HEADER.unpack_from(message)
    return [kind, number, _values(message)]


def reply_of(reply: bytes) -> Any:
    """A server's reply: the weights, or the text."""
    if len(reply) >= _HEADER.size and reply[0] == WEIGHTS:
        return _values(reply)
    return reply.decode(errors="replace")


CODEC = Codec(request_of, reply_of)


def _values(message: bytes) -> list[float]:
    payload = bytearray(message[_HEADER.size :])
    if not payload:
        return []
    values: list[float] = torch.frombuffer(payload, dtype=torch.float64).tolist()
    return values


def message(kind: int, number: int, values: Sequence[float] = ()) -> bytes:
    """The same as bytes."""
    payload = torch.tensor(values, dtype=torch.float64).numpy().tobytes()
    return _HEADER.pack(kind, number) + payload


def gradient_of(rank: int, number: int, size: int = 2) -> list[float]:
    """A gradient that no other push has, and no sum of a few others."""
    return [
        float((7 * rank + 3 * number * number + k) % 11 + rank) for k in range(size)
    ]


def ask(move: Move) -> Ask:
    """The message of a move."""
    rank, kind, number = move
    values = gradient_of(rank, number) if kind == PUSH else ()
    return Ask(rank, message(kind, number, values))


def drawn_order(
    draw: random.Random, num_workers: int, num_pushes: int, bound: float
) -> list[Move]:
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
            return moves
        rank = draw.choices(able, [speeds[rank] for rank in able])[0]
        if has_pulled[rank]:
            clocks[rank] += 1
        has_pulled[rank] = not has_pulled[rank]
        moves.append((rank, PULL if has_pulled[rank] else PUSH, clocks[rank]))


def close(values: Any, expected: Any) -> bool:
    """Whether a reply is the one that was due, up to rounding."""
    if not isinstance(values, list | tuple) or not isinstance(expected, list | tuple):
        return bool(values == expected)
    return len(values) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
        for a, b in zip(values, expected, strict=True)
    )


def shown(values: Any) -> str:
    """Numbers in a sentence."""
    if not isinstance(values, list | tuple):
        return repr(values)
    return " ".join(f"{value:.6g}" for value in values)


def words(row: Row) -> str:
    """A row of a history as a line of evidence."""
    kind, number, values = row.request
    what = f"push {number}: {shown(values)}" if kind == PUSH else f"pull after {number}"
    if row.reply is None:
        return f"{what} → not yet"
    return f"{what} → {shown(row.reply) if kind == PULL else row.reply}"


def times(count: int, what: str) -> str:
    """`1 push`, `2 pushes`."""
    plural = "es" if what.endswith("sh") else "s"
    return f"{count} {what}{plural if count != 1 else ''}"
