"""A device that is none: tensors in ordinary memory, and a list of which are on it.

A rank whose `comm.device` is this one is as strict as one on a GPU: a tensor that was
not put there is refused by `comm`, and by every operation with one that was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.harness import perform
from distlab.runner import Cluster, RankContext, Run

T = TypeVar("T")
ELSEWHERE = torch.device("meta")  # a name that every build of torch knows
_PLAIN_TENSOR = torch.tensor
_MAY_MIX = ("copy_", "_to_copy", "index")  # as on a GPU: between devices, by an index


class Elsewhere(TorchDispatchMode):
    """Within the block, what is made on `ELSEWHERE` or from such tensors is there."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, Any] = {}  # kept, so that no address comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Perform `func` in ordinary memory, if its tensors are in one place."""
        named = dict(kwargs or {})
        device = named.get("device")
        if device == ELSEWHERE:
            named["device"] = torch.device("cpu")
        given = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        there = [tensor for tensor in given if self.has(tensor)]
        changes = func._schema.is_mutable
        # A single number may come from the CPU, but not be changed there.
        strict = [t for i, t in enumerate(given) if t.dim() or (changes and i == 0)]
        here = [tensor for tensor in strict if not self.has(tensor)]
        if there and here and func.overloadpacket.__name__ not in _MAY_MIX:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        result = func(*args, **named)
        if device == ELSEWHERE or (there and device is None and not changes):
            self._note(result)
        return result

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` is there."""
        return tensor.untyped_storage()._cdata in self._there

    def _note(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._there[storage._cdata] = storage


class OnlyThere(Wrapper):
    """Refuses tensors that are not there; what it hands on is ordinary memory."""

    def __init__(self, inner: Comm, place: Elsewhere) -> None:
        super().__init__(inner)
        self._place = place

    @property
    def device(self) -> torch.device:
        """Where the tensors have to be."""
        return ELSEWHERE

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        for tensor in (call.sent, call.received):
            if tensor is not None and not self._place.has(tensor):
                raise RuntimeError(f"{call.op}: a tensor that is not on comm.device")
        with _disable_current_modes():
            return proceed()


def _tensor(data: Any, *, device: Any = None, **how: Any) -> Tensor:
    """`torch.tensor`, which asks no mode what to do with its device."""
    made = _PLAIN_TENSOR(data, **how)
    return made if device is None else made.to(device)


def perform_elsewhere(context: RankContext, *values: Any) -> Any:
    """`perform`, with everything that the ranks share on that device."""
    with Elsewhere() as place, mock.patch.object(torch, "tensor", _tensor):
        comm = OnlyThere(context.comm, place)
        return perform(replace(context, comm=comm), *values)


class Ranks:
    """A cluster that makes its runs with `how`, and has `program` play scenarios."""

    def __init__(
        self, cluster: Cluster, program: Callable[..., Any] = perform, **how: Any
    ) -> None:
        self._cluster, self._program, self._how = cluster, program, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def run(
        self, program: Callable[..., Any], world_size: int, *args: Any, **how: Any
    ) -> Run:
        """See `Cluster.run`."""
        program = self._program if program is perform else program
        return self._cluster.run(program, world_size, *args, **{**how, **self._how})
