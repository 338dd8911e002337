"""Callers and services over sockets of this process: reconnecting, and who is who.

The clocks here only keep a hang from hanging the suite; nothing measures speed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from distlab.comm import PeerLost
from distlab.comm.key_values import KeyValues
from distlab.comm.services import PeerGone
from distlab.comm.tcp.caller import Address, _left_s
from distlab.comm.tcp.desk import Desk
from distlab.comm.tcp.endpoint import STORE, Directory, TcpEndpoint, store_of
from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import StrangerError, as_caller
from distlab.comm.tcp.sealed import FROM_CALLER, Kind, Sealed, Sealer
from distlab.comm.tcp.server import NAME_BYTES, Server
from distlab.runner.doors import Door

PATIENCE_S = 20.0
BEFORE_ANSWERS = 40 + 44 + 60 + 16  # bytes: greeting, verdict, the service's HELLO
SECRET = bytes(range(32))


@contextmanager
def serving(
    listener: socket.socket, directory: Directory, service: Any, name: str = "ps"
) -> Iterator[Server]:
    """A life of a service, in a thread."""
    server = Server(listener, directory.identity(), name, service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as door:
        yield door


def directory_to(address: Address, name: str = "ps") -> Directory:
    return Directory(addresses={name: address}, secret=SECRET, world_size=4)


class Counts:
    """Tells how often it was asked, and notes by whom."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bytes]] = []
        self.has_come = threading.Event()

    def handle(self, peer: int, message: bytes) -> bytes | None:
        self.asked.append((peer, message))
        self.has_come.set()
        return None if message == b"never" else b"%d" % len(self.asked)


class Notes(Counts):
    """Notes who is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[int] = []
        self.is_told = threading.Event()

    def on(self, event: object, now_s: float) -> Sequence[object]:
        if isinstance(event, PeerGone):
            self.gone.append(event.peer)
            self.is_told.set()
        return []


class Cutter:
    """Between caller and service; cuts the first connections before the first answer.

    The request has arrived by then, and its answer is lost on the way.
    """

    def __init__(self, address: Address, cuts: int) -> None:
        self._address, self._left = address, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self.num_connections = 0
        self._stack = ExitStack()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._stack.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._address)
            self._stack.callback(near.close)
            self._stack.callback(far.close)
            self.num_connections += 1
            limit = BEFORE_ANSWERS if self._left > 0 else 1 << 40
            self._left -= 1
            for source, target, most in ((near, far, 1 << 40), (far, near, limit)):
                threading.Thread(
                    target=_pump, args=(source, target, most), daemon=True
                ).start()


def _pump(source: socket.socket, target: socket.socket, most: int) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data[:most])
            most -= len(data)
            if most < 0:
                break
        for one in (source, target):
            one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


# ── a connection that breaks ────────────────────────────────────────────────────────


@pytest.mark.parametrize("cuts", [0, 1, 3])
def test_a_request_is_sent_again_and_handled_once(door: Door, cuts: int) -> None:
    service = Counts()
    directory = directory_to(door.address)
    with (
        serving(door.listen(), directory, service),
        closing(Cutter(door.address, cuts)) as cutter,
        closing(TcpEndpoint(directory_to(cutter.address), 1)) as endpoint,
    ):
        replies = [endpoint.call("ps", b"push", PATIENCE_S) for _ in range(3)]
        assert cutter.num_connections == 1 + cuts
    assert replies == [b"1", b"2", b"3"]
    assert service.asked == [(1, b"push")] * 3


def test_another_life_of_the_service_is_not_asked_again(door: Door) -> None:
    """It died while it had the request: whether it was handled is not known."""
    directory, first, second = directory_to(door.address), Counts(), Counts()
    with (
        closing(TcpEndpoint(directory, 1)) as endpoint,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as lives,
    ):
        with serving(door.listen(), directory, first):
            asked = pool.submit(endpoint.call, "ps", b"never", PATIENCE_S)
            assert first.has_come.wait(PATIENCE_S)
            lives.enter_context(serving(door.listen(), directory, second))
        with pytest.raises(PeerLost) as lost:
            asked.result(PATIENCE_S)
        assert lost.value.peer == "ps"
        assert second.asked == []
        assert endpoint.call("ps", b"now", PATIENCE_S) == b"1"


def test_a_service_that_started_anew_between_two_calls_is_found(door: Door) -> None:
    directory = directory_to(door.address)
    with closing(TcpEndpoint(directory, 1)) as endpoint:
        for _ in range(3):
            with serving(door.listen(), directory, Counts()):
                assert endpoint.call("ps", b"?", PATIENCE_S) == b"1"
                assert endpoint.call("ps", b"?", PATIENCE_S) == b"2"
        with pytest.raises(PeerLost) as lost:
            endpoint.call("ps", b"?", PATIENCE_S)
    assert (lost.value.rank, lost.value.peer, lost.value.step) == (1, "ps", 7)


def test_who_was_not_answered_in_time_is_not_gone(door: Door) -> None:
    """A service is told of the end of a process, not of a call that was given up."""
    directory, service = directory_to(door.address), Notes()
    with serving(door.listen(), directory, service):
        with closing(TcpEndpoint(directory, 1)) as endpoint:
            for _ in range(3):
                with pytest.raises(PeerLost):
                    endpoint.call("ps", b"never", 0.05)
            assert endpoint.call("ps", b"now", PATIENCE_S)
            assert service.gone == []
        assert service.is_told.wait(PATIENCE_S)
    assert service.gone == [1]


def test_a_patience_of_years_does_not_end_at_once() -> None:
    assert _left_s(time.monotonic() + 1e9) is None
    with pytest.raises(TimeoutError):
        _left_s(0.0)


def test_a_call_that_was_given_up_is_not_offered_again() -> None:
    """The next call says so; the service's clock may not know it yet."""

    class Deaf:
        def answer(self, kind: Kind, number: int, payload: bytes) -> None:
            pass

    service, line = Counts(), Deaf()
    desk = Desk(service.handle, now_s=lambda: 0.0)
    caller = desk.arrive(bytes(NAME_BYTES), 1, line)
    for number, oldest, message in ((1, 1, b"never"), (2, 1, b"a"), (3, 3, b"b")):
        desk.take(caller, line, Sealed(Kind.CALL, number, oldest, 9.0, message))
    offered = [message for _, message in service.asked]
    assert offered == [b"never", b"a", b"never", b"b"]


