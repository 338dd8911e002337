"""Sealed frames: what is none of this connection is refused with a sentence."""

from __future__ import annotations

import struct

import pytest

from benchmarks._bad_frames import KINDS, Attack
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


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda s: b"HTTP" * 20, "begins with b'HTTP', not b'dlsv'"),
        (lambda s: call(s)[:4] + b"\2" + call(s)[5:], "has version 2; this is 1"),
        (lambda s: s.seal(9), "of kind 9, which does not belong here"),
        (lambda s: s.seal(Kind.REPLY), "of kind 3, which does not belong here"),
        (lambda s: s.seal(Kind.HELLO), "begins with HELLO, and has one only"),
        (lambda s: call(s) and call(s), "sequence number 2, not 1"),
        (lambda s: call(s) * 2, "sequence number 1, not 2: it is repeated"),
        (lambda s: call(s, b"x" * 101), "has 101 bytes, more than 100"),
        (lambda s: s.seal(Kind.CALL, patience_s=-1.0), "a patience of -1.0 s"),
        (lambda s: s.seal(Kind.CALL, patience_s=float("nan")), "a patience of nan"),
        (lambda s: call(_other(b"j" * 32)), "not the seal of this connection"),
        (lambda s: call(s)[:-1] + b"!", "not the seal of this connection"),
    ],
)
def test_what_is_no_frame_of_this_connection(spoil: object, sentence: str) -> None:
    sealer, opener = pair(limit=100)
    assert callable(spoil)
    with pytest.raises(FrameError, match=sentence):
        opener.feed(spoil(sealer))


def _other(key: bytes) -> Sealer:
    sealer = Sealer(key, FROM_CALLER)
    sealer.seal(Kind.HELLO)
    return sealer


def test_a_frame_cannot_be_sent_back_to_where_it_is_from() -> None:
    sealer = Sealer(KEY, FROM_SERVICE)
    with pytest.raises(FrameError, match="not the seal"):
        Opener(KEY, FROM_CALLER, 100).feed(sealer.seal(Kind.HELLO, b"life"))


def test_a_large_frame_is_refused_before_its_payload_comes() -> None:
    sealer, opener = pair(limit=100)
    with pytest.raises(FrameError, match="has 101 bytes"):
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


@pytest.mark.parametrize(
    ("dialler", "inside", "outside"),
    [
        (
            as_caller(Identity(SECRET, 3, 3), "ps"),
            "it is rank 3 of a job of 3 ranks",
            "its job does not have 3 ranks",
        ),
        (
            as_caller(Identity(SECRET, 1, 4), "ps"),
            "it is rank 1 of a job of 4 ranks",
            "its job does not have 4 ranks",
        ),
        (
            as_caller(Identity(SECRET[::-1], NO_RANK, 0), "ps"),
            "it does not have this job's secret",
            "it says that our secret is not its own",
        ),
        (  # a proof for one service serves at no other
            as_caller(Identity(SECRET, 1, 3), "other"),
            "it does not have this job's secret",
            "it says that our secret is not its own",
        ),
    ],
    ids=["rank", "world", "secret", "service"],
)
def test_who_may_not_call(dialler: KeyedTalk, inside: str, outside: str) -> None:
    service = as_service(Identity(SECRET, NO_RANK, 3), "ps")
    assert agree(service, dialler) == (inside, outside)


def test_a_line_and_a_call_are_not_the_same() -> None:
    rank_0, rank_1 = Identity(SECRET, 0, 3), Identity(SECRET, 1, 3)
    told = agree(as_listener(rank_0), as_caller(rank_1, "rank 0"))
    assert told[0] == "it comes in a role (number 2) that is not for rank 0"
    assert told[1] == "it takes nobody as caller"
    told = agree(as_service(rank_0, "rank 0"), as_dialler(rank_1, 0))
    assert told[1] == "it takes nobody as peer"


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
