"""Check that all ranks agree before a message depends on it.

A collective only works if every rank makes the same call with the same model. If they
don't, the transport may notice a wrong number of bytes, or it may notice nothing. So
the ranks first compare a text that describes what they are about to do. While they
agree, this costs 16 bytes per rank. Only if they disagree do they send the full texts.

    describe(module)             one line for each parameter and buffer
    require_same(comm, text, …)  raise on every rank and name the first difference
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
    """Raised on every rank when the ranks disagree about a collective call."""


def differing(comm: Comm, text: str, note: str = "") -> list[list[str]] | None:
    """Return every rank's `text` and `note`, or None if all texts are the same.

    Collective.
    """
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
    """Gather each rank's `row` into a CPU tensor of shape (n, elements).

    With few bytes, the number of messages in sequence counts. Here they are log2(n),
    rounded up: J. Bruck et al., Efficient Algorithms for All-to-All Communications in
    Multiport Message-Passing Systems (doi.org/10.1109/71.642949). Each message has one
    sender, so an error can name the lost peer.
    """
    n, rank = comm.world_size, comm.rank
    rows = torch.empty(n, *row.shape, dtype=row.dtype, device=comm.device)
    rows[0] = row  # place i is for rank + i until the end
    have = 1
    while have < n:
        count = min(have, n - have)
        received = rows[have : have + count]
        comm.sendrecv(rows[:count], (rank - have) % n, received, (rank + have) % n)
        have += count
    return rows.roll(rank, 0).cpu()


def require_same(
    comm: Comm, text: str, advice: str, *, verb: str = "has", note: str = ""
) -> None:
    """Require that `text` is the same on all ranks; collective.

    The error reads "rank 0 has …, but rank 3 has …", where `verb` replaces "has", and
    each rank's `note` follows its line.

    Raises:
        DisagreementError: on every rank if the texts differ. It shows the first line
            that differs, and which ranks have it.
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
    """Return one line from each text that the other lacks.

    If both have the same lines in another order, return the first pair that differs.
    """
    mine = next((line for line in first if line not in set(second)), "")
    theirs = next((line for line in second if line not in set(first)), "")
    if not (mine or theirs):
        return next((a, b) for a, b in zip(first, second, strict=True) if a != b)
    return mine or f"no {theirs}", theirs or f"no {mine}"


def agreed(comm: Comm, make: Callable[[], str], advice: str, **named: str) -> None:
    """Call `make` on every rank and require the same text from all of them.

    If `make` raises a ValueError on one rank, all ranks raise an error.

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


def require_alike(comm: Comm, values: Any, what: str) -> list[Tensor]:
    """Compare the shapes of tensors in lists, tuples and dicts; collective.

    Returns the tensors.

    Raises:
        DisagreementError: on every rank if shapes or dtypes differ.
    """
    tensors = [
        leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)
    ]
    kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
    require_same(comm, f"inputs {', '.join(kinds)}", _same_inputs(what))
    return tensors


def _same_inputs(what: str) -> str:
    return f"every rank of {what} must get the same inputs"


def require_close(comm: Comm, values: Any, what: str) -> None:
    """Require that all ranks have nearly the same tensors; collective.

    `values` may nest them in lists, tuples and dicts. We compare a short fingerprint
    of each tensor with a tolerance, so rounding errors don't count as a difference.

    Raises:
        DisagreementError: on every rank if shapes, dtypes or values differ.
    """
    tensors = require_alike(comm, values, what)
    if comm.world_size == 1 or not tensors:
        return
    rows = _gathered(comm, torch.stack([_fingerprint(t) for t in tensors]).flatten())
    same = torch.isclose(rows, rows[0], rtol=1e-3, atol=1e-3, equal_nan=True).all(1)
    if not same.all():
        other = int(same.int().argmin())
        raise DisagreementError(
            f"the inputs of rank {other} have different values from rank 0's: "
            + _same_inputs(what)
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return two random projections of the values and their norm, as (3,) float64."""
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
    """List the name, shape and dtype of every parameter and buffer, one per line.

    Raises:
        ValueError: a tensor has no memory yet because it is lazy or on the meta device.
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
            f"{name} is on the meta device, which has no memory: call "
            "module.to_empty(device=...) and initialize it first"
        )
