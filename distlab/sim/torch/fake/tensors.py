"""Tensors with a shape, a storage and an address, and no memory behind it.

A fake tensor is an ordinary CPU tensor. Only its storage is special: it points into an
address range that is reserved but never touched, so even a 140 GB model uses no memory.
Therefore C++ code, such as DDP's reducer, works on it as on any other tensor, whereas
torch's own FakeTensor has no storage that C++ could use. The operators don't compute
anything either (see `operators`).

Some tensors do have values. A tensor made from numbers that the program states, such as
`torch.tensor([3, 4])`, an index or a step counter, is computed as usual. Once something
is written into it from a fake tensor, its values are unknown, and we mark it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from distlab.sim.torch.fake.account import Account
from distlab.sim.torch.replacing import Replaced

_SIZES = tuple(1 << bits for bits in (45, 44, 42, 40, 38))  # of addresses, if there are
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ALIGNED = 64
_CPU = torch.device("cpu")
_MARK = "_distlab_unknown"
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that can be fake; others are made of such ones."""


class Addresses:
    """A stretch of addresses, handed out from one end to the other, over and over.

    The process keeps it: a second one might not be had.
    """

    def __init__(self) -> None:
        self._map = _reserved()
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.end = self.start + len(self._map)
        self._next = self.start

    def storage(self, num_bytes: int) -> torch.UntypedStorage:
        """A storage of that many bytes.

        Raises:
            MemoryError: so many have no address.
        """
        if num_bytes > self.end - self.start:
            raise MemoryError(f"a tensor of {num_bytes:,} bytes has no address")
        if self._next + num_bytes > self.end:
            self._next = self.start
        at = self._next
        self._next += -(-num_bytes // _ALIGNED) * _ALIGNED
        made: Any = torch._C._construct_storage_from_data_pointer(at, _CPU, num_bytes)
        return made  # type: ignore[no-any-return]


@cache
def addresses() -> Addresses:
    """The one stretch of addresses of this process."""
    return Addresses()


def _reserved() -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    for size in _SIZES:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except OSError:  # a limit on addresses (ulimit -v), or none are lent unbacked
            continue
    raise MemoryError(
        "this system reserves no addresses without memory (see ulimit -v)"
    )


class FakeTensors:
    """How fake tensors come about, and how they are told from others."""

    def __init__(self) -> None:
        self._addresses = addresses()

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether nobody knows the values of this plain tensor."""
        at = tensor.data_ptr()
        if self._addresses.start <= at < self._addresses.end:
            return True
        return hasattr(tensor.untyped_storage(), _MARK)

    def forget(self, tensor: Tensor) -> None:
        """From now on nobody knows its values, nor those of its views."""
        if not self.is_unknown(tensor):
            setattr(tensor.untyped_storage(), _MARK, True)

    def make(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        account: Account,
        kind: int,
    ) -> Tensor:
        """A fake tensor; `account` has its bytes as of that kind until it is freed."""
        num_bytes = bytes_of(shape, stride, dtype.itemsize)
        storage = self._addresses.storage(num_bytes)
        if num_bytes:
            account.add(storage, num_bytes, kind)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)


def bytes_of(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """The bytes that a tensor's elements reach over."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return (last + 1) * itemsize


# ── storages that are resized ───────────────────────────────────────────────────────


def replace_storages(replaced: Replaced) -> None:
    """Replace methods of UntypedStorage, while fake tensors are about.

    FSDP2 gives the memory of whole parameters back, and takes it again, by resizing
    their storages. C++ would have to own the memory for that; here only the account
    changes, and what the storage says about itself.
    """
    kind: Any = torch.UntypedStorage
    resize, nbytes, clone = kind.resize_, kind.nbytes, kind.clone

    def resize_(storage: Any, num_bytes: int) -> Any:
        watch = getattr(storage, "_distlab_watch", None)
        if watch is None:
            return resize(storage, num_bytes)
        if num_bytes > nbytes(storage):
            raise NotImplementedError(
                "a fake tensor's storage cannot be made larger than it was at first"
            )
        watch.resize(num_bytes)
        return storage

    def now_bytes(storage: Any) -> int:
        watch = getattr(storage, "_distlab_watch", None)
        number: int = nbytes(storage) if watch is None else watch.num_bytes
        return number

    def cloned(storage: Any) -> Any:
        watch = getattr(storage, "_distlab_watch", None)
        if watch is None:
            return clone(storage)
        made = addresses().storage(watch.num_bytes)
        watch.account.add(made, watch.num_bytes, watch.kind)
        return made

    replaced.put(kind, "resize_", resize_)
    replaced.put(kind, "nbytes", now_bytes)  # size() asks for it
    replaced.put(kind, "clone", cloned)  # as deepcopy() does
