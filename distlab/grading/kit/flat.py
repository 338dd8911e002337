"""Tensors end to end: a model's weights, its gradients, or any tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def flat(tensors: Iterable[Tensor] | Mapping[str, Tensor]) -> Tensor:
    """A copy of all elements in one dimension, without a history."""
    several = tensors.values() if isinstance(tensors, Mapping) else tensors
    return torch.cat([tensor.detach().reshape(-1) for tensor in several])


def weights_of(model: nn.Module) -> Tensor:
    """All parameters in one flat copy."""
    return flat(model.parameters())


def gradients_of(model: nn.Module) -> Tensor:
    """All gradients in one flat copy, with zeros where a parameter has none."""
    return flat(
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    )
