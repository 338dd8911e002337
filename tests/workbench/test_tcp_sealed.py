"""Sealed frames: what is none of this connection is refused with a sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import (
    NO_RANK,
    Identity,
    KeyedTalk,
    Proved,
    StrangerError,
    Talk,
    as_caller,
    as_dialler,
    as_listener,
    as_service,
)
from distlab.comm.tcp.sealed import (
    FROM_CALLER,
    FROM_SERVICE,
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    SEAL_BYTES,
    Kind,
    Opener,
    Sealer,
)
from tests.corpora.bad_frames import KINDS, Attack
from tests.workbench.golden import Golden
from tests.workbench.naming import named

SECRET = bytes(range(32))
KEY = b"k" * 32


def pair(limit: int = MAX_FRAME_BYTES) -> tuple[Sealer, Opener]:
    """Both ends of one direction, after HELLO."""
    sealer, opener = Sealer(KEY, FROM_CALLER), Opener(KEY, FROM_CALLER, limit)
    assert opener.feed(sealer.seal(Kind.HELLO, b"name"))[0].payload == b"name"
    return sealer, opener


def call(sealer: Sealer, payload: bytes = b"question") -> bytes:
    return sealer.seal(Kind.CALL, payload, number=3, oldest=2, patience_s=1.5)


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    sealer, opener = pair()
    data = call(sealer) + call(sealer, b"") + call(sealer, b"x" * 1000)
    frames = [f for place in range(len(data)) for f in opener.feed(data[place:][:1])]
    assert [frame.payload for frame in frames] == [b"question", b"", b"x" * 1000]
    first = frames[0]
    assert (first.kind, first.number, first.oldest) == (Kind.CALL, 3, 2)
    assert first.patience_s == 1.5


def test_no_bit_can_be_turned() -> None:
    for place in range(HEAD_BYTES + len(b"question")):
        for bit in range(8):
            sealer, opener = pair()
            frame = bytearray(call(sealer))
            frame[place] ^= 1 << bit
            (length,) = struct.unpack_from("!I", frame, HEAD_BYTES - SEAL_BYTES - 4)
            frame += bytes(max(0, min(length, 1 << 20) - len(b"question")))
            with pytest.raises(FrameError):
                opener.feed(bytes(frame))


# Each with what its refusal has to name.
SPOILT: dict[str, tuple[Callable[[Sealer], bytes], tuple[object, ...]]] = {
    "magic": (lambda s: b"HTTP" * 20, ("b'HTTP'", "b'dlsv'")),
    "version": (lambda s: call(s)[:4] + b"\2" + call(s)[5:], (2, 1)),
    "kind": (lambda s: s.seal(9), ("kind", 9)),
    "direction": (lambda s: s.seal(Kind.REPLY), ("kind", 3)),
    "hello": (lambda s: s.seal(Kind.HELLO), ("HELLO",)),
    "one is missing": (lambda s: call(s) and call(s), ("number", 2, 1)),
    "repeated": (lambda s: call(s) * 2, ("number", 1, 2)),
    "size": (lambda s: call(s, b"x" * 101), (101, 100)),
    "negative patience": (lambda s: s.seal(Kind.CALL, patience_s=-1.0), ("-1.0",)),
    "no patience": (lambda s: s.seal(Kind.CALL, patience_s=float("nan")), ("nan",)),
    "another key": (lambda s: call(_other(b"j" * 32)), ("seal",)),
    "payload": (lambda s: call(s)[:-1] + b"!", ("seal",)),
}


def test_what_is_no_frame_of_this_connection(golden: Golden) -> None:
    texts = []
    for name, (spoil, values) in SPOILT.items():
        sealer, opener = pair(limit=100)
        with pytest.raises(FrameError) as refused:
            opener.feed(spoil(sealer))
        assert named(str(refused.value), *values), name
        texts.append(f"{name}: {refused.value}")
    golden("tcp/sealed frames", "\n".join(texts))


def _other(key: bytes) -> Sealer:
    sealer = Sealer(key, FROM_CALLER)
    sealer.seal(Kind.HELLO)
    return sealer


def test_a_frame_cannot_be_sent_back_to_where_it_is_from() -> None:
    sealer = Sealer(KEY, FROM_SERVICE)
    with pytest.raises(FrameError, match=r"\bseal\b"):
        Opener(KEY, FROM_CALLER, 100).feed(sealer.seal(Kind.HELLO, b"life"))


def test_a_large_frame_is_refused_before_its_payload_comes() -> None:
    sealer, opener = pair(limit=100)
    with pytest.raises(FrameError, match=r"\b101\b.*\b100\b"):
        opener.feed(call(sealer, b"x" * 101)[:HEAD_BYTES])


def test_thousands_of_bad_frames_reach_no_service() -> None:
    outcome = Attack(seed=5).run(2000)
    assert outcome.bad_frames_accepted == 0
    assert outcome.without_a_sentence == 0
    assert outcome.is_well
    assert outcome.by_kind == dict.fromkeys(KINDS, 500)
    assert len(outcome.reasons) > 8


def test_a_frame_that_is_accepted_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distlab.comm.tcp.sealed._seal", lambda *_: bytes(16))
    assert Attack(seed=5).run(400).bad_frames_accepted > 0


# ── who may call ────────────────────────────────────────────────────────────────────


def agree(inside: KeyedTalk | Talk, outside: KeyedTalk | Talk) -> tuple[object, object]:
    """A whole handshake in memory; what both sides conclude."""
    greeting, _ = next(inside)
    next(outside)
    claim, _ = outside.send(greeting)
    answer, _ = inside.send(claim)
    ends: list[object] = []
    for talk, words in ((outside, answer), (inside, b"")):
        try:
            talk.send(words)
        except StopIteration as end:
            ends.append(end.value)
        except StrangerError as error:
            ends.append(str(error))
    return ends[1], ends[0]


@pytest.mark.parametrize("rank", [0, 2, NO_RANK])
def test_ranks_and_newcomers_may_call_and_share_a_key(rank: int) -> None:
    service = as_service(Identity(SECRET, NO_RANK, 3), "ps")
    inside, outside = agree(service, as_caller(Identity(SECRET, rank, 3), "ps"))
    assert isinstance(inside, Proved)
    assert isinstance(outside, Proved)
    assert inside.peer == rank
    assert inside.key == outside.key != SECRET
    again, _ = agree(
        as_service(Identity(SECRET, NO_RANK, 3), "ps"),
        as_caller(Identity(SECRET, rank, 3), "ps"),
    )
    assert isinstance(again, Proved)
    assert again.key != inside.key


# Each with what both sides have to name; a proof for one service serves at no other.
UNWANTED: dict[str, tuple[Identity, str, tuple[object, ...], tuple[object, ...]]] = {
    "rank": (Identity(SECRET, 3, 3), "ps", ("rank 3", 3), (3,)),
    "world": (Identity(SECRET, 1, 4), "ps", ("rank 1", 4), (4,)),
    "secret": (Identity(SECRET[::-1], NO_RANK, 0), "ps", ("secret",), ("secret",)),
    "service": (Identity(SECRET, 1, 3), "other", ("secret",), ("secret",)),
}


def test_who_may_not_call(golden: Golden) -> None:
    texts = []
    for name, (caller, service, *values) in UNWANTED.items():
        here = as_service(Identity(SECRET, NO_RANK, 3), "ps")
        told = agree(here, as_caller(caller, service))
        for text, expected in zip(told, values, strict=True):
            assert isinstance(text, str)
            assert named(text, *expected), name
        texts.append(f"{name}: {told[0]}; {told[1]}")
    golden("tcp/unwanted callers", "\n".join(texts))


def test_a_line_and_a_call_are_not_the_same() -> None:
    rank_0, rank_1 = Identity(SECRET, 0, 3), Identity(SECRET, 1, 3)
    inside, outside = agree(as_listener(rank_0), as_caller(rank_1, "rank 0"))
    assert named(str(inside), 2, "rank 0")  # the number of a role
    assert named(str(outside), "caller")
    _, outside = agree(as_service(rank_0, "rank 0"), as_dialler(rank_1, 0))
    assert named(str(outside), "peer")


def test_no_bit_of_a_claim_can_be_turned() -> None:
    greeting = next(as_service(Identity(SECRET, NO_RANK, 3), "ps"))[0]
    size = len(_claim(greeting))
    for place in range(8 * size):
        service = as_service(Identity(SECRET, NO_RANK, 3), "ps")
        claim = bytearray(_claim(next(service)[0]))
        claim[place // 8] ^= 1 << place % 8
        with pytest.raises(StrangerError):
            _hear(service, bytes(claim))


def _hear(service: KeyedTalk, claim: bytes) -> None:
    service.send(claim)
    service.send(b"")


def _claim(greeting: bytes) -> bytes:
    talk = as_caller(Identity(SECRET, 1, 3), "ps")
    next(talk)
    return talk.send(greeting)[0]
