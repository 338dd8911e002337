"""Messages: their record in a trace, and how their bytes are delivered."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

Fields = tuple[int, int, int, int, int, int]


class Message(NamedTuple):
    """One message that arrived; ranks are those of the world, times picoseconds."""

    src: int
    dst: int
    num_bytes: int
    start_ps: int
    end_ps: int
    tag: int


class Trace(Sequence[Message]):
    """All messages of a run, in the order in which they started.

    We keep them as plain tuples, because there can be millions of them.
    """

    def __init__(self, rows: Sequence[Fields] = ()) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> Message | Trace:
        if isinstance(index, slice):
            return Trace(self._rows[index])
        return Message._make(self._rows[index])

    def __iter__(self) -> Iterator[Message]:
        return map(Message._make, self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and list(self._rows) == list(other._rows)

    __hash__ = None  # type: ignore[assignment]

    @property
    def rows(self) -> Sequence[Fields]:
        """The messages as plain tuples."""
        return self._rows


def deliver(sent: Any, received: Any) -> Exception | None:
    """Copy what was sent into the receiver's tensor, in place, as a wire would.

    Bytes have no dtype, so the two ends may differ in it, as on gloo. The journals show
    that they did. Only a message that doesn't fit is an error.
    """
    num_bytes = sent.nbytes
    if num_bytes > received.nbytes:
        return RuntimeError(
            f"{num_bytes} bytes arrived for a tensor of {received.nbytes} bytes"
        )
    into, out = received.data_ptr(), sent.data_ptr()
    if into and out:  # a message is no operation that autograd should see
        move(into, out, num_bytes)
    elif num_bytes and any(_is_hollow(tensor) for tensor in (sent, received)):
        return RuntimeError("a tensor took part whose memory had been given back")
    elif num_bytes:
        _copy(sent.detach(), received.detach(), num_bytes)
    return None


def _is_hollow(tensor: Any) -> bool:
    """Return True if its storage has no memory, so that touching it would crash."""
    return type(tensor) is Tensor and tensor.is_cpu and not tensor.data_ptr()


def _copy(sent: Tensor, received: Tensor, num_bytes: int) -> None:
    """Copy between tensors that stand for others (meta, fake)."""
    into = received.view(-1).view(torch.uint8)
    into[:num_bytes] = sent.view(-1).view(torch.uint8)


# To an address, from one, so many bytes. Three times as fast as copy_ for a small
# tensor, and it need not be told of dtypes.
move = ctypes.PyDLL(None).memmove
move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
move.restype = None
