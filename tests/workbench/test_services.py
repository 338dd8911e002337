"""`Pending`: what "not yet, offered again" means, for every carrier of messages."""

from __future__ import annotations

import pytest

from distlab.comm import Pending, Request
from distlab.comm.services import Answer
from tests.workbench.naming import named


class Board:
    """`put KEY`; `get KEY` waits for it; `meet RANK` for three of them."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.met: set[bytes] = set()
        self.seen: list[bytes] = []

    def handle(self, peer: int, message: bytes) -> bytes | None:
        self.seen.append(message)
        what, word = message.split()
        if what == b"put":
            self.keys.add(word)
        elif what == b"chain":  # there as soon as "a" is, and then "b" is too
            if b"a" not in self.keys:
                return None
            self.keys.add(b"b")
        elif what == b"get":
            return word if word in self.keys else None
        elif what == b"meet":
            self.met.add(word)
            return b"met" if len(self.met) == 3 else None
        elif what == b"fail":
            raise KeyError(word.decode())
        return b"done"


def request(peer: int, number: int, message: bytes, until_s: float = 9.0) -> Request:
    return Request(peer=peer, number=number, message=message, until_s=until_s)


def told(answers: list[Answer]) -> list[tuple[int, bytes]]:
    return [(answer.request.peer, answer.reply) for answer in answers]


def test_a_message_is_offered_again_after_the_next_one() -> None:
    board = Board()
    pending = Pending(board.handle)
    assert pending.take(request(1, 1, b"get a"), 0.0) == []
    assert pending.take(request(2, 1, b"get a"), 0.0) == []
    assert told(pending.take(request(3, 1, b"put b"), 0.0)) == [(3, b"done")]
    assert len(pending) == 2
    answers = told(pending.take(request(3, 2, b"put a"), 0.0))
    assert answers == [(3, b"done"), (1, b"a"), (2, b"a")]
    assert len(pending) == 0


def test_who_is_not_answered_may_change_something_too() -> None:
    pending = Pending(Board().handle)
    assert pending.take(request(0, 1, b"meet x"), 0.0) == []
    assert pending.take(request(1, 1, b"meet y"), 0.0) == []
    assert told(pending.take(request(2, 1, b"meet z"), 0.0)) == [
        (2, b"met"), (0, b"met"), (1, b"met"),
    ]  # fmt: skip


def test_one_that_is_answered_late_lets_others_through() -> None:
    pending = Pending(Board().handle)
    assert pending.take(request(1, 1, b"get b"), 0.0) == []
    assert pending.take(request(2, 1, b"chain b"), 0.0) == []
    answers = told(pending.take(request(3, 1, b"put a"), 0.0))
    assert answers == [(3, b"done"), (2, b"done"), (1, b"b")]


def test_who_has_given_up_or_is_gone_is_not_offered() -> None:
    board = Board()
    pending = Pending(board.handle)
    pending.take(request(1, 1, b"get a", until_s=1.0), 0.0)
    pending.take(request(2, 1, b"get a"), 0.0)
    pending.take(request(2, 2, b"get c"), 0.0)
    pending.take(request(3, 1, b"get a"), 0.0)
    pending.forget(2)
    board.seen.clear()
    assert told(pending.take(request(4, 1, b"put a"), 1.5)) == [
        (4, b"done"), (3, b"a"),
    ]  # fmt: skip
    assert board.seen == [b"put a", b"get a"]
    assert len(pending) == 0


def test_a_copy_takes_the_place_of_one_that_waits() -> None:
    pending = Pending(Board().handle)
    for _ in range(3):
        pending.take(request(1, 7, b"get a"), 0.0)
    assert len(pending) == 1
    pending.take(request(1, 8, b"get a"), 0.0)
    assert len(told(pending.take(request(2, 1, b"put a"), 0.0))) == 3


def test_an_event_offers_all_again() -> None:
    board = Board()
    pending = Pending(board.handle)
    pending.take(request(1, 1, b"get a"), 0.0)
    assert pending.offer_again(0.0) == []
    board.keys.add(b"a")
    assert told(pending.offer_again(0.0)) == [(1, b"a")]


def test_what_handle_raises_is_the_answer() -> None:
    (answer,) = Pending(Board().handle).take(request(1, 1, b"fail a"), 0.0)
    assert isinstance(answer.error, KeyError)


@pytest.mark.parametrize("reply", ["text", 7, bytearray(b"x"), True])
def test_a_reply_is_bytes(reply: object) -> None:
    pending = Pending(lambda peer, message: reply)  # type: ignore[arg-type, return-value]
    (answer,) = pending.take(request(1, 1, b""), 0.0)
    assert isinstance(answer.error, TypeError)
    assert named(str(answer.error), "handle", type(reply).__name__, "bytes", None)
