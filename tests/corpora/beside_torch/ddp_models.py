"""Models for `ddp.py`, and the ways in which a step goes through them.

Each model takes `x` (BATCH, WIDTH), the rank and the step: some use other layers then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

from distlab.curriculum import load

BATCH, WIDTH = 6, 8


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Plain(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(3))

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` (BATCH, WIDTH) through all layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """An embedding whose weight is also the head's, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.middle = _linear()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """The head's outputs for tokens drawn from `x`."""
        tokens = (10 * x[:, 0].abs()).long() % WIDTH
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Frozen(Plain):
    """The middle layer requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Normed(Plain):
    """Batch norm, whose buffers differ between ranks after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(WIDTH))


class Direct(Plain):
    """Parameters that belong to no layer: a vector, a scalar, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through all layers, and all parameters of this module."""
        x = super().forward(x * self.gain + self.shift, rank, step)
        return torch.cat([x, self.nothing])


class Convolved(nn.Module):
    """Convolutions; the case turns parameters and buffers to channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 2), nn.Conv2d(4, 3, 2)
        self.mask = nn.Buffer(torch.rand(2, 4, 3, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` as images of 2 channels and 4 times 4 pixels."""
        images = torch.tanh(x).repeat(1, 4).view(-1, 2, 4, 4)
        masked = self.first(images) * self.mask[:1]
        return self.second(torch.tanh(masked)).flatten(1)


class Transposed(Plain):
    """A weight whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH + 1, WIDTH) / WIDTH
        self.turned = nn.Parameter(weight.T)

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through all layers and the weight."""
        return super().forward(x, rank, step) @ self.turned


class Branching(Plain):
    """Each rank uses two of four layers, other ones in each step; never the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(4))

    def used(self, rank: int, step: int) -> tuple[int, int]:
        """The layers of this rank in this step."""
        return (0, 1) if (rank + step) % 2 else (1, 2)

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the layers used."""
        for number in self.used(rank, step):
            x = torch.tanh(self.layers[number](x))
        return x


@dataclass
class Output:
    """What some models return."""

    values: Tensor
    more: dict[str, list[Tensor]]


class InDataclass(Branching):
    """The same with its outputs in a dataclass."""

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """Two outputs, one of them further inside."""
        first, second = (self.layers[k](x) for k in self.used(rank, step))
        return Output(torch.tanh(first), {"all": [torch.tanh(second)]})


class Checkpointed(Plain):
    """Blocks that compute their activations again; the last block is one of them."""

    checkpoint: Callable[..., Tensor]

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the first layer, then through the others in checkpoints."""
        x = torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            x = type(self).checkpoint(nn.Sequential(layer, nn.Tanh()), x)
        return x


class ByTheCourse(Checkpointed):
    """With the checkpoint() of unit 2.5."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """The unit's."""
        unit = load("activation_checkpointing", "reference")
        return unit.checkpoint(block, x)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    """With torch's reentrant one."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """Torch's."""
        return torchs.checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


class TwiceReentrant(Reentrant):
    """With one layer in two checkpoints: it has two gradients in one backward()."""

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through all layers, twice."""
        return super().forward(super().forward(x, rank, step), rank, step)


class NotReentrant(Checkpointed):
    """With torch's other one."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """Torch's."""
        return torchs.checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


class LossBeside(Branching):
    """A part of the loss is an attribute: find_unused cannot see it."""

    aside: Tensor

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the layers used; the last layer's loss in `aside`."""
        self.aside = self.layers[3](x).square().mean()
        return super().forward(x, rank, step)


# ── steps ───────────────────────────────────────────────────────────────────────────


def _inputs(rank: int, step: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def _loss(outputs: Any) -> Tensor:
    if isinstance(outputs, Output):
        return _loss(outputs.values) + sum(map(_loss, outputs.more["all"]))
    return (outputs - 0.3).square().mean()  # type: ignore[no-any-return]


Backward = Callable[[Any, int, int], Tensor]
"""(ddp, rank, step) → the loss, after its backward()."""


def once(ddp: Any, rank: int, step: int) -> Tensor:
    """One batch."""
    loss = _loss(ddp(_inputs(rank, step), rank, step))
    loss.backward()
    return loss


def accumulated(ddp: Any, rank: int, step: int) -> Tensor:
    """Three microbatches; two of them under no_sync()."""
    losses = []
    for number in range(3):
        with ddp.no_sync() if number < 2 else nullcontext():
            losses.append(_loss(ddp(_inputs(rank, step, number), rank, step)))
            losses[-1].backward()
    return torch.stack(losses).sum()


def two_forwards(ddp: Any, rank: int, step: int) -> Tensor:
    """Two batches, one backward()."""
    first = _loss(ddp(_inputs(rank, step), rank, step))
    loss = first + _loss(ddp(_inputs(rank, step, 1), rank, step + 1))
    loss.backward()
    return loss


def with_loss_beside(ddp: Any, rank: int, step: int) -> Tensor:
    """The outputs' loss, and another that is an attribute of the module."""
    loss = _loss(ddp(_inputs(rank, step), rank, step)) + ddp.module.aside
    loss.backward()
    return loss  # type: ignore[no-any-return]


def input_gradient_first(ddp: Any, rank: int, step: int) -> Tensor:
    """A gradient penalty: torch.autograd.grad() for the inputs, then backward()."""
    inputs = _inputs(rank, step).requires_grad_()
    loss = _loss(ddp(inputs, rank, step))
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    loss = loss + slope.square().mean()
    loss.backward()
    return loss


def first_only(ddp: Any, rank: int, step: int) -> Tensor:
    """A loss of one of several outputs."""
    loss = _loss(ddp(_inputs(rank, step), rank, step).values)
    loss.backward()
    return loss


def after_a_forward(ddp: Any, rank: int, step: int) -> Tensor:
    """A forward() without a backward(), then one batch."""
    ddp(_inputs(rank, step), rank, step + 1)
    return once(ddp, rank, step)


def after_an_early_error(ddp: Any, rank: int, step: int) -> Tensor:
    """In step 1 an error ends backward() before any parameter has its gradient."""
    if step == 1:
        outputs = ddp(_inputs(rank, step), rank, step)
        outputs.register_hook(_fail)
        with suppress(ArithmeticError):
            _loss(outputs).backward()
    return once(ddp, rank, step)


def after_an_error(ddp: Any, rank: int, step: int) -> Tensor:
    """In step 1 an error ends backward() when only the last layers have gradients."""
    if step == 1:
        handle = ddp.module.layers[0].weight.register_hook(_fail)
        with suppress(ArithmeticError):
            _loss(ddp(_inputs(rank, step), rank, step)).backward()
        handle.remove()
        ddp.zero_grad()
    return once(ddp, rank, step)


def _fail(_: Tensor) -> None:
    raise ArithmeticError