def test_who_finds_a_service_started_anew_is_not_gone_there(door: Door) -> None:
    directory, first, second = directory_to(door.address), Notes(), Notes()
    with (
        closing(TcpEndpoint(directory, 1)) as endpoint,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as lives,
    ):
        with serving(door.listen(), directory, first):
            asked = pool.submit(endpoint.call, "ps", b"never", PATIENCE_S)
            assert first.has_come.wait(PATIENCE_S)
            lives.enter_context(serving(door.listen(), directory, second))
        with pytest.raises(PeerLost):
            asked.result(PATIENCE_S)
        assert endpoint.call("ps", b"now", PATIENCE_S) == b"1"
        assert second.gone == []


# ── who calls ───────────────────────────────────────────────────────────────────────


def test_callers_without_a_rank_have_numbers_of_their_own(door: Door) -> None:
    service, directory = Counts(), directory_to(door.address)
    with serving(door.listen(), directory, service), ExitStack() as stack:
        for _ in range(2):
            newcomer = stack.enter_context(closing(TcpEndpoint(directory)))
            newcomer.call("ps", b"a", PATIENCE_S)
            newcomer.call("ps", b"b", PATIENCE_S)
    assert [peer for peer, _ in service.asked] == [-1, -1, -2, -2]


def test_of_a_rank_the_latest_process_counts(door: Door) -> None:
    directory = directory_to(door.address)
    with (
        serving(door.listen(), directory, Counts()) as server,
        closing(TcpEndpoint(directory, 1)) as old,
        closing(TcpEndpoint(directory, 1)) as new,
    ):
        assert old.call("ps", b"?", PATIENCE_S) == b"1"
        assert new.call("ps", b"?", PATIENCE_S) == b"2"
        with pytest.raises(FrameError, match='"ps"'):
            old.call("ps", b"?", PATIENCE_S)
        assert new.call("ps", b"?", PATIENCE_S) == b"3"
    assert sum(server.turned_away.values()) == 1


