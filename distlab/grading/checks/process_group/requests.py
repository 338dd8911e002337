"""Scripts of requests for 3.17: played at a `Rendezvous`, and what must come of them.

A script is a list of messages in order of arrival. A message that is not answered yet
is offered again after every later one, as on real processes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.comm.services import Answer, Pending, Request
from distlab.runner import RankContext

Step = dict[str, Any]
"""One message: the fields of the unit's `Request`."""
Script = tuple[int, tuple[Step, ...]]
"""The world size, and the messages in order of arrival."""
Replies = list[dict[int, Any]]
"""After each message: what was answered then, by the number of its message."""

RANK, DONE, REFUSED = "a rank", "a reply", "a refusal"
ERROR = "an error, "
NUM_RANDOM = 240


# ── the scripts ─────────────────────────────────────────────────────────────────────


def _step(text: str, generation: int = 1) -> Step:
    """`get a`, `set a 5`, `wait a b`, `add a 2`, `compare_set a old new`, `join x`."""
    op, *words = text.replace("''", "\0").split()
    words = [word.replace("\0", "") for word in words]
    step: Step = {"op": op, "generation": generation}
    if op == "wait":
        return step | {"keys": words}
    names = {
        "set": ("key", "value"),
        "add": ("key", "amount"),
        "compare_set": ("key", "expected", "value"),
    }
    step |= dict(zip(names.get(op, ("key",)), words, strict=True))
    return step | ({"amount": int(step["amount"])} if op == "add" else {})


def _script(world_size: int, *texts: str) -> Script:
    """Messages of generation 1, or of that which a text begins with: `2: get a`."""
    steps = []
    for text in texts:
        number, colon, rest = text.partition(": ")
        steps.append(_step(rest, int(number)) if colon else _step(text))
    return world_size, tuple(steps)


BY_HAND = (
    _script(2, "set a 5", "get a", "set a 6", "get a"),
    _script(2, "add n 5", "add n -2", "get n", "set m 40", "add m 2"),
    _script(2, "compare_set k '' first", "compare_set k '' second", "get k"),
    _script(2, "set k old", "compare_set k old new", "compare_set k old no", "get k"),
    _script(2, "compare_set k old new", "set k old"),
    _script(2, "get a", "set b 1", "set a 5"),
    _script(2, "get a", "get a", "add a 0"),
    _script(2, "set a ''", "get a", "wait a"),
    _script(2, "wait a b", "set b 1", "set a 1"),
    _script(2, "wait a", "get n", "compare_set a '' 1", "add n 1"),
    _script(1, "join x", "join x", "join y"),
    _script(2, "join x", "join y", "join z", "join y", "join x"),
    _script(3, "join x", "set a 1", "set b 1", "join y", "join z"),
    _script(3, "join x", "join x", "join x", "join y", "join z"),
    _script(2, "join x", "join y", "2: join y", "2: join z", "2: join x"),
    _script(2, "set a 1", "2: get a", "2: set a 2"),
    _script(2, "2: set a 2", "1: set a 1", "1: add a 1", "2: get a"),
    _script(2, "2: set a 2", "1: get a", "1: compare_set a 2 1", "2: get a"),
    _script(2, "join x", "2: join y", "1: join z", "2: join z", "2: join x"),
    _script(2, "get a", "wait a", "join x", "2: set a 1"),
    _script(2, "3: set a 1", "2: set a 2", "3: get a"),
)


