"""Ranks meet over sockets, and who is none of them is turned away and changes nothing.

The clocks here only keep a hang from hanging the suite; nothing measures speed.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distlab.comm import MeetingError, TcpComm
from distlab.comm.tcp import mesh
from distlab.comm.tcp.handshake import (
    MARK,
    Identity,
    StrangerError,
    as_dialler,
    as_listener,
)
from tests.workbench.conformance.meeting import (
    SECRET,
    DictStore,
    dial,
    join,
    ranks,
    speak,
)
from tests.workbench.golden import Golden
from tests.workbench.naming import named

CLAIM_BYTES = 84


def total(comm: TcpComm) -> float:
    """A sum that needs every rank."""
    tensor = torch.full((3,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    return float(tensor[2])


def agree(listener: Identity, dialler: Identity, peer: int = 0) -> list[bytes]:
    """A whole handshake in memory; what travelled, or the error of who objected."""
    inside, outside = as_listener(listener), as_dialler(dialler, peer)
    greeting, _ = next(inside)
    next(outside)
    claim, _ = outside.send(greeting)
    answer, _ = inside.send(claim)
    with pytest.raises(StopIteration) as dialled:
        outside.send(answer)
    with pytest.raises(StopIteration) as let_in:
        inside.send(b"")
    assert (dialled.value.value, let_in.value.value) == (peer, dialler.rank)
    return [greeting, claim, answer]


# ── the handshake ───────────────────────────────────────────────────────────────────


def test_who_has_the_secret_comes_in_and_it_never_travels() -> None:
    said = agree(Identity(SECRET, 0, 3), Identity(SECRET, 2, 3))
    again = agree(Identity(SECRET, 0, 3), Identity(SECRET, 2, 3))
    assert [len(words) for words in said] == [40, CLAIM_BYTES, 44]
    for size in range(8, 33, 8):
        assert not any(SECRET[:size] in words for words in said)
    assert not {*said} & {*again}  # nothing of one handshake serves in another


@pytest.mark.parametrize(
    ("listener", "dialler", "inside", "outside"),
    [
        (
            Identity(SECRET, 0, 2),
            Identity(SECRET[::-1], 1, 2),
            ("secret",),
            ("secret",),
        ),
        (
            Identity(SECRET, 0, 2),
            Identity(SECRET, 1, 3),
            ("rank 1", 3),
            (3,),
        ),
        (
            Identity(SECRET, 0, 2),
            Identity(SECRET, 2, 2),
            ("rank 2", 2),
            (2,),
        ),
        (  # a proof is for one listener: another cannot pass it on
            Identity(SECRET, 1, 3),
            Identity(SECRET, 2, 3),
            ("secret",),
            ("secret",),
        ),
    ],
    ids=["secret", "world", "rank", "passed on"],
)
def test_who_proves_nothing_stays_out(
    listener: Identity,
    dialler: Identity,
    inside: tuple[object, ...],
    outside: tuple[object, ...],
) -> None:
    door, guest = as_listener(listener), as_dialler(dialler, 0)
    greeting, _ = next(door)
    next(guest)
    claim, _ = guest.send(greeting)
    answer, needs = door.send(claim)
    assert (needs, answer[-32:]) == (0, bytes(32))  # it learns no proof
    with pytest.raises(StrangerError) as told:
        guest.send(answer)
    assert named(str(told.value), *outside)
    with pytest.raises(StrangerError) as noted:
        door.send(b"")
    assert named(str(noted.value), *inside)


def test_a_proof_serves_only_once() -> None:
    _, claim, answer = agree(Identity(SECRET, 0, 2), Identity(SECRET, 1, 2))
    door = as_listener(Identity(SECRET, 0, 2))
    next(door)
    door.send(claim)
    with pytest.raises(StrangerError, match="secret"):
        door.send(b"")
    guest = as_dialler(Identity(SECRET, 1, 2), 0)
    next(guest)
    guest.send(next(as_listener(Identity(SECRET, 0, 2)))[0])
    with pytest.raises(StrangerError, match="secret"):
        guest.send(answer)


@pytest.mark.parametrize("turn", [0, 1])
def test_another_protocol_is_recognised(turn: int) -> None:
    guest = as_dialler(Identity(SECRET, 1, 2), 0)
    next(guest)
    words = b"HTTP/1.1 400 Bad Request" + bytes(200)
    if turn:
        guest.send(next(as_listener(Identity(SECRET, 0, 2)))[0])
    with pytest.raises(StrangerError, match=("protocol", "secret")[turn]):
        guest.send(words[: 44 if turn else 40])


# ── meeting ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_meet_through_any_store(n: int) -> None:
    threads = threading.active_count()
    assert ranks(total, n) == [n * (n + 1) / 2] * n
    assert threading.active_count() == threads


def test_nobody_listens_once_all_are_there() -> None:
    store = DictStore()

    def knock(comm: TcpComm) -> str:
        comm.barrier()
        with pytest.raises(OSError, match="refused") as refused:
            socket.create_connection(store.address(comm.rank), timeout=5)
        comm.barrier()
        return str(refused.value)

    assert len(ranks(knock, 2, store=store)) == 2


IMPOSSIBLE: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "secret": ({"secret": b"short"}, ("secret", 5, 16)),
    "every address": ({"host": "0.0.0.0"}, ("0.0.0.0",)),
    "no host": ({"host": "no such host"}, ("'no such host'",)),
    "another machine": ({"host": "192.0.2.1"}, ("192.0.2.1",)),
    "rank": ({"rank": 2}, ("rank 2", 2)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_is_refused(what: str) -> None:
    how, values = IMPOSSIBLE[what]
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - `named` tells them apart
        join(DictStore(), **{"rank": 0, "world_size": 2, **how})
    assert named(str(refused.value), *values)


def test_a_port_in_use_is_named(golden: Golden) -> None:
    texts = []
    for what, (how, _) in IMPOSSIBLE.items():
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            join(DictStore(), **{"rank": 0, "world_size": 2, **how})
        system = getattr(refused.value.__context__, "strerror", None) or "<none>"
        texts.append(f"{what}: {refused.value}".replace(system, "<the system's>"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            join(DictStore(), 0, 2, port=port)
    assert named(str(refused.value), port, "127.0.0.1", 0)
    golden("tcp/no meeting", "\n".join([*texts, f"port in use: {refused.value}"]))


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(rank: int, missing: int) -> None:
    says = rf"^rank {rank} .*\b0\.\d s .*rank {missing}\b"
    with pytest.raises(MeetingError, match=says):
        join(DictStore(), rank, 2, timeout_s=0.1)


def test_all_ranks_that_never_come_are_named() -> None:
    with pytest.raises(MeetingError, match=r"^rank 0 .*\[1, 2\]"):
        join(DictStore(), 0, 3, timeout_s=0.1)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1|{closed}", r"rank 1\b.*rank 0\b.*127.0.0.1:{closed}\b"),
        ("nonsense", "tcp/0"),
        ("127.0.0.1|http", "tcp/0"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(address: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    store = DictStore()
    store.set("tcp/0", address.format(closed=closed).encode())
    with pytest.raises(MeetingError, match=says.format(closed=closed)):
        join(store, 1, 2)


# ── strangers ───────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def rank_zero(store: DictStore, n: int = 2) -> Iterator[Callable[[], float]]:
    """Rank 0 waits at its door; the rest comes, and the sum is told, on demand."""

    def live() -> tuple[float, TcpComm]:
        comm = join(store, 0, n)
        with contextlib.closing(comm):
            return total(comm), comm

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live)

        def finish() -> Any:
            ranks(total, n, store=store, only=tuple(range(1, n)))
            return waiting.result(timeout=20)

        yield finish


def knock(store: DictStore, words: bytes) -> bytes:
    """Say something to rank 0; what it answers until it closes, or nothing more."""
    with socket.create_connection(store.address(0), timeout=10) as stranger:
        heard = b""
        with contextlib.suppress(ConnectionError):
            stranger.sendall(words)
            while piece := stranger.recv(1 << 16):
                heard += piece
        return heard


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n" + bytes(80),
    "zeros": bytes(CLAIM_BYTES),
    "too long": b"\xff" * 100_000,
    "no proof": MARK + b"\xff" * (CLAIM_BYTES - 8),
}


def test_a_stranger_is_turned_away_and_the_job_goes_on(
    caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    reasons = {}
    for name, words in STRANGERS.items():
        store = DictStore()
        caplog.clear()
        with rank_zero(store) as finish:
            assert len(knock(store, words)) <= 40 + 44
            result, comm = finish()
        ((reasons[name], count),) = comm.turned_away.items()
        assert (result, count) == (3.0, 1), name
        (logged,) = caplog.messages
        assert named(logged, "rank 0", reasons[name]), name
    *unlike, no_proof = reasons.values()
    assert len({*unlike}) == 1
    assert no_proof not in unlike
    assert named(no_proof, "secret")
    golden("tcp/turned away", "\n".join([*dict.fromkeys(reasons.values()), logged]))


def test_who_has_another_secret_is_told_so_and_the_job_goes_on() -> None:
    store = DictStore()
    with rank_zero(store) as finish:
        with pytest.raises(MeetingError, match=r"1 .*\b0 .*\bsecret\b"):
            join(store, 1, 2, secret=SECRET[::-1])
        result, comm = finish()
    assert (result, comm.turned_away.total()) == (3.0, 1)


def test_a_rank_that_comes_twice_is_turned_away() -> None:
    store = DictStore()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as kept:
        waiting = pool.submit(join, store, 0, 3)
        kept.enter_context(dial(store, 1, 0, 3))
        second = kept.enter_context(dial(store, 1, 0, 3))
        assert second.recv(1) == b""
        kept.enter_context(dial(store, 2, 0, 3))
        comm = waiting.result(timeout=20)
        comm.close()
    ((reason, count),) = comm.turned_away.items()
    assert count == 1
    assert named(reason, "rank 1")


def test_who_says_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "PATIENCE_S", 0.05)
    store = DictStore()
    with rank_zero(store) as finish:
        assert len(knock(store, b"")) == 40  # until its patience has ended
        assert len(knock(store, b"dlab")) == 40
        result, comm = finish()
    ((reason, count),) = comm.turned_away.items()
    assert (result, count) == (3.0, 2)
    assert named(reason, "0.05")


def test_the_silent_do_not_keep_the_ranks_out() -> None:
    """More than may wait at the door, all silent: the job comes through the crowd."""
    store = DictStore()
    with rank_zero(store) as finish, contextlib.ExitStack() as crowd:
        for _ in range(mesh.MAX_AT_THE_DOOR + 20):
            crowd.enter_context(socket.create_connection(store.address(0), timeout=10))
        result, comm = finish()
    assert result == 3.0
    ((_, count),) = comm.turned_away.items()
    assert count >= 20


def test_two_thousand_broken_handshakes_change_nothing() -> None:
    """Random words and mutated true claims, cut off or too long, at a live listener."""
    chance, store = random.Random(5), DictStore()
    with rank_zero(store) as finish:
        address = store.address(0)
        tracemalloc.start()
        for _ in range(2000):
            stranger = socket.create_connection(address, timeout=10)
            with stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(_broken_claim(chance, stranger.recv(40)))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        result, comm = finish()
    assert result == 3.0
    assert comm.turned_away.total() == 2000
    assert peak_bytes < 4 << 20


def _broken_claim(chance: random.Random, greeting: bytes) -> bytes:
    talk = as_dialler(Identity(SECRET, 1, 2), 0)
    next(talk)
    claim = bytearray(talk.send(greeting)[0])
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    if kind == 1:
        return bytes(claim[: chance.randrange(len(claim))])
    for place in chance.sample(range(len(claim)), chance.randrange(1, 4)):
        claim[place] ^= 1 << chance.randrange(8)
    return bytes(claim) + chance.randbytes(chance.randrange(2) * 1000)


def test_a_flood_is_logged_a_few_times_and_counted_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = DictStore()
    with rank_zero(store) as finish:
        for _ in range(30):
            knock(store, bytes(CLAIM_BYTES))
        _, comm = finish()
    assert len(caplog.messages) == mesh.MAX_LOGGED
    assert comm.turned_away.total() == 30


def test_a_rank_that_waits_in_vain_says_who_was_turned_away() -> None:
    store, failed = DictStore(), []

    def live() -> None:
        try:
            join(store, 0, 2, timeout_s=0.5)
        except MeetingError as error:
            failed.append(str(error))

    thread = threading.Thread(target=live)
    thread.start()
    knock(store, bytes(CLAIM_BYTES))
    thread.join()
    assert named(failed[0], "rank 0", "rank 1", "1 ×", "protocol")


def test_a_dialler_cut_off_dials_again() -> None:
    """Rank 0 is pressed and closes at once: rank 1 comes back until it is heard."""
    store = DictStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("tcp/0", b"127.0.0.1|%d" % server.getsockname()[1])

        def press() -> int:
            for _ in range(3):
                server.accept()[0].close()
            connection, _ = server.accept()
            with connection:
                return speak(as_listener(Identity(SECRET, 0, 2)), connection)

        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(press)
            comm = join(store, 1, 2)
            assert came.result(timeout=20) == 1
            comm.close()
