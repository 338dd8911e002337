"""Let two ends of a connection prove to each other that they belong to one job.

Each listener has a port that the system chose. To connect two ranks, the higher one
dials the lower one. Any rank can dial a service, and so can a caller that doesn't have
a rank yet. The messages on a new connection are, in bytes:

    listener → dialler   mark, nonce                                          40
    dialler → listener   mark, role, world size, rank, nonce, proof           84
    listener → dialler   mark, verdict, proof                                 44

A proof is an HMAC-SHA256, keyed with the job's secret, over who speaks to whom in which
role, the world size and both nonces. The secret itself is never sent, no proof can be
used twice, and the listener proves nothing until the dialler has proved itself. If a
dialler fails, sends anything else, or sends nothing for `PATIENCE_S`, we turn it away
and count it, while the ranks keep waiting for each other.

Both ends then share a key that belongs to this connection only. Calls over it are
sealed with that key (see `sealed`). On the lines between ranks, however, the handshake
only controls who may join: their frames are neither encrypted nor signed. On a network
that others can reach, put a tunnel below it.

Source: challenge and response as in ISO/IEC 9798-4, three passes, mutual.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import NamedTuple

MARK = b"dlabtcp2"
_NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
NO_RANK = -1
"""The rank that a newcomer claims."""
_GREETING = struct.Struct(f"!8s{_NONCE_BYTES}s")
_CLAIM = struct.Struct(f"!8sIIi{_NONCE_BYTES}s32s")
_VERDICT = struct.Struct("!8sI32s")
_WELCOME, _WRONG_SECRET, _WRONG_WORLD, _WRONG_ROLE = 0, 1, 2, 3


class Role(IntEnum):
    """The role that the dialler asks the listener for."""

    PEER = 1  # the other end of a line between two ranks
    CALLER = 2  # a rank that calls a service
    NEWCOMER = 3  # calls a service and has no rank yet


class Proved(NamedTuple):
    """The peer at the other end, and the key that only the two ends know."""

    peer: int
    key: bytes


Talk = Generator[tuple[bytes, int], bytes, int]
"""A handshake: yields what to say and how many bytes it needs next; returns the
peer."""
KeyedTalk = Generator[tuple[bytes, int], bytes, Proved]
"""A handshake that also returns the key."""


class StrangerError(Exception):
    """Raised if the other end isn't a rank of this job; the message says why not."""


class Identity(NamedTuple):
    """The identity that a rank proves."""

    secret: bytes
    rank: int
    world_size: int


def as_listener(me: Identity) -> Talk:
    """Admit anyone who proves the secret, as the side that was dialled.

    Raises:
        StrangerError: the dialler doesn't belong to this job.
    """

    def verdict(role: int, world_size: int, rank: int) -> int:
        if role != Role.PEER:
            return _WRONG_ROLE
        is_ours = world_size == me.world_size and me.rank < rank < world_size
        return _WELCOME if is_ours else _WRONG_WORLD

    proved = yield from _let_in(me.secret, name_of(me.rank), verdict)
    return proved.peer


def as_dialler(me: Identity, peer: int) -> Talk:
    """Prove the secret to rank `peer`, as the side that dials.

    Raises:
        StrangerError: the listener isn't that rank, or refuses us.
    """
    proved = yield from _introduce(me, Role.PEER, name_of(peer), peer)
    return proved.peer


def as_service(me: Identity, name: str) -> KeyedTalk:
    """Admit ranks of the job and newcomers to the service `name`.

    Raises:
        StrangerError: the dialler doesn't belong to this job.
    """

    def verdict(role: int, world_size: int, rank: int) -> int:
        if role == Role.NEWCOMER:
            return _WELCOME if rank == NO_RANK else _WRONG_ROLE
        if role != Role.CALLER:
            return _WRONG_ROLE
        is_ours = world_size == me.world_size and 0 <= rank < world_size
        return _WELCOME if is_ours else _WRONG_WORLD

    return (yield from _let_in(me.secret, name, verdict))


def as_caller(me: Identity, name: str) -> KeyedTalk:
    """Prove the secret to the service `name`, as a newcomer with `NO_RANK`.

    Raises:
        StrangerError: the listener isn't that service, or refuses us.
    """
    role = Role.NEWCOMER if me.rank == NO_RANK else Role.CALLER
    return (yield from _introduce(me, role, name, NO_RANK))


def name_of(listener: int | str) -> str:
    """Return the name by which a proof refers to a listener, a rank or a service."""
    return f"rank {listener}" if isinstance(listener, int) else listener


def _let_in(
    secret: bytes, name: str, verdict_on: Callable[[int, int, int], int]
) -> KeyedTalk:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    said = yield _GREETING.pack(MARK, nonce), _CLAIM.size
    mark, role, world_size, rank, their_nonce, proof = _CLAIM.unpack(said)
    if mark != MARK:
        raise StrangerError("it does not speak this protocol")
    facts = _facts(role, rank, name, world_size)
    expected = _proof(secret, b"dialler", facts, their_nonce + nonce)
    if not hmac.compare_digest(proof, expected):
        yield _VERDICT.pack(MARK, _WRONG_SECRET, bytes(32)), 0
        raise StrangerError("it does not have this job's secret")
    verdict = verdict_on(role, world_size, rank)
    if verdict != _WELCOME:
        yield _VERDICT.pack(MARK, verdict, bytes(32)), 0
        wrong_world = f"it is rank {rank} of a job of {world_size} ranks"
        wrong_role = f"it comes in a role (number {role}) that is not for {name}"
        raise StrangerError(wrong_role if verdict == _WRONG_ROLE else wrong_world)
    answer = _proof(secret, b"listener", facts, nonce + their_nonce)
    yield _VERDICT.pack(MARK, _WELCOME, answer), 0
    return Proved(rank, _proof(secret, b"key", facts, their_nonce + nonce))


def _introduce(me: Identity, role: Role, name: str, peer: int) -> KeyedTalk:
    said = yield b"", _GREETING.size
    mark, their_nonce = _GREETING.unpack(said)
    if mark != MARK:
        raise StrangerError("it does not speak this protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    facts = _facts(role, me.rank, name, me.world_size)
    proof = _proof(me.secret, b"dialler", facts, nonce + their_nonce)
    claim = _CLAIM.pack(MARK, role, me.world_size, me.rank, nonce, proof)
    said = yield claim, _VERDICT.size
    mark, verdict, answer = _VERDICT.unpack(said)
    if mark != MARK or verdict == _WRONG_SECRET:
        raise StrangerError("it says that our secret is not its own")
    if verdict == _WRONG_ROLE:
        raise StrangerError(f"it takes nobody as {role.name.lower()}")
    if verdict != _WELCOME:
        raise StrangerError(f"its job does not have {me.world_size} ranks")
    expected = _proof(me.secret, b"listener", facts, their_nonce + nonce)
    if not hmac.compare_digest(answer, expected):
        raise StrangerError("it does not have this job's secret")
    return Proved(peer, _proof(me.secret, b"key", facts, nonce + their_nonce))


def _facts(role: int, dialler: int, listener: str, world_size: int) -> bytes:
    return struct.pack("!8sIiI", MARK, role, dialler, world_size) + listener.encode()


def _proof(secret: bytes, purpose: bytes, facts: bytes, nonces: bytes) -> bytes:
    # Of fixed length but for the listener's name, which comes last: none can pass for
    # another.
    return hmac.digest(secret, struct.pack("!8s", purpose) + nonces + facts, "sha256")
