"""Frames that are broken, from a peer that has the secret: one clear line, no crash."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distlab.comm import CommRefusedError, PeerLost
from distlab.comm.tcp.exchange import Exchange
from distlab.comm.tcp.flights import Membership, Transfer
from distlab.comm.tcp.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    Kind,
    code_of,
    header,
    memory_of,
    parse,
)
from distlab.comm.tcp.line import READ_AHEAD, Line
from tests.workbench.conformance.meeting import DictStore, dial, ranks
from tests.workbench.golden import Golden
from tests.workbench.naming import named

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64")
WORLD = Membership("world", range(2), 0)
HEAD_BYTES = len(header(Kind.BYE, 0))


def data(length: int = 8, sequence: int = 0, **fields: int) -> bytes:
    elements = fields.pop("elements", length // 4)
    facts = {"dtype": code_of(torch.float32), "elements": elements, **fields}
    return header(Kind.DATA, WORLD.id, 0, sequence, length=length, **facts)


# ── headers ─────────────────────────────────────────────────────────────────────────


def test_a_header_is_read_as_it_was_written() -> None:
    frame = parse(b"xx" + data(8, 7), 2)
    expected = (b"dlab\x01", Kind.DATA, code_of(torch.float32), WORLD.id, 0, 7, 2, 8)
    assert frame == Frame(*expected)
    assert parse(header(Kind.GRANT, 1, -5)).tag == -5


# Each with what its refusal has to name.
BAD_HEADERS: dict[str, tuple[bytes, tuple[object, ...]]] = {
    "magic": (b"HTTP/1.1 200 OK" + bytes(40), ("b'HTTP'", "b'dlab'")),
    "version": (b"dlab\x02" + bytes(50), (2, 1)),
    "kind 0": (b"dlab\x01\x00" + bytes(50), ("kind", 0)),
    "kind 7": (b"dlab\x01\x07" + bytes(50), ("kind", 7)),
    "grant": (header(Kind.GRANT, 1, length=1), ("GRANT",)),
    "bye": (header(Kind.BYE, 1, elements=1), ("BYE",)),
    "huge": (data(1 << 62), (1 << 62, MAX_PAYLOAD_BYTES)),
    "dtype": (data(8, dtype=99), ("dtype", 99)),
    "uneven": (data(9), (9, 2, 4)),
    "none": (data(0, elements=5), (0, 5, 4)),
}


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_a_header_that_cannot_be_is_named(header: str) -> None:
    frame, values = BAD_HEADERS[header]
    with pytest.raises(FrameError) as refused:
        parse(frame)
    assert named(str(refused.value), *values)


def test_the_sentences_about_headers(golden: Golden) -> None:
    texts = []
    for name, (frame, _) in BAD_HEADERS.items():
        with pytest.raises(FrameError) as refused:
            parse(frame)
        texts.append(f"{name}: {refused.value}")
    golden("tcp/headers", "\n".join(texts))


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensors_memory_is_its_own(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.zeros(2, 3, dtype=dtype, requires_grad=name == "float64")
    sample = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    (view, _), (source, _) = memory_of(tensor), memory_of(sample)
    view[:] = source
    assert torch.equal(tensor.detach(), sample)
    assert len(view) == 6 * dtype.itemsize
    assert code_of(dtype) > 0


def test_memory_that_is_not_the_cpus_is_refused() -> None:
    with pytest.raises(CommRefusedError, match=r"\bmeta\b.*\.cpu\b"):
        memory_of(torch.empty(2, device="meta"))


# ── what a peer can send ────────────────────────────────────────────────────────────


@contextlib.contextmanager
def exchange() -> Iterator[tuple[Exchange, socket.socket]]:
    """Rank 0's side, and the bare socket of rank 1."""
    ours, theirs = socket.socketpair()
    group = Membership("world", range(2), 0)
    with ours, theirs:
        made = Exchange(0, [Line(ours, 1)])
        made.add_group(group)
        yield made, theirs


def take_in(made: Exchange) -> None:
    made.read(made.peers[1])
    made.settle()


def take_in_all(made: Exchange) -> None:
    """As a poller would have it: as long as there is something, or the end."""
    line = made.peers[1].line.socket
    while not made.peers[1].lost and select.select([line], [], [], 0)[0]:
        take_in(made)


def expect(made: Exchange, box: torch.Tensor) -> Transfer:
    group = made._groups[WORLD.id]
    transfer = Transfer(group, (group.id, 0), 1, box)
    made.receive(transfer)
    return transfer


def test_a_message_arrives_byte_by_byte() -> None:
    box, sample = torch.zeros(2), torch.tensor([1.5, -2.0])
    with exchange() as (made, theirs):
        transfer = expect(made, box)
        for byte in data() + bytes(memory_of(sample)[0]):
            assert not transfer.done
            theirs.sendall(bytes([byte]))
            take_in(made)
        assert transfer.done
    assert torch.equal(box, sample)


def test_memory_outlives_the_tensor_it_was_taken_from() -> None:
    """As when a learner swaps `p.data` while a message into it is under way."""
    box = torch.zeros(1 << 20)
    with exchange() as (made, theirs):
        transfer = expect(made, box)
        box.data = torch.ones(2)
        torch.zeros(1 << 20)
        theirs.sendall(data(8) + bytes(8))
        take_in(made)
        assert (transfer.done, transfer.storage.nbytes()) == (True, 4 << 20)
        assert box.tolist() == [1, 1]


