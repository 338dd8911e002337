"""How many results of a model, with their graphs, are alive at a time."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn


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
