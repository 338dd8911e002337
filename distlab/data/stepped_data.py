"""A data set that is told before each batch which step the batch is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

Place = tuple[int, int]
"""A step, and the index of one of its samples."""


class SteppedData(Dataset[Any]):
    """Serves `dataset` in batches of places, and calls `before(step)` before each."""

    def __init__(
        self, dataset: Dataset[Any], before: Callable[[int], None] | None = None
    ) -> None:
        self.dataset, self.before = dataset, before

    def __getitems__(self, places: Sequence[Place]) -> list[Any]:
        """Return the samples of one step."""
        if places and self.before is not None:
            self.before(places[0][0])
        indices = [index for _, index in places]
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]