def test_a_long_message_is_not_kept_outside_its_tensor() -> None:
    box, sample = torch.zeros(1 << 20), torch.arange(float(1 << 20))
    words = data(1 << 22) + bytes(memory_of(sample)[0])
    with exchange() as (made, theirs), ThreadPoolExecutor(1) as pool:
        transfer = expect(made, box)
        tracemalloc.start()
        sending = pool.submit(theirs.sendall, words)
        while not transfer.done:
            take_in(made)
        sending.result()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert torch.equal(box, sample)
        assert peak_bytes < 1 << 20


@pytest.mark.parametrize("length", [12, 4 * READ_AHEAD])
def test_a_message_too_long_is_an_error_of_that_receive_alone(length: int) -> None:
    box = torch.zeros(2)
    with exchange() as (made, theirs):
        first, second = expect(made, box), expect(made, torch.zeros(2))
        theirs.sendall(data(length) + bytes(length) + data(8, 1) + bytes(8))
        take_in(made)
        assert first.done
        assert named(str(first.error), length, 8)
        assert box.tolist() == [0, 0]
        assert (second.done, second.error) == (True, None)


# Each with what the loss of its line has to name.
BAD_FRAMES: dict[str, tuple[bytes, tuple[object, ...]]] = {
    "magic": (bytes(100), ("b'dlab'",)),
    "huge": (data(1 << 62), (1 << 62, MAX_PAYLOAD_BYTES)),
    "data": (data(8, 1), ("DATA", 1, 0)),
    "grant": (header(Kind.GRANT, WORLD.id, 0, 3), ("GRANT", 3, 0)),
    "announce": (
        header(Kind.ANNOUNCE, WORLD.id, 0, 3) + header(Kind.ANNOUNCE, WORLD.id, 0),
        ("ANNOUNCE", 0, 4),
    ),
    "unasked": (data() + bytes(8) + data(8, 1), ("message",)),
    "head": (data()[:20], ("closed",)),
    "payload": (data() + bytes(5), ("closed",)),
    "silence": (b"", ("closed",)),
}


def test_a_broken_frame_ends_that_line_with_a_sentence(golden: Golden) -> None:
    texts = []
    for name, (frames, values) in BAD_FRAMES.items():
        with exchange() as (made, theirs):
            transfer = expect(made, torch.zeros(2))
            theirs.sendall(frames)
            theirs.shutdown(socket.SHUT_WR)
            take_in_all(made)
            lost = made.peers[1].lost
            assert lost is not None, name
            assert named(str(lost), *values), name
            assert transfer.done, name
            assert made.pending == 0, name
            texts.append(f"{name}: {lost}")
    golden("tcp/broken frames", "\n".join(texts))


def test_a_group_given_up_before_we_made_it_is_lost_from_the_start() -> None:
    late = Membership("world/0:[0, 1]", range(2), 0)
    with exchange() as (made, theirs):
        theirs.sendall(header(Kind.CLOSE, late.id))
        take_in(made)
        made.add_group(late)
        transfer = Transfer(late, (late.id, 0), 1, torch.zeros(2))
        made.receive(transfer)
        assert named(str(transfer.error), "rank 1", "group")
        assert not expect(made, torch.zeros(2)).done  # the world stands


def test_two_thousand_mutated_frames_end_lines_and_nothing_else() -> None:
    """Whatever comes, a line either goes on or is lost; nothing else is ever raised."""
    chance = random.Random(3)
    ends = {"lost": 0, "still there": 0}
    tracemalloc.start()
    for _ in range(2000):
        with exchange() as (made, theirs):
            transfers = [expect(made, torch.zeros(size)) for size in (2, 600)]
            theirs.sendall(_mutated(chance))
            take_in_all(made)
            ends["lost" if made.peers[1].lost else "still there"] += 1
            theirs.shutdown(socket.SHUT_WR)
            take_in_all(made)
            assert made.peers[1].lost
            assert all(transfer.done for transfer in transfers)
            assert made.pending == 0
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert min(ends.values()) > 200
    assert peak_bytes < 4 << 20


def _mutated(chance: random.Random) -> bytes:
    space = WORLD.id
    frames = bytearray(
        data() + bytes(8) + header(Kind.GRANT, space) + data(2400, 1) + bytes(2400)
    )
    if chance.random() < 0.2:
        return chance.randbytes(chance.randrange(3000))
    if chance.random() < 0.3:
        first = chance.randrange(len(frames))
        del frames[first : first + chance.randrange(HEAD_BYTES)]
    for _ in range(chance.randrange(4)):
        part = chance.choice((0, 56, 104))  # where the headers begin
        frames[min(part + chance.randrange(48), len(frames) - 1)] = chance.randrange(
            256
        )
    return bytes(frames)


@pytest.mark.parametrize(
    "frames",
    [bytes(48), data(1 << 62), data()[:-1], data(8, 9)],
    ids=["magic", "huge", "truncated", "sequence"],
)
def test_a_rank_that_sends_rubbish_is_lost_and_the_others_go_on(frames: bytes) -> None:
    store = DictStore()

    def live(comm: Any) -> list[Any]:
        with pytest.raises(PeerLost) as lost:
            comm.recv(torch.zeros(2), 2)
        box = torch.full((2,), float(comm.rank))
        comm.sendrecv(box.clone(), 1 - comm.rank, box, 1 - comm.rank)
        return [
            lost.value.peer,
            named(str(lost.value.__cause__), "rank 2"),
            *box,
        ]

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(ranks, live, 3, store=store, only=(0, 1))
        for peer in (0, 1):
            with dial(store, 2, peer, 3) as line:
                line.recv(HEAD_BYTES)  # its GRANT: it waits for us
                line.sendall(frames)
                line.shutdown(socket.SHUT_WR)
        assert others.result(timeout=20) == [[2, True, 1, 1], [2, True, 0, 0]]