def scripts(seed: int) -> list[Script]:
    """Those above, and some that depend on the seed, short ones first."""
    draw = random.Random(seed)
    drawn = [_random_script(draw, 3 + 15 * k // NUM_RANDOM) for k in range(NUM_RANDOM)]
    return [*BY_HAND, *drawn]


def _random_script(draw: random.Random, length: int) -> Script:
    steps, newest = [], 1
    world_size = draw.randint(1, 4)
    for _ in range(length):
        newest += draw.random() < 0.1
        generation = newest - (draw.random() < 0.15 and newest > 1)
        key, other = draw.sample("ab", 2)
        texts = (
            *(f"set {key} {draw.randint(0, 3)}", f"get {key}", f"wait {key} {other}"),
            *(f"add {key} {draw.randint(-1, 2)}", f"join {draw.choice('vwxyz')}"),
            *(
                f"compare_set {key} {draw.randint(0, 2)} 1",
                f"join {draw.choice('xyz')}",
            ),
        )
        steps.append(_step(draw.choice(texts), generation))
    return world_size, tuple(steps)


def text_of(step: Step) -> str:
    """A message as a line of the table."""
    fields = ("key", "expected", "amount", "value")
    rest = [*step.get("keys", ()), *(step[name] for name in fields if name in step)]
    return " ".join([step["op"], *(str(word) if word != "" else "''" for word in rest)])


# ── in the rank: scripts at the learner's rendezvous ────────────────────────────────


def play_scripts(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[Script, list[list[tuple[int, Any]]]]]:
    """The first script with a wrong reply for each clause, shortened; its replies."""
    records, seen = [], set()
    for script in scripts(seed):
        difference = first_difference(script, play(unit.Rendezvous, script))
        if difference and difference.clause not in seen:
            seen.add(difference.clause)
            short = _shortened(unit, script, difference.clause)
            replies = play(unit.Rendezvous, short)
            records.append((short, [sorted(some.items()) for some in replies]))
    return records


def play(make: Callable[[int], Any], script: Script) -> Replies:
    """What is answered after each message; an error ends the script."""
    world_size, steps = script
    pending = Pending(make(world_size).handle)
    replies: Replies = []
    for number, step in enumerate(steps):
        message = json.dumps(step).encode()
        answers = pending.take(Request(peer=-1, number=number, message=message), 0.0)
        replies.append({a.request.number: _read(a, steps) for a in answers})
        if any(answer.error for answer in answers):
            break
    return replies


def _read(answer: Answer, steps: Sequence[Step]) -> Any:
    if answer.error is not None:
        if isinstance(answer.error, NotImplementedError):
            raise answer.error
        return f"{ERROR}{type(answer.error).__name__}: {answer.error}"
    read = json.loads(answer.reply)
    if "refused" in read:
        return REFUSED
    asked = steps[answer.request.number]["op"]
    return DONE if asked in ("set", "wait") else read["reply"]


def _shortened(unit: ModuleType, script: Script, clause: str) -> Script:
    """The script without the messages that this difference does not need."""
    world_size, steps = script
    place = 0
    while place < len(steps):
        fewer = world_size, (*steps[:place], *steps[place + 1 :])
        difference = first_difference(fewer, play(unit.Rendezvous, fewer))
        if difference and difference.clause == clause:
            steps = fewer[1]
        else:
            place += 1
    return world_size, steps


# ── what must come of a script ──────────────────────────────────────────────────────


class Expected:
    """The contract as a service of its own; RANK stands for any rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.generation = world_size, 0
        self.values: dict[str, str] = {}
        self.names: set[str] = set()

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """See `Handle`."""
        step = json.loads(message)
        if step["generation"] > self.generation:
            self.generation, self.values, self.names = step["generation"], {}, set()
        is_old = step["generation"] < self.generation
        reply = REFUSED if is_old else getattr(self, "_" + step["op"])(step)
        if reply == REFUSED:
            return b'{"refused": ""}'
        return None if reply is None else json.dumps({"reply": reply}).encode()

    def _set(self, step: Step) -> str:
        self.values[step["key"]] = step["value"]
        return DONE

    def _get(self, step: Step) -> str | None:
        return self.values.get(step["key"])

    def _wait(self, step: Step) -> str | None:
        return DONE if self.values.keys() >= {*step["keys"]} else None

    def _add(self, step: Step) -> int:
        total = int(self.values.get(step["key"], "0")) + int(step["amount"])
        self.values[step["key"]] = str(total)
        return total

    def _compare_set(self, step: Step) -> str:
        if self.values.get(step["key"], "") == step["expected"]:
            self.values[step["key"]] = step["value"]
        return self.values.get(step["key"], "")

    def _join(self, step: Step) -> str | None:
        if step["key"] not in self.names and len(self.names) == self.world_size:
            return REFUSED
        self.names.add(step["key"])
        return RANK if len(self.names) == self.world_size else None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first reply that is not the expected one; None: there is none."""

    after: int  # the message after which it showed
    asked: int  # the message that it is the reply to
    expected: Any
    actual: Any
    clause: str
    note: str = ""


def first_difference(script: Script, replies: Replies) -> Difference | None:
    """Where the replies leave the contract, and which clause that is about."""
    world_size, steps = script
    wanted = play(Expected, script)
    ranks: dict[tuple[int, str], Any] = {}  # by generation and name
    for after, some in enumerate(wanted):
        given = replies[after] if after < len(replies) else {}
        for asked in sorted({*some, *given}, reverse=True):  # the newest message first
            expected, actual = some.get(asked), given.get(asked)
            note = ""
            if expected == RANK:
                name = steps[asked]["generation"], steps[asked]["key"]
                note = _wrong_rank(name, actual, ranks, world_size)
                ranks.setdefault(name, actual)
            if note or (expected != RANK and not _is_same(actual, expected)):
                clause = _clause(steps[: after + 1], steps[asked], expected, actual)
                return Difference(
                    after=after,
                    asked=asked,
                    expected=expected,
                    actual=actual,
                    clause=clause,
                    note=note,
                )
    return None


def _is_same(actual: Any, expected: Any) -> bool:
    return type(actual) is type(expected) and actual == expected


def _wrong_rank(
    name: tuple[int, str], actual: Any, ranks: dict[tuple[int, str], Any], n: int
) -> str:
    """What is wrong with a rank, or nothing."""
    if type(actual) is not int or not 0 <= actual < n:
        return f"a rank from 0 to {n - 1}"
    if ranks.get(name, actual) != actual:
        return f"rank {ranks[name]} again"
    taken = [who for who, rank in ranks.items() if rank == actual and who != name]
    if any(who[0] == name[0] for who in taken):
        return f"another rank than {taken[0][1]} has"
    return ""


def _clause(seen: Sequence[Step], asked: Step, expected: Any, actual: Any) -> str:
    if len({step["generation"] for step in seen}) > 1:
        return "C4"
    if asked["op"] == "join":
        return "C3"
    is_late = asked["op"] in ("get", "wait") and None in (expected, actual)
    return "C2" if is_late else "C1"
