"""Run the shared store as a service: set, get, wait, add, compare_set as messages.

    request   op (1 byte), then its parts, each after its length (4 bytes)
    reply     0 and the value, or 1 and what was wrong

Source: the operations are five of those that torch.distributed's TCPStore has.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

_LENGTH = struct.Struct("!I")
_DONE, _WRONG = b"\0", b"\1"


class Op(IntEnum):
    """Operations of the store."""

    SET = 1  # key, value
    GET = 2  # key; answered once there is a value
    WAIT = 3  # keys; answered once there are values
    ADD = 4  # key, amount in decimal digits
    COMPARE_SET = 5  # key, expected, desired


class KeyValues:
    """A `Service` that keeps its values in memory for as long as it lives."""

    def __init__(self, max_bytes: int = 1 << 28) -> None:
        self.stored: dict[bytes, bytes] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """Implement `Handle`.

        Raises:
            ValueError: the message isn't a request.
        """
        op, parts = _parts(message)
        stored = self.stored
        if op == Op.WAIT:
            return _DONE if all(key in stored for key in parts) else None
        key, *values = parts
        if op == Op.GET:
            return _DONE + stored[key] if key in stored else None
        if op == Op.SET:
            return self._put(key, values[0], b"")
        if op == Op.ADD:
            return self._add(key, int(values[0]))
        expected, desired = values
        there = stored.get(key, b"")
        return self._put(key, desired) if there == expected else _DONE + there

    def _put(self, key: bytes, value: bytes, reply: bytes | None = None) -> bytes:
        size = len(key) + len(value)
        if key in self.stored:
            size -= len(key) + len(self.stored[key])
        if self._num_bytes + size > self._max_bytes:
            return _WRONG + f"the store is full: {self._max_bytes} bytes".encode()
        self._num_bytes += size
        self.stored[key] = value
        return _DONE + (value if reply is None else reply)

    def _add(self, key: bytes, amount: int) -> bytes:
        try:
            total = int(self.stored.get(key, b"0")) + amount
        except ValueError:
            name = key.decode(errors="replace")
            return _WRONG + f"store.add: {name!r} holds no integer".encode()
        return self._put(key, str(total).encode())


class StoreByCalls:
    """A `Store` that a service keeps; `ask(message, timeout_s)` calls it."""

    def __init__(self, ask: Callable[[bytes, float], bytes]) -> None:
        self._ask = ask

    def set(self, key: str, value: bytes) -> None:
        """Implement `Store.set`."""
        self._do(Op.SET, key, value)

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Implement `Store.get`."""
        return self._do(Op.GET, key, timeout_s=timeout_s)

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Implement `Store.wait`."""
        self._do(Op.WAIT, *keys, timeout_s=timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Implement `Store.add`.

        Raises:
            ValueError: the value isn't an integer.
        """
        return int(self._do(Op.ADD, key, str(amount)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Implement `Store.compare_set`."""
        return self._do(Op.COMPARE_SET, key, expected, desired)

    def _do(self, op: Op, *parts: str | bytes, timeout_s: float | None = None) -> bytes:
        texts = [part.encode() if isinstance(part, str) else part for part in parts]
        message = bytes([op]) + b"".join(_LENGTH.pack(len(t)) + t for t in texts)
        reply = self._ask(message, float("inf") if timeout_s is None else timeout_s)
        if reply[:1] == _WRONG:
            raise ValueError(reply[1:].decode())
        return reply[1:]


_NUM_PARTS = {Op.SET: 2, Op.GET: 1, Op.ADD: 2, Op.COMPARE_SET: 3}


def _parts(message: bytes) -> tuple[Op, list[bytes]]:
    try:
        op, at, parts = Op(message[0]), 1, []
        while at < len(message):
            (length,) = _LENGTH.unpack_from(message, at)
            at += _LENGTH.size + length
            parts.append(message[at - length : at])
        if at != len(message) or len(parts) != _NUM_PARTS.get(op, len(parts)):
            raise ValueError("it has parts missing or too many")
    except (IndexError, ValueError, struct.error) as error:
        raise ValueError(f"no request to a store: {error}") from error
    return op, parts
