"""Load a text to learn from: 180 paragraphs of the course, 31,740 letters.

`course.txt` is a separate file, so that editing a guideline changes no loss. The
paragraphs come from many places and needn't follow from each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Letters as tokens: `tokens` (N,) are indices into `letters`, which is sorted."""

    letters: str
    tokens: Tensor

    def batch(self, shape: tuple[int, int], *, seed: int, step: int) -> Tensor:
        """Return (B, T) tokens: B passages of T letters, the same for every caller."""
        size, length = shape
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        last = len(self.tokens) - length
        starts = torch.randint(last + 1, (size, 1), generator=generator)
        return self.tokens[starts + torch.arange(length)]


def load_text() -> Text:
    """Load the text that comes with distlab, without a download.

    You get your own copy of the tokens, so you may change them.
    """
    text = _load_text()
    return Text(text.letters, text.tokens.clone())


@functools.cache
def _load_text() -> Text:
    path = Path(__file__).with_name("course.txt")
    text = path.read_text(encoding="utf-8")
    letters = "".join(sorted(set(text)))
    places = {letter: place for place, letter in enumerate(letters)}
    return Text(letters, torch.tensor([places[letter] for letter in text]))
