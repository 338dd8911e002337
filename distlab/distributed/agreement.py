"""Ask all ranks whether they mean the same, before a message depends on it.

A collective only works if every rank brings the same thing: the same model, the same
call. If they don't, a transport sees a number of bytes that doesn't fit, or nothing at
all. So the ranks compare a text first: 16 bytes of each rank while they agree, and the
texts themselves once they don't.

    describe(module)             one line for each parameter and buffer
    require_same(comm, text, …)  an error on every rank that names the first difference
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from distlab.comm import Comm


class DisagreementError(ValueError):
    """The ranks of a collective call brought different things; raised on every rank."""


def differing(comm: Comm, text: str, note: str = "") -> list[list[str]] | None:
    """Every rank's `text` and `note` if the texts differ, else None; collective."""
    if comm.world_size == 1:
        return None
    summary = hashlib.sha256(text.encode()).digest()
    digest = int.from_bytes(summary[:8], "big", signed=True)
    data = f"{text}\0{note}".encode()
    rows = _gathered(comm, torch.tensor([digest, len(data)]))
    if (rows[:, 0] == rows[0, 0]).all():
        return None
    padded = torch.zeros(int(rows[:, 1].max()), dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    texts = _gathered(comm, padded)
    pairs = zip(texts, rows[:, 1].tolist(), strict=True)
    return [bytes(row[:size].tolist()).decode().split("\0") for row, size in pairs]


def _gathered(comm: Comm, row: Tensor) -> Tensor:
    """(n, elements): the `row` of each rank, on the CPU."""
    n, rank = comm.world_size, comm.rank
    rows = [row.to(comm.device).contiguous() for _ in range(n)]
    for hop in range(1, n):  # round the ring, so that a lost peer has a name
        sent, received = rows[(rank - hop + 1) % n], torch.empty_like(rows[0])
        comm.sendrecv(sent, (rank + 1) % n, received, (rank - 1) % n)
        rows[(rank - hop) % n] = received
    return torch.stack(rows).cpu()


def require_same(
    comm: Comm, text: str, advice: str, *, verb: str = "has", note: str = ""
) -> None:
    """Compare the lines of `text` over the ranks; collective.

    The error says "rank 0 has …", with this `verb`, and each rank's `note`.

    Raises:
        DisagreementError: they differ; on every rank, with the first line that differs
            and the ranks that have it.
    """
    told = differing(comm, text, note)
    if told is None:
        return
    texts, notes = zip(*told, strict=True)
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    first, second = _difference(texts[0].splitlines(), texts[other].splitlines())
    raise DisagreementError(
        f"rank 0 {verb} {first}{notes[0]}, but rank {other} {verb} "
        f"{second}{notes[other]}: {advice}"
    )


def _difference(first: list[str], second: list[str]) -> tuple[str, str]:
    """A line of each that the other one lacks, or the first that is elsewhere."""
    mine = next((line for line in first if line not in set(second)), "")
    theirs = next((line for line in second if line not in set(first)), "")
    if not (mine or theirs):
        return next((a, b) for a, b in zip(first, second, strict=True) if a != b)
    return mine or f"no {theirs}", theirs or f"no {mine}"


def agreed(comm: Comm, make: Callable[[], str], advice: str, **named: str) -> None:
    """`require_same` of what `make` returns; its ValueError is one on every rank.

    Raises:
        DisagreementError: the texts differ, or `make` failed on another rank.
        ValueError: `make` failed on this rank.
    """
    failed: ValueError | None = None
    try:
        text = make()
    except ValueError as error:
        failed, text = error, f"an error, {error}"
    try:
        require_same(comm, text, advice, **named)
    finally:
        if failed is not None:
            raise failed


def require_close(comm: Comm, values: Any, what: str) -> None:
    """Compare tensors in lists, tuples and dicts over the ranks; collective.

    Two numbers stand for each tensor, so that a rounding error isn't a difference.

    Raises:
        DisagreementError: shapes, dtypes or values differ; on every rank.
    """
    tensors = [
        leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)
    ]
    kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
    advice = f"every rank of {what} must get the same inputs"
    require_same(comm, f"inputs {', '.join(kinds)}", advice)
    if comm.world_size == 1 or not tensors:
        return
    rows = _gathered(comm, torch.stack([_fingerprint(t) for t in tensors]).flatten())
    same = torch.isclose(rows, rows[0], rtol=1e-3, atol=1e-3, equal_nan=True).all(1)
    if not same.all():
        other = int(same.int().argmin())
        raise DisagreementError(
            f"the inputs of rank {other} have other values than rank 0's: {advice}"
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two random projections of the values, and their size: (3,), of float64."""
    values = tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.double)
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.flatten()
    generator = torch.Generator().manual_seed(len(flat))
    weights = torch.randn(2, len(flat), generator=generator, dtype=torch.double)
    size = flat.norm()
    scale = size if size > 0 and size.isfinite() else torch.ones((), dtype=torch.double)
    return torch.cat([weights @ (flat / scale), size[None].log1p()])


def describe(module: nn.Module) -> str:
    """Names, shapes and dtypes of all parameters and buffers, one a line, in order.

    Raises:
        ValueError: a tensor has no memory yet: it is lazy, or on the device meta.
    """
    return "\n".join(_lines(module))


def _lines(module: nn.Module) -> Iterator[str]:
    first: dict[int, str] = {}
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            _require_memory(name, tensor)
            if (before := first.setdefault(id(tensor), name)) != name:
                yield f"{kind} {name}, which is {before}"
                continue
            grows = ", requires_grad" if tensor.requires_grad else ""
            yield f"{kind} {name}: {tuple(tensor.shape)} {tensor.dtype}{grows}"


def _require_memory(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{name} is uninitialized: run one batch through the model first, so that "
            "its lazy modules know their shapes"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the device meta, which has no memory: call "
            "module.to_empty(device=...) and initialize it first"
        )
