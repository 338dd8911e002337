"""How many bytes autograd keeps for backward(): now, at the peak, at each change."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn


class _Kept:
    """A tensor as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """While it is entered: the bytes that autograd keeps, each time they change.

    What several operations keep counts once, with all of its memory, also if they keep
    a view of it. `parameters` do not count: they are there anyway. Counted are the
    graphs that this thread makes. `history` has bytes, the first 0.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.history = [0]
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._holders: Counter[int] = Counter()  # by where their memory is
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._keep, lambda kept: kept.tensor
        )

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @property
    def live(self) -> int:
        """What is kept now."""
        return self.history[-1]

    @property
    def peak(self) -> int:
        """The most that was kept at any time."""
        return max(self.history)

    def _keep(self, tensor: Tensor) -> _Kept:
        # Detached, or a result that is kept would hold its own graph forever.
        kept = _Kept(tensor.detach())
        memory = tensor.untyped_storage()
        address, size = memory.data_ptr(), memory.nbytes()
        if address not in self._parameters:
            if not self._holders[address]:
                self.history.append(self.live + size)
            self._holders[address] += 1
            weakref.finalize(kept, self._forget, address, size)
        return kept

    def _forget(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self.history.append(self.live - size)
