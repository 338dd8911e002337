"""Control which layers draw the same random numbers on all ranks, and which don't.

When all ranks compute the same thing, such as dropout after the shards are summed, they
must draw the same numbers, or their copies of the layer drift apart. When each rank
computes its own part, such as dropout on its attention heads, equal numbers would drop
the same places in every part. Neither equal seeds nor different seeds get both right.

    shared(comm)     use rank 0's numbers on every rank
    Stream.begin()   use numbers of this rank's own until end()

Both depend only on the states of the generators. So a block that is recomputed draws
the same numbers again, and a run resumed from the states of all ranks continues exactly
as it would have. This follows the model-parallel generators of Megatron-LM (arXiv
1909.08053).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm

State = list[Tensor]


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a layer on this device may draw from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def _states(device: torch.device) -> State:
    return [generator.get_state() for generator in _generators(device)]


def _restore(device: torch.device, states: State) -> None:
    for generator, state in zip(_generators(device), states, strict=True):
        generator.set_state(state)


@contextmanager
def shared(comm: Comm) -> Iterator[None]:
    """Draw rank 0's numbers inside this block; collective.

    If a rank's generators differed from rank 0's, they are restored afterwards.
    """
    if comm.world_size == 1:
        yield
        return
    own = _states(comm.device)
    common = torch.cat(own).to(comm.device)
    comm.broadcast(common, 0)
    received = common.cpu().split([len(state) for state in own])
    _restore(comm.device, list(received))
    try:
        yield
    finally:
        if any(not torch.equal(a, b) for a, b in zip(own, received, strict=True)):
            _restore(comm.device, own)


class Stream:
    """Gives this rank its own random numbers between `begin` and `end`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._shared: State = []  # before begin(); empty outside
        self._seeded: State = []

    @property
    def has_begun(self) -> bool:
        """Return True between `begin` and `end`."""
        return bool(self._shared)

    def begin(self) -> None:
        """Draw different numbers from all other ranks from now on."""
        self.end()
        device = self._comm.device
        self._shared = _states(device)
        for generator, state in zip(_generators(device), self._shared, strict=True):
            data = f"{self._comm.rank}".encode() + state.numpy().tobytes()
            seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
            generator.manual_seed(seed >> 1)
        self._seeded = _states(device)

    def end(self) -> None:
        """Go back to the shared numbers; the next `begin` starts another stream."""
        if not self._shared:
            return
        device, before = self._comm.device, self._shared
        now = _states(device)
        _restore(device, before)
        rows = zip(_generators(device), now, self._seeded, strict=True)
        for generator, state, seeded in rows:
            if not torch.equal(state, seeded):  # else leave no trace at all
                torch.rand(1, generator=generator, device=generator.device)
        self.forget()

    def forget(self) -> None:
        """Forget the saved states, for example after an error has ended the block."""
        self._shared, self._seeded = [], []

    def surround(self, first: Iterable[nn.Module], last: Iterable[nn.Module]) -> None:
        """Draw this rank's own numbers between the `first` and the `last` layers."""
        for layer in first:
            layer.register_forward_hook(self._after_first)
        for layer in last:
            layer.register_forward_pre_hook(self._before_last)

    def _after_first(self, *_: Any) -> None:
        self.begin()

    def _before_last(self, *_: Any) -> None:
        self.end()
