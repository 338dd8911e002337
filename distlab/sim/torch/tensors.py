"""Tensors and options as torch hands them over, and what the kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.comm import SUM, ReduceOp
from distlab.sim.messages import move

_OPS = {op.name: op for op in ReduceOp}


def reduce_op(opts: Any, tensor: Tensor, *, is_nccl: bool) -> ReduceOp:
    """Which reduction torch asks for.

    NCCL averages integers too, and rounds toward 0 (`FuncSumPostDiv` in
    https://github.com/NVIDIA/nccl/blob/master/src/device/reduce_kernel.h).

    Raises:
        ValueError: the simulator has none of that name, or the backend not for such a
            tensor.
    """
    if opts is None:
        return SUM
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2]
    op = _OPS.get(name)
    if op is None:
        raise ValueError(
            f"the simulator has no ReduceOp.{name}; it has {', '.join(_OPS)}"
        )
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if op is ReduceOp.AVG and whole and not is_nccl:
        raise ValueError(f"ReduceOp.AVG of integers ({tensor.dtype}) has no result")
    return op


def flat_or_none(tensor: Tensor | None) -> Tensor | None:
    """The same for a tensor that there may not be."""
    return None if tensor is None else flat(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The same memory as one row, out of autograd's sight.

    Raises:
        ValueError: its elements are not next to each other in memory.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch._debug_has_internal_overlap(tensor) != 0 or not _is_dense(tensor):
        raise ValueError("Tensors must be contiguous")
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    ways = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in ways)
    return reach == tensor.numel() - 1


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each into its target, out of autograd's sight."""
    for source, target in zip(sources, targets, strict=False):
        target.detach().copy_(source.view_as(target))


def hand_out(row: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy equal parts of a row of memory into the targets, one after the other.

    With a thousand ranks each has a thousand targets: there an operator is too much.
    """
    if not targets or not row.numel():
        return
    at, num_bytes = row.data_ptr(), row.nbytes // len(targets)
    if any(
        target.dtype is not row.dtype
        or target.nbytes != num_bytes
        or not target.is_contiguous()
        for target in targets
    ):
        copy_all(row.chunk(len(targets)), targets)
        return
    for target in targets:
        move(target.data_ptr(), at, num_bytes)
        at += num_bytes