@pytest.mark.parametrize(
    ("changes", "rank", "why"),
    [
        ({"secret": bytes(32)}, 1, r"\bsecret\b"),
        ({"world_size": 5}, 1, r"\b5\b"),
        ({}, 4, r"\b4\b"),
    ],
)
def test_who_is_none_of_the_job_is_told_so(
    door: Door, changes: dict[str, Any], rank: int, why: str
) -> None:
    service, directory = Counts(), directory_to(door.address)
    with (
        serving(door.listen(), directory, service) as server,
        closing(TcpEndpoint(replace(directory, **changes), rank)) as stranger,
    ):
        with pytest.raises(StrangerError, match=why):
            stranger.call("ps", b"?", PATIENCE_S)
        with closing(TcpEndpoint(directory, 1)) as endpoint:
            assert endpoint.call("ps", b"?", PATIENCE_S) == b"1"
    assert sum(server.turned_away.values()) == 1
    assert "secret" not in repr(directory)  # the secret is not shown


def test_threads_of_one_process_do_not_wait_for_each_other(door: Door) -> None:
    here: set[bytes] = set()

    def handle(peer: int, message: bytes) -> bytes | None:
        here.add(message)
        return message if len(here) == 5 else None

    directory = directory_to(door.address)
    with (
        serving(door.listen(), directory, handle),
        closing(TcpEndpoint(directory, 2)) as endpoint,
        ThreadPoolExecutor(5) as pool,
    ):
        texts = [b"%d" % k for k in range(5)]
        ask: Callable[[bytes], bytes] = lambda t: endpoint.call("ps", t, PATIENCE_S)  # noqa: E731
        assert list(pool.map(ask, texts)) == texts


def prove(directory: Directory, rank: int) -> tuple[socket.socket, Sealer]:
    """A bare connection to "ps" of one who has the secret and says HELLO."""
    connection = socket.create_connection(directory.addresses["ps"], PATIENCE_S)
    talk = as_caller(directory.identity(rank), "ps")
    words, needs = next(talk)
    while True:
        try:
            words, needs = talk.send(connection.recv(needs, socket.MSG_WAITALL))
        except StopIteration as end:
            sealer = Sealer(end.value.key, FROM_CALLER)
            break
        connection.sendall(words)
    connection.sendall(sealer.seal(Kind.HELLO, b"n" * NAME_BYTES))
    return connection, sealer


def test_who_reads_no_answers_is_not_read_either_and_nobody_waits(door: Door) -> None:
    directory, large = directory_to(door.address), bytes(1 << 20)
    service = Counts()

    def handle(peer: int, message: bytes) -> bytes:
        service.handle(peer, message)
        return large

    with (
        serving(door.listen(), directory, handle),
        closing(TcpEndpoint(directory, 1)) as endpoint,
    ):
        lazy, sealer = prove(directory, 2)
        with lazy:
            lazy.setblocking(False)
            number = 0
            with contextlib.suppress(BlockingIOError):  # no more is taken from him
                for number in range(1, 500):
                    call = sealer.seal(
                        Kind.CALL, large, number=number, oldest=number, patience_s=9.0
                    )
                    if lazy.send(call) < len(call):
                        break
            assert number < 100
            assert endpoint.call("ps", b"?", PATIENCE_S) == large
        assert len([peer for peer, _ in service.asked if peer == 2]) < 10


# ── the store ───────────────────────────────────────────────────────────────────────


def test_a_newcomer_uses_the_store(door: Door) -> None:
    directory = directory_to(door.address, STORE)
    with (
        serving(door.listen(), directory, KeyValues(), STORE),
        closing(TcpEndpoint(directory)) as newcomer,
    ):
        store = store_of(newcomer)
        assert store.add("generation", 1) == 1
        assert store.compare_set("leader", b"", b"me") == b"me"
        assert store.get("leader") == b"me"


def test_nobody_has_more_connections_than_there_are(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.comm.tcp.server.MAX_GUESTS", 3)
    monkeypatch.setattr("distlab.comm.tcp.desk.MAX_LINES", 2)
    directory = directory_to(door.address)
    with (
        serving(door.listen(), directory, Counts()) as server,
        closing(TcpEndpoint(directory, 1)) as endpoint,
        ExitStack() as stack,
    ):
        assert endpoint.call("ps", b"?", PATIENCE_S) == b"1"
        for _ in range(2):
            stack.enter_context(prove(directory, 2)[0])
        crowded = stack.enter_context(closing(TcpEndpoint(directory, 3)))
        with pytest.raises(PeerLost):
            crowded.call("ps", b"?", 0.2)
        assert endpoint.call("ps", b"?", PATIENCE_S) == b"2"
    ((_, count),) = server.turned_away.items()
    assert count >= 1
