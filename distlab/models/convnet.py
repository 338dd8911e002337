"""A small convolutional network for 28×28 images, after LeNet.

Source: LeCun et al., Gradient-based learning applied to document recognition (1998),
section II.B; with max-pooling and ReLU.
"""

from __future__ import annotations

import torch
from torch import nn

from distlab.seeds import small_seed


def make_convnet(seed: int = 0) -> nn.Sequential:
    """(N, 1, 28, 28) to ten scores, in float32, 80,202 parameters.

    The same seed gives the same weights; torch's own generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small_seed(seed))
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5),  # (N, 16, 24, 24)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=5),  # (N, 32, 8, 8)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),  # (N, 512)
            nn.Linear(512, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
