"""Scripts of messages for 3.17, and the contract that says what is due to each.

A script is a number of processes, and messages as text in order of arrival: `set a 5`
of generation 1, `2: get a` of generation 2; `''` is an empty text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distlab.grading.kit.histories import Model, Row

Script = tuple[int, tuple[str, ...]]
NUM_RANDOM, SIZES = 240, (1, 2, 3, 4)
_FIELDS = {
    "set": ("key", "value"),
    "add": ("key", "amount"),
    "compare_set": ("key", "expected", "value"),
}

BY_HAND: tuple[Script, ...] = (
    (2, ("set a 5", "get a", "set a 6", "get a")),
    (2, ("add n 5", "add n -2", "get n", "set m 40", "add m 2")),
    (2, ("compare_set k '' first", "compare_set k '' second", "get k")),
    (2, ("set k old", "compare_set k old new", "compare_set k old no", "get k")),
    (2, ("compare_set k old new", "set k old")),
    (2, ("get a", "set b 1", "set a 5")),
    (2, ("get a", "get a", "add a 0")),
    (2, ("set a ''", "get a", "wait a")),
    (2, ("wait a b", "set b 1", "set a 1")),
    (2, ("wait", "get a", "wait a a", "set a 1")),
    (2, ("set a ''", "compare_set a '' 1", "compare_set b 1 ''", "get b")),
    (2, ("wait a", "get n", "compare_set a '' 1", "add n 1")),
    (1, ("join x", "join x", "join y")),
    (2, ("join x", "join y", "join z", "join y", "join x")),
    (3, ("join x", "set a 1", "set b 1", "join y", "join z")),
    (3, ("join x", "join x", "join x", "join y", "join z")),
    (2, ("join x", "join y", "2: join y", "2: join z", "2: join x")),
    (2, ("set a 1", "2: get a", "2: set a 2")),
    (2, ("2: set a 2", "set a 1", "add a 1", "2: get a")),
    (2, ("2: set a 2", "get a", "compare_set a 2 1", "2: get a")),
    (2, ("join x", "2: join y", "join z", "2: join z", "2: join x")),
    (2, ("get a", "wait a", "join x", "2: set a 1")),
    (2, ("3: set a 1", "2: set a 2", "3: get a")),
    (2, ("9: set a 9", "10: get a", "9: get a", "10: set a 10", "10: add a 90")),
    (12, tuple(f"join {name}" for name in (*"lkjihgfedcba", *"abcl", "m"))),
)


def scripts(seed: int) -> list[Script]:
    """Those above, and some that depend on the seed, short ones first."""
    draw = random.Random(seed)
    drawn = [_random_script(draw, 3 + 15 * k // NUM_RANDOM) for k in range(NUM_RANDOM)]
    return [*BY_HAND, *drawn]


def _random_script(draw: random.Random, length: int) -> Script:
    texts, newest = [], 1
    world_size = draw.choice(SIZES)
    for _ in range(length):
        newest += draw.random() < 0.1
        generation = newest - (draw.random() < 0.15 and newest > 1)
        key, other = draw.sample("ab", 2)
        text = draw.choice(
            (
                *(f"set {key} {draw.randint(0, 3)}", f"get {key}"),
                *(f"wait {key} {other}", f"add {key} {draw.randint(-1, 2)}"),
                *(f"join {draw.choice('vwxyz')}", f"join {draw.choice('xyz')}"),
                f"compare_set {key} {draw.randint(0, 2)} 1",
            )
        )
        texts.append(f"{generation}: {text}" if generation > 1 else text)
    return world_size, tuple(texts)


def shorter(script: Script) -> Iterator[Script]:
    """The same without one of its messages."""
    for place in range(len(script[1])):
        yield script[0], script[1][:place] + script[1][place + 1 :]


def request_of(text: str) -> dict[str, Any]:
    """A message as the fields of the unit's `Request`."""
    head, _, rest = text.rpartition(": ")
    op, *words = rest.split()
    words = [word.replace("''", "") for word in words]
    request: dict[str, Any] = {"op": op, "generation": int(head or 1)}
    if op == "wait":
        return request | {"keys": words}
    request |= dict(zip(_FIELDS.get(op, ("key",)), words, strict=True))
    return request | ({"amount": int(request["amount"])} if op == "add" else {})


def text_of(request: dict[str, Any]) -> str:
    """The same as text, without its generation."""
    fields = _FIELDS.get(request["op"], ("key",))
    is_many = "keys" in request  # perhaps none
    words = request["keys"] if is_many else [request[name] for name in fields]
    return " ".join([request["op"], *(str(word) or "''" for word in words)])


# ── what must come of them ──────────────────────────────────────────────────────────

DONE, REFUSED = ["a reply"], ["a refusal"]


@dataclass(frozen=True)
class Rank:
    """A reply that is due: one of these ranks."""

    free: frozenset[int]
    words: str


class RendezvousContract(Model):
    """What a right rendezvous replies; which rank is whose is left to the learner's."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.generation = world_size, 0
        self.values: dict[str, str] = {}
        self.names: set[str] = set()
        self.ranks: dict[str, int] = {}  # by name, as they were given

    def offer(self, row: Row) -> Any:
        """See `Model`."""
        request, values = row.request, self.values
        if request["generation"] < self.generation:
            return REFUSED
        if request["generation"] > self.generation:
            self.generation = request["generation"]
            for kept in (values, self.names, self.ranks):
                kept.clear()
        key = request.get("key", "")
        match request["op"]:
            case "join":
                return self._join(key, row.reply)
            case "get":
                return values.get(key)
            case "wait":
                return DONE if values.keys() >= set(request["keys"]) else None
            case "add":
                values[key] = str(int(values.get(key, "0")) + request["amount"])
                return int(values[key])
            case "compare_set":
                if values.get(key, "") == request["expected"]:
                    values[key] = request["value"]
                return values.get(key, "")
        values[key] = request["value"]
        return DONE

    def _join(self, name: str, reply: Any) -> Any:
        n = self.world_size
        if name not in self.names and len(self.names) == n:
            return REFUSED
        self.names.add(name)
        if len(self.names) < n:
            return None
        words, own = f"a rank from 0 to {n - 1}", self.ranks.get(name)
        free = frozenset(range(n)) - {*self.ranks.values()}
        if own is not None:
            free, words = frozenset([own]), f"rank {own} again"
        for other, rank in self.ranks.items():
            if rank == reply and other != name and type(reply) is int:
                words = f"another rank, because {other} has rank {rank}"
        if type(reply) is int and reply in free:
            self.ranks[name] = reply
        return Rank(free, words)


def is_due(reply: Any, expected: Any) -> bool:
    """Whether a reply is the one that the contract wants."""
    if isinstance(expected, Rank):
        return type(reply) is int and reply in expected.free
    if expected == DONE:
        return reply not in (None, REFUSED)
    return type(reply) is type(expected) and bool(reply == expected)
