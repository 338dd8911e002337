"""Memory: the bytes of all tensors that are alive, at every moment.

Whose they are does not matter, nor where they are kept: what a rank holds is what it
holds. An optimizer that says it is sharded and is not cannot hide here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from distlab.given.sharded_optimizer.freed import FreedMemoryError as FreedMemoryError

unseen = _disable_current_modes
"""A context whose tensors are not counted, such as the copies that a check keeps."""

PATIENCE_S = 0.3  # gloo's thread may hold a tensor for a moment after a call has ended


_NEEDS_NO_NUMBERS = ("empty", "zeros", "ones", "full", "rand", "resize", "set_")


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would call `__torch_dispatch__` through its compiler's switch, which
        # takes longer than what we do there; nothing is compiled here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note what it made.

        Raises:
            FreedMemoryError: it would read or write where there is no memory.
        """
        if needs_numbers(func) and not all(map(has_memory, _tensors(args))):
            raise FreedMemoryError(_used_by(func))
        try:
            out = func(*args, **(kwargs or {}))
        except RuntimeError as error:  # some views, of what is not there, are refused
            if "setStorage" in str(error):
                raise FreedMemoryError(_used_by(func)) from error
            raise
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


def has_memory(tensor: Tensor) -> bool:
    """Whether all of its elements lie in memory that is there."""
    there = tensor.untyped_storage().nbytes() // tensor.element_size()
    place = tensor.storage_offset()
    if tensor.is_contiguous():
        return place + tensor.numel() <= there or not tensor.numel()
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return True
        place += (size - 1) * step
    return place < there


@cache
def needs_numbers(func: Any) -> bool:
    """Whether an operation of torch looks at elements: one that gives a view does not.

    Nor does one that takes a shape from a tensor, or gives it other memory.
    """
    name = _name_of(func).removeprefix("new_")
    returned = func._schema.returns
    looks = bool(returned) and not func.is_view
    return looks and not name.startswith(_NEEDS_NO_NUMBERS)


def _name_of(func: Any) -> str:
    return str(func.overloadpacket).rpartition(".")[2]


def _used_by(func: Any) -> str:
    return f"a tensor is used after its memory was freed (in torch's {_name_of(func)})"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
