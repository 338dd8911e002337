"""How ranks meet: a line between every two, and a proof of the secret on both sides.

Each rank listens on a port that the system chose and writes its address into the store;
higher ranks dial lower ones. On a new connection, in bytes:

    listener → dialler   mark, nonce                                    40
    dialler → listener   mark, world size, rank, nonce, proof           80
    listener → dialler   mark, verdict, proof                           44

A proof is an HMAC-SHA256, keyed with the job's secret, of who speaks to whom, the world
size and both nonces. The secret itself never travels, no proof can be used twice, and
the listener proves nothing to who has not proved himself first. Whoever fails, says
something else, or says nothing for `PATIENCE_S` is turned away and counted; the ranks
go on waiting for each other.

Limits: this guards who may join, not what travels afterwards: frames are neither
encrypted nor signed. On a network that others can reach, put a tunnel below it.

Source: challenge and response as in ISO/IEC 9798-4, three passes, mutual.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator
from typing import NamedTuple

MARK = b"dlabtcp1"
_NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
_GREETING = struct.Struct(f"!8s{_NONCE_BYTES}s")
_CLAIM = struct.Struct(f"!8sII{_NONCE_BYTES}s32s")
_VERDICT = struct.Struct("!8sI32s")
_WELCOME, _WRONG_SECRET, _WRONG_WORLD = 0, 1, 2

Talk = Generator[tuple[bytes, int], bytes, int]
"""A handshake: yields what to say and how many bytes it then needs; gives the peer."""


class StrangerError(Exception):
    """Who is at the other end is no rank of this job; the message says why not."""


class Identity(NamedTuple):
    """What a rank proves."""

    secret: bytes
    rank: int
    world_size: int


def as_listener(me: Identity) -> Talk:
    """The side that was dialled: let in who proves the secret.

    Raises:
        StrangerError: whoever dialled is none of us.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    said = yield _GREETING.pack(MARK, nonce), _CLAIM.size
    mark, world_size, rank, their_nonce, proof = _CLAIM.unpack(said)
    if mark != MARK:
        raise StrangerError("it does not speak this protocol")
    expected = _proof(
        me.secret, b"dialler", rank, me.rank, world_size, their_nonce + nonce
    )
    if not hmac.compare_digest(proof, expected):
        yield _VERDICT.pack(MARK, _WRONG_SECRET, bytes(32)), 0
        raise StrangerError("it does not have this job's secret")
    if world_size != me.world_size or not me.rank < rank < world_size:
        yield _VERDICT.pack(MARK, _WRONG_WORLD, bytes(32)), 0
        raise StrangerError(f"it is rank {rank} of a job of {world_size} ranks")
    answer = _proof(
        me.secret, b"listener", rank, me.rank, world_size, nonce + their_nonce
    )
    yield _VERDICT.pack(MARK, _WELCOME, answer), 0
    return int(rank)


def as_dialler(me: Identity, peer: int) -> Talk:
    """The side that dialled rank `peer`.

    Raises:
        StrangerError: who listens there is not that rank, or does not want us.
    """
    said = yield b"", _GREETING.size
    mark, their_nonce = _GREETING.unpack(said)
    if mark != MARK:
        raise StrangerError("it does not speak this protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    whom = (me.rank, peer, me.world_size)
    proof = _proof(me.secret, b"dialler", *whom, nonce + their_nonce)
    claim = _CLAIM.pack(MARK, me.world_size, me.rank, nonce, proof)
    said = yield claim, _VERDICT.size
    mark, verdict, answer = _VERDICT.unpack(said)
    if mark != MARK or verdict == _WRONG_SECRET:
        raise StrangerError("it says that our secret is not its own")
    if verdict != _WELCOME:
        raise StrangerError(f"its job does not have {me.world_size} ranks")
    expected = _proof(me.secret, b"listener", *whom, their_nonce + nonce)
    if not hmac.compare_digest(answer, expected):
        raise StrangerError("it does not have this job's secret")
    return peer


def _proof(
    secret: bytes,
    role: bytes,
    dialler: int,
    listener: int,
    world_size: int,
    nonces: bytes,
) -> bytes:
    facts = struct.pack("!8s8sIII", MARK, role, dialler, listener, world_size)
    return hmac.digest(secret, facts + nonces, "sha256")
