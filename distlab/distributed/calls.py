"""Whether all ranks make the same call, before its data is on the way.

A transport sees bytes only: two float32 fit into one float64, and 4 elements may arrive
for a tensor of 2. So each collective compares its name, its arguments, shape and dtype
first, 16 bytes of each rank, and a message is preceded by a header.
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
from distlab.paths import shown

_OURS = str(Path(__file__).parent)
_HEADER_BYTES = 256


def kind_of(tensor: Tensor) -> str:
    """Its shape and dtype.

    Raises:
        ValueError: it can't be sent.
    """
    require_sendable(tensor)
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def require_sendable(tensor: object) -> None:
    """Refuse what is no tensor, or has no elements in a row in memory.

    Raises:
        ValueError: so it is.
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
    """Compare what `call` returns over the ranks; collective.

    Raises:
        DisagreementError: they make different calls; on every rank, with both calls
            and the lines they are on.
        ValueError: of `call`, which may refuse this rank's arguments.
    """
    advice = "every rank must make the same call"
    agreed(comm, call, advice, verb="calls", note=f" at {_place()}")


def send_header(comm: Comm, tensor: Tensor, dst: int, tag: int) -> None:
    """Announce a message: what it is, and which line sends it."""
    text = f"{tensor.numel()}|{tensor.dtype}|{_place()}".encode()[:_HEADER_BYTES]
    header = torch.tensor(list(text.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)
    comm.send(header.to(comm.device), dst, tag)


def require_header(comm: Comm, tensor: Tensor, src: int, tag: int) -> int:
    """The rank whose message comes next, and fits into `tensor`.

    Raises:
        DisagreementError: it doesn't fit; it has then been received and dropped.
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
        f"at {_place()}: both must be of one size and dtype"
    )


def _counted(size: int) -> str:
    return f"{size} element{'' if size == 1 else 's'}"


def _place() -> str:
    """The user's line: the innermost one that isn't in this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"
