"""Charge a rank for what it computes: by operator, forward and backward, by formula.

A matrix product of (m, k) and (k, n) takes 2 m k n floating-point operations, however
busy this machine is. The formulas are those of `torch.utils.flop_counter`: products,
convolutions, attention. Everything else moves data and is not charged.

For attention on a CPU torch has no formula; it computes what the one for GPUs does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.flop_counter import flop_registry

from distlab.sim.torch.modes import RankMode
from distlab.sim.torch.rank import Rank
from distlab.sim.torch.storages import on_cpu

aten = torch.ops.aten
_ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        aten._scaled_dot_product_flash_attention
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
_FORMULAS: dict[int, Any] = {}  # by the operator's id: to hash one takes Python


class ChargeFlops(RankMode):
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
        for kind in types:
            if kind is not Tensor and kind is not Parameter:
                if issubclass(kind, FakeTensor):
                    return func(*args, **kwargs)  # torch only asks itself for a shape
                return NotImplemented
        if self._pretends and "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
            kwargs.pop("pin_memory", None)
        key = id(func)
        if key not in _FORMULAS:
            _FORMULAS[key] = formula_of(func)
        formula = _FORMULAS[key]
        if formula is not None:
            out = func(*args, **kwargs)
            if not _is_shape_only(out):
                self._charge(formula(*args, **kwargs, out_val=out))
                self._note(out)
            return out
        if _is_inference_mode() and hasattr(func, "decompose"):
            with self:  # there, nobody else has taken it apart
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._note(out)
        return out


def formula_of(func: Any) -> Any:
    """How many operations an operator takes, from its arguments; None if none."""
    packet: Any = getattr(func, "_overloadpacket", None)
    return flop_registry.get(_ON_CPU.get(packet, packet))


_is_inference_mode = torch.is_inference_mode_enabled


def _is_shape_only(out: Any) -> bool:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return isinstance(first, torch.Tensor) and first.is_meta
