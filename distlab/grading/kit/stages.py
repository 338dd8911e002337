"""A model for as many ranks as there are, cut at known places; and its data.

All widths are at least 3, the number of classes: a loss can be taken at every cut but
the third, and only numbers tell that it was taken at the wrong place. Each stage but
the first saves the tensor that enters it. What crosses the first cut is float32, and at
the third a sample has two dimensions: who assumes a dtype or a shape is found out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 3
NOT_YOURS = 10**9  # in the place of inputs that a rank may not read
LEARNING_RATE = 0.3
ROUNDED = 1e-6
"""Relative error that the float32 at the first cut may leave in a gradient."""
NARROW_CUT, DEEP_CUT = 1, 3


class Tokens(nn.Module):
    """What an embedding is for: whole numbers in, float64 out."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Numbers of about one."""
        return tokens.double() / 5


class Entry(nn.Module):
    """What a stage behind a cut begins with."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        """This cut's shape to (N, width), float64; saves x itself."""
        # Of float32 the product has the same bits, however long the batch is.
        squares = (x * x).double().tanh()
        return squares[:, :, 0] if self.cut == DEEP_CUT else squares


class Exit(nn.Module):
    """What a stage before a cut ends with."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        """The dtype and shape of this cut."""
        x = x.float() if self.cut == NARROW_CUT else x
        return x.unsqueeze(-1) if self.cut == DEEP_CUT else x


def widths(num_stages: int) -> list[int]:
    """How many numbers a sample has before each stage, and behind the last one."""
    return [6, *(4 + (3 * cut) % 5 for cut in range(1, num_stages)), CLASSES]


def make_stages(seed: int, num_stages: int) -> list[nn.Sequential]:
    """The stages of one model that calculates in float64; the first takes tokens."""
    generator = torch.Generator().manual_seed(seed * 31 + num_stages)
    sizes = widths(num_stages)
    stages = []
    for number in range(num_stages):
        linear = nn.Linear(sizes[number], sizes[number + 1]).double()
        for parameter in linear.parameters():
            shape = parameter.shape
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(drawn * 0.6)
        first = Entry(number) if number else nn.Sequential(Tokens(), nn.Tanh())
        last = [Exit(number + 1)] if number + 1 < num_stages else []
        stages.append(nn.Sequential(first, linear, *last))
    return stages


def make_like(num_stages: int, stage: int) -> Tensor:
    """One sample of what comes into a stage, filled with what nobody should use."""
    width = widths(num_stages)[stage]
    if stage == 0:
        return torch.full((width,), NOT_YOURS)
    dtype = torch.float32 if stage == NARROW_CUT else torch.float64
    shape = (width, 1) if stage == DEEP_CUT else (width,)
    return torch.full(shape, torch.nan, dtype=dtype)


def make_batch(seed: int, step: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs (num_samples, 6), whole numbers, and class numbers (num_samples,)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + num_samples)
    inputs = torch.randint(-9, 10, (num_samples, 6), generator=generator)
    targets = torch.randint(0, CLASSES, (num_samples,), generator=generator)
    return inputs, targets
