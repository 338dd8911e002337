"""Detect changes to a module after DistributedDataParallel has wrapped it.

The wrapper sets up its hooks, buckets and message order for the parameters that it
finds. If you unfreeze, add or replace a parameter afterwards, each rank would train it
on its own gradient, and nobody would notice until the ranks have drifted apart.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

_ADVICE = "make a new DistributedDataParallel after such a change"


class _Kind(NamedTuple):
    """The properties of a tensor that determine the messages it needs."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(tensor.shape, tensor.dtype, tensor.device)


class _Parameter(NamedTuple):
    """A parameter as it was when the wrapper was made."""

    name: str
    is_trained: bool
    kind: _Kind


class Seen:
    """The parameters and buffers of a module at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = {
            parameter: _Parameter(name, parameter.requires_grad, _kind(parameter))
            for name, parameter in module.named_parameters()
        }
        self._buffers = {name: _kind(value) for name, value in module.named_buffers()}

    def require_unchanged(self, module: nn.Module, is_replaced: bool) -> None:
        """Raise an error if a gradient of `module` would not be averaged.

        Names and their order may change, because pruning changes them.

        Raises:
            RuntimeError: a parameter was unfrozen, added, replaced or converted, or a
                newer DistributedDataParallel has wrapped this module.
        """
        if is_replaced:
            raise RuntimeError(
                "a newer DistributedDataParallel has wrapped this module: call that one"
            )
        num_known = 0
        for parameter in module.parameters():
            before = self._parameters.get(parameter)
            if before is None:
                self._raise_other_parameters(module)
            num_known += 1
            if parameter.requires_grad and not before.is_trained:
                raise RuntimeError(
                    f"{before.name} was frozen when the DistributedDataParallel was "
                    f"made and is trained now: {_ADVICE}, or freeze it afterwards"
                )
            if _kind(parameter) != before.kind:
                raise RuntimeError(
                    f"{before.name} was {before.kind} when the DistributedDataParallel "
                    f"was made and is {_kind(parameter)} now: {_ADVICE}"
                )
        if num_known != len(self._parameters) or module is not self._module:
            self._raise_other_parameters(module)

    def _raise_other_parameters(self, module: nn.Module) -> NoReturn:
        before = {known.name for known in self._parameters.values()}
        now = dict(module.named_parameters())
        new = [name for name, p in now.items() if p not in self._parameters]
        still = set(now.values())
        gone = [known.name for p, known in self._parameters.items() if p not in still]
        what = "the module has been replaced"
        if gone:
            what = f"{gone[0]} has been removed from the module"
        if new:
            what = f"{new[0]} has been {'replaced' if new[0] in before else 'added'}"
        raise RuntimeError(
            f"{what} since the DistributedDataParallel was made, so gradients would "
            f"not be averaged: {_ADVICE} (and a new optimizer), or copy values into "
            "the parameters instead of assigning new ones"
        )

    def require_trainable(
        self, arrived: Collection[Tensor], finds_unused: bool
    ) -> None:
        """Raise an error if a parameter without a gradient has been frozen.

        Raises:
            RuntimeError: a parameter has been frozen, and `finds_unused` is False.
        """
        for parameter, known in self._parameters.items():
            if finds_unused or parameter in arrived:
                continue
            if known.is_trained and not parameter.requires_grad:
                raise RuntimeError(
                    f"{known.name} has been frozen since the DistributedDataParallel "
                    f"was made: {_ADVICE}, or set find_unused_parameters=True"
                )

    def buffers(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers to fill with rank 0's values, leaving out any added since.

        Raises:
            RuntimeError: a buffer has a new shape or dtype, or no longer exists.
        """
        now = dict(module.named_buffers())
        for name, kind in self._buffers.items():
            if name not in now or _kind(now[name]) != kind:
                found = _kind(now[name]) if name in now else "gone"
                raise RuntimeError(
                    f"buffer {name} was {kind} when the DistributedDataParallel was "
                    f"made and is {found} now, so rank 0's may not fit: set "
                    "broadcast_buffers=False, or give it its final shape beforehand"
                )
        return [now[name] for name in self._buffers]


def set_aside_buffers(module: nn.Module) -> None:
    """Replace every buffer with a copy, because a graph may still need the old one."""
    copies: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                part._buffers[name] = copies[id(buffer)]
