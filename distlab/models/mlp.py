"""A small model that learns to read digits: 64 pixels, one hidden layer, 10 digits."""

from __future__ import annotations

import torch
from torch import nn

from distlab.seeds import small_seed

NUM_PIXELS = 64
NUM_DIGITS = 10


def make_mlp(hidden: int = 64, seed: int = 0) -> nn.Sequential:
    """A 64-`hidden`-10 network in float64 (4,810 parameters with 64 hidden units).

    The same seed gives the same weights; torch's own generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small_seed(seed))
        return nn.Sequential(
            nn.Linear(NUM_PIXELS, hidden, dtype=torch.float64),
            nn.ReLU(),
            nn.Linear(hidden, NUM_DIGITS, dtype=torch.float64),
        )
