"""Random numbers that must agree between ranks, and others that must differ.

Where all ranks compute the same, such as a dropout after the sum of all shards, they
must draw the same numbers, or their copies of a layer drift apart. Where each rank
computes a part of its own, such as a dropout of its heads, equal numbers would make
parts of one layer drop together. Equal seeds get the second wrong, unequal ones the
first.

    shared(comm)     the numbers of rank 0, on every rank
    Stream.begin()   from now on numbers of this rank's own, until end()

Both depend on nothing but the generators' states. So a block that is recomputed draws
the same numbers again, and a checkpoint with the states of all ranks continues equally.
Source: the model-parallel generators of Megatron-LM (arXiv 1909.08053).
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
    """Those that a layer on this device may draw from."""
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
    """In this block, draw the numbers that rank 0 would draw; collective.

    Afterwards a rank that had other numbers than rank 0 has its own again.
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
    """Numbers that only this rank draws, from `begin` to `end`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._shared: State = []  # before begin(); empty outside
        self._seeded: State = []

    def begin(self) -> None:
        """Draw other numbers than every other rank from now on."""
        self.end()
        device = self._comm.device
        self._shared = _states(device)
        for generator, state in zip(_generators(device), self._shared, strict=True):
            data = f"{self._comm.rank}".encode() + state.numpy().tobytes()
            seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
            generator.manual_seed(seed >> 1)
        self._seeded = _states(device)

    def end(self) -> None:
        """Draw what all ranks draw again; the next `begin` begins another stream."""
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
        """An error has ended the block: its generators are no longer of interest."""
        self._shared, self._seeded = [], []

    def surround(self, first: Iterable[nn.Module], last: Iterable[nn.Module]) -> None:
        """What runs between a first and a last layer draws this rank's own numbers."""
        for layer in first:
            layer.register_forward_hook(self._after_first)
        for layer in last:
            layer.register_forward_pre_hook(self._before_last)

    def _after_first(self, *_: Any) -> None:
        self.begin()

    def _before_last(self, *_: Any) -> None:
        self.end()
