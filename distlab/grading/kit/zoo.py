"""A small model whose parameters are special: tied, frozen, unused, and of any shape.

`where` finds the elements of some of them in a flat copy of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

STALE = 0.5
"""What `with_old_gradients` puts into every .grad."""


class Zoo(nn.Module):
    """float64 (N, 6) to (N, 3).

    `mixer` and `again` share a weight; `norm` has no bias, and `extra.gain` no
    dimension. With `frozen` there is a layer `fixed`, which is not trained; with
    `unused` there is `extra.unused`, a parameter that no forward reads. Both are small:
    who sends zeros for them sends little more. With `transposed` the last weight is a
    transposed view of its memory, and so is its gradient; the values are the same.
    """

    def __init__(
        self,
        seed: int,
        *,
        frozen: bool = False,
        unused: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5, bias=False)
        self.mixer = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.mixer.weight
        self.fixed = nn.LayerNorm(5, bias=False) if frozen else nn.Identity()
        self.last = nn.Linear(5, 3)
        if transposed:
            self.last.weight = nn.Parameter(torch.empty(5, 3).T)
        self.extra = nn.ParameterDict({"gain": torch.ones(())})
        if unused:
            self.extra["unused"] = torch.ones(1)
        self.double()
        self.fixed.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            shape = parameter.shape
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(drawn * 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of three classes."""
        x = torch.tanh(self.mixer(self.norm(self.first(inputs))))
        x = torch.tanh(self.again(x)) * (1.0 + self.extra["gain"])
        scores: Tensor = self.last(torch.tanh(self.fixed(x)))
        return scores


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the samples that is not plain cross_entropy."""
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def with_old_gradients(model: nn.Module) -> None:
    """Put STALE into every .grad, also of what is frozen or unused."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, STALE)


def all_gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Of all parameters, in the model's order; zeros for who has none."""
    every = list(model.parameters())
    trained = [parameter for parameter in every if parameter.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    given = dict(zip(map(id, trained), found, strict=True))
    zeros = (torch.zeros_like(parameter) for parameter in every)
    return [
        zero if (gradient := given.get(id(parameter))) is None else gradient
        for parameter, zero in zip(every, zeros, strict=True)
    ]


def where(model: nn.Module, chosen: Callable[[str, nn.Parameter], bool]) -> Tensor:
    """One number per element of the flat model: 1 in the chosen parameters, else 0."""
    return torch.cat(
        [
            torch.full((parameter.numel(),), float(chosen(name, parameter))).double()
            for name, parameter in model.named_parameters()
        ]
    )
