"""Charge a rank for what it computes: by operator, forward and backward, by formula.

A matrix product of (m, k) and (k, n) takes 2 m k n floating-point operations, however
busy this machine is. The formulas are those of `torch.utils.flop_counter`: products,
convolutions, attention. Everything else moves data and is not charged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from distlab.sim.torch.rank import Rank
from distlab.sim.torch.storages import on_cpu

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ChargeFlops(TorchDispatchMode):
    """While it is active, every operator of this thread is charged to its rank."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._charge, self._note = rank.charge, rank.memory.note
        self._pretends = rank.pretends

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it; a tensor that is made of others charges for what it does to those."""
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # torch only asks itself for a shape
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if self._pretends and "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
            kwargs.pop("pin_memory", None)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            out = func(*args, **kwargs)
            if not _is_shape_only(out):
                self._charge(formula(*args, **kwargs, out_val=out))
                self._note(out)
            return out
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # there, nobody else has taken it apart
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._note(out)
        return out


def _is_shape_only(out: Any) -> bool:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return isinstance(first, torch.Tensor) and first.is_meta
