"""Short stand-ins for tensors: are two the same, and if not, how far are they apart."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as unseen

__all__ = ["Print", "digest_of", "local", "print_of", "unseen"]


class Print(NamedTuple):
    """`digest` of the bytes, and in float64 the norm and one weighted sum."""

    digest: str
    norm: float
    weighed: float

    def is_near(self, other: Print, tolerance: float) -> bool:
        """Return True if both could be of tensors that differ by rounding only."""
        if self.digest == other.digest:
            return True
        size = max(self.norm, other.norm, 1e-12)
        return (
            abs(self.norm - other.norm) <= tolerance * size
            and abs(self.weighed - other.weighed) <= tolerance * size * 4
        )


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, plain and detached."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found: Tensor = part.detach()
    return found


def print_of(tensor: Tensor) -> Print:
    """Return the fingerprint of a tensor on any device."""
    with unseen():  # the simulator charges for what it sees
        return _print_of(local(tensor).reshape(-1))


def _print_of(row: Tensor) -> Print:
    digest = digest_of(row)
    if row.is_sparse or row.is_complex() or not row.numel():
        return Print(digest, 0.0, 0.0)
    wide = row.double().cpu()
    weights = torch.cos(torch.arange(len(wide), dtype=torch.float64) * 0.7 + 0.3)
    scale = max(1.0, len(wide) ** 0.5)
    return Print(digest, float(wide.norm()), float(wide @ weights) / scale)


def digest_of(value: Any) -> str:
    """Return 16 digits that are the same for tensors, numbers, or lists alike."""
    digest = hashlib.blake2b(digest_size=8)
    with unseen():
        _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        row = local(value).contiguous().cpu()
        digest.update(f"{row.dtype}{tuple(row.shape)}".encode())
        if row.numel():
            digest.update(row.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    else:
        digest.update(repr(value).encode())
