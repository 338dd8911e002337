"""Stages as real models have them, and losses that are negative, or not a number.

Some parameters are frozen, unused, or have two names. What crosses a cut behind the
first one does not lie in one piece, and neither does the gradient of what comes in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distlab.grading.kit.stages import NARROW_CUT, make_stages
from distlab.grading.kit.zoo import loss_of

FROZEN_AT = 4
"""With so many stages the second one has nothing to train, and passes gradients on."""


class Turned(nn.Module):
    """The same numbers, column by column in memory; so is the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """A view that is not contiguous, if it has several rows and columns."""
        return x.transpose(0, 1).contiguous().transpose(0, 1)


class Unusual(nn.Module):
    """A layer between a gain with two names, and a parameter that nothing reads."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.gain = nn.Parameter(torch.full((), 1.25, dtype=torch.float64))
        self.again = self.gain
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the layer."""
        made: Tensor = self.layer(x * self.gain) * self.again
        return made


def unusual_stages(
    seed: int, num_stages: int, *, turned: bool = True
) -> list[nn.Sequential]:
    """The stages of `kit.stages`, each with parameters of all kinds."""
    made = []
    for number, (first, layer, *last) in enumerate(make_stages(seed, num_stages)):
        assert isinstance(layer, nn.Linear)
        before = [Turned()] if turned and number > NARROW_CUT else []
        behind = turned and NARROW_CUT <= number < num_stages - 1
        after = [Turned()] if behind else []
        stage = nn.Sequential(*before, first, Unusual(layer), *last, *after)
        layer.bias.requires_grad_(False)
        if number == 1 and num_stages == FROZEN_AT:
            stage.requires_grad_(False)
        made.append(stage)
    return made


def nan_once(output: Tensor, targets: Tensor) -> Tensor:
    """The loss; of more than one sample it is nan, and so are its gradients."""
    loss = loss_of(output, targets)
    return loss * torch.nan if len(targets) > 1 else loss


def negative(output: Tensor, targets: Tensor) -> Tensor:
    """The loss, less a constant: as negative as a likelihood may be."""
    return loss_of(output, targets) - 50.0
