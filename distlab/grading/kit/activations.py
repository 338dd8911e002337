"""How much is kept for backward at the peak: by autograd, and by whoever calls it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class _Kept:
    """A tensor as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Activations:
    """Counts, while it is entered, the bytes that graphs of this thread keep.

    Parameters do not count: they are there anyway. `live` and `peak` are bytes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.live = self.peak = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._keep, lambda kept: kept.tensor
        )

    def __enter__(self) -> Activations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> _Kept:
        # Detached, or a result that is kept would hold its own graph forever.
        kept = _Kept(tensor.detach())
        if tensor.untyped_storage().data_ptr() not in self._parameters:
            size = tensor.numel() * tensor.element_size()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._forget, size)
        return kept

    def _forget(self, size: int) -> None:
        self.live -= size


class Outputs:
    """Counts how many results of a model, with their graphs, are alive at a time.

    backward() frees what autograd has kept; a result goes when nobody holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.live = self.peak = 0
        model.register_forward_hook(self._see)

    def _see(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self.live += 1
            self.peak = max(self.peak, self.live)
            weakref.finalize(output, self._forget)

    def _forget(self) -> None:
        self.live -= 1
