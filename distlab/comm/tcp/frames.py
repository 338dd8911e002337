"""Frames on a line between two ranks: a fixed header and a payload.

    magic version kind dtype · space tag sequence · elements length │ payload
      4      1      1    1  1     8    8     8          8       8   │ length bytes

`space` and `tag` name a channel. The space belongs to a group, or to one collective of
it, so that two groups with the same tags never meet. `sequence` counts the messages of
one channel and direction, so we notice at once if a frame is lost, repeated or forged.
We never allocate memory just because a header announces a length: a payload goes into
the tensor that waits for it, or nowhere.

Source: the fixed header is that of most wire protocols; the two-step GRANT and DATA is
the rendezvous protocol of MPI implementations and of gloo.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.comm._protocol import CommRefusedError

MAGIC = b"dlab"
VERSION = 1
HEADER = struct.Struct("!5sBBxQqQQQ")
_MARK = MAGIC + bytes([VERSION])
MAX_PAYLOAD_BYTES = 1 << 40  # one TiB: more is no tensor but a broken length


_WRITABLE = 0x200  # PyBUF_WRITE
_NOTHING = memoryview(b"")
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


class Kind(IntEnum):
    """The purpose of a frame."""

    GRANT = 1  # a receive has been posted: the sender may send
    DATA = 2  # the message
    WANTED = 3  # somebody receives from anyone here: announce your sends
    ANNOUNCE = 4  # a send has been posted, for which no GRANT has come yet
    CLOSE = 5  # the sender has given this group up
    BYE = 6  # the sender ends as it should; what it owed has been sent


class Frame(NamedTuple):
    """A parsed header; `mark` is the magic and the version."""

    mark: bytes
    kind: int
    dtype: int
    space: int
    tag: int
    sequence: int
    elements: int
    length: int


class FrameError(RuntimeError):
    """Raised if data on a line isn't a frame, or is one that can't belong there."""


_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_ITEM_BYTES = (1, *(dtype.itemsize for dtype in _DTYPES))  # code 0: only bytes


def code_of(dtype: torch.dtype) -> int:
    """Return the number of a dtype in a header, or 0 for a dtype without one."""
    return _CODES.get(dtype, 0)


def header(
    kind: Kind,
    space: int,
    tag: int = 0,
    sequence: int = 0,
    *,
    dtype: int = 0,
    elements: int = 0,
    length: int = 0,
) -> bytes:
    """Encode a header."""
    return HEADER.pack(_MARK, kind, dtype, space, tag, sequence, elements, length)


def parse(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Frame:
    """Parse the header that starts at `offset`.

    Raises:
        FrameError: it isn't one of our headers, or its fields can't be right.
    """
    frame = Frame._make(HEADER.unpack_from(buffer, offset))
    if frame.mark != _MARK or not Kind.GRANT <= frame.kind <= Kind.BYE:
        raise FrameError(_what_is_wrong(frame))
    if frame.length or frame.elements:
        _check_payload(frame)
    return frame


def _what_is_wrong(frame: Frame) -> str:
    magic, version = frame.mark[:-1], frame.mark[-1]
    if magic != MAGIC:
        return f"a frame begins with {magic!r}, not {MAGIC!r}"
    if version != VERSION:
        return f"a frame has version {version}; this is version {VERSION}"
    return f"a frame is of kind {frame.kind}, which does not exist"


def _check_payload(frame: Frame) -> None:
    if frame.kind != Kind.DATA:
        raise FrameError(f"a {Kind(frame.kind).name} frame says it has a payload")
    if frame.length > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"a frame says it has {frame.length} bytes, more than {MAX_PAYLOAD_BYTES}"
        )
    if frame.dtype >= len(_ITEM_BYTES):
        raise FrameError(f"a frame has dtype number {frame.dtype}, which is unknown")
    if frame.elements * _ITEM_BYTES[frame.dtype] != frame.length:
        raise FrameError(
            f"a frame says it has {frame.length} bytes for {frame.elements} elements "
            f"of {_ITEM_BYTES[frame.dtype]} bytes"
        )


def memory_of(tensor: Tensor) -> tuple[memoryview, torch.UntypedStorage]:
    """Return the tensor's memory as bytes, and an object to keep while you use them.

    If you write to these bytes, you write to the tensor. We use the address directly,
    because a view through numpy takes longer than the rest of the work for a small
    message.

    Raises:
        CommRefusedError: the tensor isn't in CPU memory.
    """
    if not tensor.is_cpu:
        raise CommRefusedError(
            f"plain sockets carry tensors of the CPU, not of {tensor.device}: "
            "use .cpu(), or another transport"
        )
    num_bytes, storage = tensor.nbytes, tensor.untyped_storage()
    if not num_bytes:
        return _NOTHING, storage
    return _memory_at(tensor.data_ptr(), num_bytes, _WRITABLE), storage
