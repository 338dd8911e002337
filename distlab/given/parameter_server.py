"""Messages and log records of unit `parameter_server` as bytes, and its worker.

A message begins with its kind and number. A record of the log consists of its length
and its checksum, followed by a push and the rank that sent it.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.comm import Clock, Endpoint, PeerLost

# ── messages ────────────────────────────────────────────────────────────────────────

PUSH, PULL, WEIGHTS = 1, 2, 3
_HEADER = struct.Struct("!BI")


class Message(NamedTuple):
    """A push, a pull or its reply.

    `number` counts the pushes of the worker that sends the message, starting at 1. A
    pull has the number of the worker's last push, or 0 before the first one, and no
    values.
    """

    kind: int
    number: int
    values: Tensor


def encode(kind: int, number: int, values: Tensor | None = None) -> bytes:
    """Return a message as bytes; `values` must be a one-dimensional float64 tensor."""
    payload = b"" if values is None else values.numpy().tobytes()
    return _HEADER.pack(kind, number) + payload


def decode(message: bytes) -> Message:
    """Read a message from its bytes."""
    kind, number = _HEADER.unpack_from(message)
    payload = bytearray(message[_HEADER.size :])
    values = torch.frombuffer(payload, dtype=torch.float64) if payload else None
    return Message(kind, number, torch.empty(0) if values is None else values)


# ── the log ─────────────────────────────────────────────────────────────────────────

LOG = "log"
_RECORD = struct.Struct("!II")  # bytes and checksum of what follows


def pack_record(rank: int, number: int, gradient: Tensor) -> bytes:
    """Return a push as a log record, with its length and a checksum."""
    record = encode(PUSH, number, gradient) + bytes([rank])
    return _RECORD.pack(len(record), zlib.crc32(record)) + record


def read_records(log: bytes) -> tuple[list[tuple[int, int, Tensor]], int]:
    """Return the pushes before the first torn record, and how many bytes they take.

    Each push is a tuple (rank, number, gradient). After a crash the last record may be
    torn, which means that part of it is missing or consists of zeros.
    """
    pushes, end = [], 0
    while end + _RECORD.size < len(log):
        size, checksum = _RECORD.unpack_from(log, end)
        record = log[end + _RECORD.size : end + _RECORD.size + size]
        if not record or zlib.crc32(record) != checksum:
            break
        _, number, gradient = decode(record[:-1])
        pushes.append((record[-1], number, gradient))
        end += _RECORD.size + size
    return pushes, end


# ── the worker's side ───────────────────────────────────────────────────────────────


class Worker:
    """A rank's connection to a server, which repeats a message until it is answered."""

    def __init__(
        self, endpoint: Endpoint, clock: Clock, server: str, timeout_s: float
    ) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._server, self._timeout_s = server, timeout_s
        self.num_pushes = 0

    def push(self, gradient: Tensor) -> None:
        """Push a gradient; if a message is repeated, it keeps its number."""
        self.num_pushes += 1
        self._ask(encode(PUSH, self.num_pushes, gradient))

    def pull(self) -> Tensor:
        """Return the weights, after waiting as long as the server says "not yet"."""
        return decode(self._ask(encode(PULL, self.num_pushes))).values

    def _ask(self, message: bytes) -> bytes:
        while True:
            try:
                return self._endpoint.call(self._server, message, self._timeout_s)
            except PeerLost:
                self._clock.sleep(self._timeout_s / 10)
