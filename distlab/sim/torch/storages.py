"""Where a rank's tensors are, and how much memory they take, now and at most."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from distlab.sim.kernel import Kernel
from distlab.sim.torch.tally import Tally


def on_cpu(device: Any) -> Any:
    """The device that is meant, in this process: "cuda" is "cpu"."""
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")  # the number of a GPU
    return device


class _Storage(weakref.ref):  # type: ignore[type-arg]
    """A storage, its key among those that live, and its size."""

    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class Memory(Tally):
    """The storages that a rank's operators made and that still exist, in bytes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._storages: dict[int, Any] = {}

    def note(self, out: Any) -> None:
        """Take note of what an operator returned: a tensor, or several."""
        if self._kernel.at_work:
            return  # it computes what a collective gives to all ranks
        if isinstance(out, torch.Tensor):
            self._note(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                if isinstance(one, torch.Tensor):
                    self._note(one)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        reference = _Storage(storage, self._gone)
        reference.key, reference.num_bytes = key, storage.nbytes()
        self._storages[key] = reference
        self.change(reference.num_bytes)

    def _gone(self, reference: Any) -> None:
        known = self._storages.get(reference.key)
        if known is reference:  # not another one in its place
            del self._storages[known.key]
            self.change(-known.num_bytes)
