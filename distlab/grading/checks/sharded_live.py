"""M, the oracle of memory: the bytes of all tensors that are alive, at every moment.

Whose they are does not matter, nor where they are kept: what a rank holds is what it
holds. An optimizer that says it is sharded and is not cannot hide here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

unseen = _disable_current_modes
"""A context: what is made in it is not counted, as copies that a check keeps."""

PATIENCE_S = 0.3  # gloo's thread may hold a tensor for a moment after a call has ended


class LiveBytes(TorchDispatchMode):
    """While it is active, remembers the memory of every tensor that is made.

    `look`, if given, is called after every operation of torch.
    """

    def __init__(self, look: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look
        # As long as there is such a reference, its address is not used again.
        self._storages: dict[int, StorageWeakRef] = {}
        self._waited_in_vain = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note what it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)
        if self.look is not None:
            self.look()
        return out

    @property
    def live(self) -> int:
        """Bytes that are alive now; memory that was freed under a tensor is not."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def settled(self, allowed: int) -> int:
        """`live`, after a moment of patience if that is more than `allowed`.

        Once that was in vain there is none left: the rank holds too much, and looking
        at each of its layers would take seconds.
        """
        found = self.live
        if found <= allowed or self._waited_in_vain:
            return found
        gc.collect()  # transfers that are over may refer to themselves
        until = time.monotonic() + PATIENCE_S
        while (found := min(found, self.live)) > allowed:
            if time.monotonic() > until:
                self._waited_in_vain = True
                break
            time.sleep(0.01)
        return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
