"""Calls of torch's functions: noise, picks of samples, losses, and weights overwritten.

A TorchFunctionMode gets every call on the rank's thread, whichever import it came by.
Most calls are of no interest and go straight through.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distlab.audit.fingerprints import digest_of
from distlab.audit.log import Memory
from distlab.audit.places import here
from distlab.audit.watching.models import is_parameter

NOISE = frozenset(
    (
        *("rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_"),
        *(
            "bernoulli",
            "bernoulli_",
            "exponential_",
            "poisson",
            "rrelu",
            "gumbel_softmax",
        ),
        *("dropout", "dropout_", "alpha_dropout", "feature_dropout", "native_dropout"),
        *("feature_alpha_dropout", "scaled_dot_product_attention"),
        *("multi_head_attention_forward",),
    )
)
PICKS = frozenset(("randint", "randperm", "multinomial"))
LOSSES = frozenset(
    (
        *(
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "kl_div",
        ),
        *("huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    )
)
MOST = 4000  # draws that are written down


class TorchCalls(TorchFunctionMode):
    """Writes the calls of one rank into its log."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in NOISE or name in PICKS:
            return self._drawn(name, func, args, kwargs)
        value = func(*args, **kwargs)
        if name in LOSSES:
            self._lost(name, args, kwargs, value)
        elif name in ("mean", "sum", "nanmean"):
            self._reduced(value)
        elif name.endswith("_") and not self._memory.in_step:
            self._overwritten(name, args)
        if self._memory.lengths:
            self._long(name, args, value)
        return value

    def _drawn(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        memory = self._memory
        if memory.counts["draws"] >= MOST:
            return func(*args, **kwargs)
        own = kwargs.get("generator")
        before = own.get_state() if own is not None else torch.get_rng_state()
        value = func(*args, **kwargs)
        after = own.get_state() if own is not None else torch.get_rng_state()
        if not torch.equal(before, after):
            memory.counts["draws"] += 1
            memory.log.add(
                "draw" if name in NOISE else "pick",
                fn=name,
                state=digest_of(before),
                shape=list(value.shape) if isinstance(value, Tensor) else [],
                seeded=None if own is not None else memory.seeded.get("torch"),
            )
        return value

    def _lost(self, name: str, args: Any, kwargs: Any, value: Any) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            return
        self._memory.loss_at = here()
        self._memory.log.add(
            "loss",
            value=float(value.detach()),
            reduction=kwargs.get("reduction", "mean"),
            count=_count(name, args, kwargs),
        )

    def _reduced(self, value: Any) -> None:
        """A mean or a sum to one number with a gradient is a loss written by hand."""
        if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad:
            self._memory.loss_at = here()

    def _long(self, name: str, args: Any, value: Any) -> None:
        """Note tensors of a length that somebody looks out for, and their lists."""
        seen = args[0] if name in ("tolist", "numpy") and args else value
        if (
            isinstance(seen, Tensor)
            and seen.dim()
            and len(seen) in self._memory.lengths
        ):
            self._memory.log.add("long", fn=name, length=len(seen))

    def _overwritten(self, name: str, args: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or name.startswith("__"):
            return
        if name in ("requires_grad_", "detach_", "zero_grad", "share_memory_"):
            return
        memory = self._memory
        if not memory.names or not args[0].is_leaf or memory.depth:
            return
        if is_parameter(memory, args[0]):
            memory.log.add("overwritten")


def _count(name: str, args: Any, kwargs: Any) -> float:
    """Return over how many elements a loss was taken, NaN if that isn't known."""
    given = list(args)
    if not given or not isinstance(given[0], Tensor):
        return math.nan
    target = given[1] if len(given) > 1 else kwargs.get("target")
    if name in ("cross_entropy", "nll_loss") and isinstance(target, Tensor):
        if target.is_floating_point():
            return float(len(given[0]))
        return float((target != kwargs.get("ignore_index", -100)).sum())
    return float(given[0].numel())
