"""Check that all ranks make the same call before any of its data is sent.

A transport only sees bytes. Two float32 numbers fit into one float64, and 4 elements
may arrive for a tensor of 2. So before each collective, the ranks compare its name,
arguments, shape and dtype, which costs 16 bytes per rank. Each point-to-point message
is preceded by a header. DISTLAB_COMPARE=0 on all ranks leaves out the comparison, for
a program that is known to be right and makes many small collectives.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.distributed.agreement import DisagreementError, agreed
from distlab.distributed.environment import compares_calls
from distlab.paths import shown

_OURS = str(Path(__file__).parent)
_HEADER_BYTES = 256


def kind_of(tensor: Tensor) -> str:
    """Return the tensor's shape and dtype as text.

    Raises:
        ValueError: the tensor can't be sent.
    """
    require_sendable(tensor)
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def require_sendable(tensor: object) -> None:
    """Require a tensor whose elements are contiguous in memory.

    Raises:
        ValueError: it isn't.
    """
    if not isinstance(tensor, Tensor):
        what = type(tensor).__name__
        raise ValueError(f"a {what} can't be sent: give a tensor")
    for is_one, what, advice in (
        (tensor.is_nested, "nested", "send the tensors that unbind() returns"),
        (tensor.is_quantized, "quantized", "use dequantize()"),
        (tensor.is_meta, "meta", "it has no values"),
    ):
        if is_one:
            raise ValueError(f"a {what} tensor can't be sent: {advice}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor can't be sent: use to_dense()")


def same_call(comm: Comm, call: Callable[[], str]) -> None:
    """Require that `call` returns the same text on all ranks; collective.

    With DISTLAB_COMPARE=0, only this rank's arguments are checked.

    Raises:
        DisagreementError: on every rank if they make different calls. It shows both
            calls and the lines that made them.
        ValueError: raised by `call` itself, which may reject this rank's arguments.
    """
    if not compares_calls():
        call()
        return
    advice = "every rank must make the same call"
    agreed(comm, call, advice, verb="calls", note=f" at {_place()}")


def send_header(comm: Comm, tensor: Tensor, dst: int, tag: int) -> None:
    """Announce a message's size and dtype, and the line that sends it."""
    text = f"{tensor.numel()}|{tensor.dtype}|{_place()}".encode()[:_HEADER_BYTES]
    header = torch.tensor(list(text.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)
    comm.send(header.to(comm.device), dst, tag)


def require_header(comm: Comm, tensor: Tensor, src: int, tag: int) -> int:
    """Return the rank whose message comes next, once we know it fits into `tensor`.

    Raises:
        DisagreementError: it doesn't fit. The message has been received and discarded.
    """
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device=comm.device)
    source = comm.recv(header, src, tag)
    text = bytes(header.tolist()).rstrip(b"\0").decode(errors="replace")
    size, dtype, place = text.split("|", 2)
    if (int(size), dtype) == (tensor.numel(), str(tensor.dtype)):
        return source
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    comm.recv(torch.empty(int(size), dtype=kind, device=comm.device), source, tag)
    raise DisagreementError(
        f"rank {source} sends {_counted(int(size))} of {dtype} at {place}, but rank "
        f"{comm.rank} receives {_counted(math.prod(tensor.shape))} of {tensor.dtype} "
        f"at {_place()}: both must have the same size and dtype"
    )


def _counted(size: int) -> str:
    return f"{size} element{'' if size == 1 else 's'}"


def _place() -> str:
    """Return the user's file and line: the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"
