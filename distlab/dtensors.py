"""Tensors of which a rank has only a part: torch's DTensors."""

from __future__ import annotations

from typing import Any


def is_sharded(value: Any) -> bool:
    """Return True for a DTensor. Asking its type would import torch's distributed."""
    return hasattr(value, "full_tensor")


def gathered(value: Any) -> Any:
    """Return a DTensor as a plain tensor, which is collective, and others unchanged."""
    return value.full_tensor() if is_sharded(value) else value
