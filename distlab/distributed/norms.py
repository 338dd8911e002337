"""Clip gradients by their norm when they are spread over several ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad as torchs

from distlab.comm import Comm


def clip(
    comm: Comm,
    max_norm: float,
    own: Iterable[Tensor],
    common: Iterable[Tensor] = (),
    copies: Iterable[Tensor] = (),
) -> Tensor:
    """Scale all gradients as torch.nn.utils.clip_grad_norm_ would for a whole model.

    Collective. `own` holds parameters, or parts of them, that only this rank has.
    `common` holds parameters that every rank has, with equal gradients. `copies` holds
    copies of parameters that another rank owns. Every rank gets the norm from before
    clipping.
    """
    mine, everywhere, elsewhere = (_gradients(group) for group in (own, common, copies))
    square = _square(mine).to(comm.device)
    comm.all_reduce(square)
    norm = (square + _square(everywhere).to(comm.device)).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*mine, *everywhere, *elsewhere):
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad.detach() for p in parameters if p.grad is not None]


def _square(gradients: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for gradient in gradients:
        total = total.to(gradient.device) + gradient.abs().double().square().sum()
    return total


_MARK = "distlab_wrapper"


def refuse_torchs_clip(parameters: Iterable[Tensor], wrapper: str) -> None:
    """Have torch's clip_grad_norm_() raise an error for these parameters.

    It sees one rank's part of the gradient, so each rank would scale by its own factor.
    Torch has no hook there, so we wrap the function that it calls last, once. This also
    reaches a framework that has imported clip_grad_norm_ before.
    """
    for parameter in parameters:
        setattr(parameter, _MARK, wrapper)
    scale = torchs._clip_grads_with_norm_
    if hasattr(scale, _MARK):
        return

    @functools.wraps(scale)
    def refusing(parameters: Any, *arguments: Any, **named: Any) -> None:
        for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
            if wrapper := getattr(parameter, _MARK, ""):
                raise ValueError(
                    "torch's clip_grad_norm_() knows only this rank's part of the "
                    f"gradient: call clip_grad_norm_() of the {wrapper}"
                )
        scale(parameters, *arguments, **named)

    setattr(refusing, _MARK, "")
    torchs._clip_grads_with_norm_ = refusing
