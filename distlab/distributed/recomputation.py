"""Restore autocast and buffers when a block is recomputed.

Unit activation_checkpointing already replays the random numbers. Two more things
differ between forward() and backward(): autocast has usually ended, and the block may
have written to its buffers. Batch norm would count each step twice, and spectral norm
would start from another vector. So we give the block copies of the buffers it started
with, and discard whatever it writes to them the second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


class Surroundings:
    """The autocast settings and buffers at the start of a block's forward()."""

    def __init__(self, block: nn.Module) -> None:
        kinds = {"cpu"} | {tensor.device.type for tensor in block.parameters()}
        self._autocast = [
            torch.autocast(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in sorted(kinds)
        ]
        self._at = _buffers(block)
        self._values = {place: value.clone() for place, value in self._at.items()}
        self._versions = {place: value._version for place, value in self._at.items()}
        self._modes = {part: part.training for part in block.modules()}
        self._parameters: dict[Tensor, int] = {}  # their versions after forward()

    def forget_unchanged(self, block: nn.Module) -> None:
        """After forward(), drop the copies of buffers that it did not write to.

        A kernel may write without bumping the version, so we compare the values too.
        """
        now = _buffers(block)
        self._values = {
            place: value
            for place, value in self._values.items()
            if now.get(place) is not self._at[place]
            or now[place]._version != self._versions[place]
            or not torch.equal(now[place], value)
        }
        self._at, self._versions = {}, {}
        self._parameters = {p: p._version for p in block.parameters()}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Use the same autocast settings and copies of the buffers inside a block."""
        if any(p._version != version for p, version in self._parameters.items()):
            raise RuntimeError(
                "a parameter of a checkpointed block was changed between forward() and "
                "backward(), which runs the block again: call optimizer.step() later"
            )
        modes = {part: part.training for part in self._modes}
        _set_modes(self._modes)
        now = {(part, name): part._buffers.get(name) for part, name in self._values}
        for (part, name), value in self._values.items():
            part._buffers[name] = value.clone()
        with ExitStack() as stack:
            for context in self._autocast:
                stack.enter_context(context)
            try:
                yield
            finally:
                _set_modes(modes)
                for (part, name), buffer in now.items():
                    part._buffers[name] = buffer


def _set_modes(modes: dict[nn.Module, bool]) -> None:
    for part, is_training in modes.items():
        part.training = is_training


def _buffers(block: nn.Module) -> dict[Place, Tensor]:
    return {
        (part, name): buffer
        for part in block.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    }
