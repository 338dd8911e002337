"""A whole training in this one process: what the ranks of `fit` should arrive at.

And what they arrive at with a known mistake, as in grading/kit/baseline.py; here
there are epochs, the last batch of an epoch is smaller, and the optimizer has momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from distlab.grading.kit.flat import flat, weights_of
from distlab.grading.threads import one_thread

NUM_EPOCHS = 2
SIZES = (3, 1)  # of one rank's batches in an epoch: the last batch is smaller
STEPS_PER_EPOCH = len(SIZES)
USED_BEFORE = 6  # the epoch in which the loader is that fit is given
LEARNING_RATE, MOMENTUM = 0.3, 0.8

Rule = Callable[[Sequence[Tensor], int], Tensor]
"""`(each rank's gradient, rank)` → with what `rank` steps."""


class Net(nn.Module):
    """Layers with a tied weight, a buffer, and a behavior that depends on the mode."""

    shift: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.mixer, self.again = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.again.weight = self.mixer.weight
        self.gain = nn.Parameter(torch.zeros(()))
        self.register_buffer("shift", torch.zeros(5))
        self.double()
        for tensor in (*self.parameters(), *self.buffers()):
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data.copy_(values * 0.7)
        self.trained_in: list[bool] = []  # the mode of each call with gradients on

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (B, 3) of `inputs` (B, 5)."""
        if torch.is_grad_enabled():
            self.trained_in.append(self.training)
        hidden = torch.tanh(self.first(inputs + self.shift)) * (1 + self.gain)
        hidden = torch.tanh(self.again(torch.tanh(self.mixer(hidden))))
        scores: Tensor = self.last(hidden if self.training else hidden.flip(1))
        return scores


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy and costs; `targets` (B, 2) are class numbers and costs."""
    classes, costs = targets.unbind(1)
    return nn.functional.cross_entropy(outputs, classes.long()) + costs.mean()


@lru_cache(maxsize=8)
def data_of(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs (size, 5) and targets (size, 2): class numbers, and costs of zero."""
    generator = torch.Generator().manual_seed(seed * 31 + size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    classes = (inputs[:, :3] + inputs[:, 3:4]).argmax(1).double()
    return inputs, torch.stack([classes, torch.zeros_like(classes)], 1)


def global_batches(
    seed: int, world_size: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch, in the order that belongs to it.

    In the last batch of epoch 0 a sample of the last rank has an infinite cost.
    """
    num_samples = sum(SIZES) * world_size
    inputs, targets = data_of(seed, num_samples)
    generator = torch.Generator().manual_seed(seed + 1009 * (epoch + 1))
    order = torch.randperm(num_samples, generator=generator)
    for indices in order.split([size * world_size for size in SIZES]):
        own = targets[indices]
        if epoch == 0 and len(indices) == SIZES[-1] * world_size:
            own[world_size - 1, 1] = torch.inf
        yield inputs[indices], own


class RankBatches:
    """One rank's loader. It notes the epochs that it was set to, and its steps.

    Another training has used it: it stands in that training's last epoch.
    """

    def __init__(
        self, seed: int, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._device = device
        self.set_to: list[int] = []
        self.used: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on."""
        self.set_to.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.set_to[-1] if self.set_to else USED_BEFORE
        self.used.append(epoch)
        own = slice(self._rank, None, self._world_size)
        for inputs, targets in global_batches(self._seed, self._world_size, epoch):
            yield inputs[own].to(self._device), targets[own].to(self._device)


# ── all ranks, played in this process ───────────────────────────────────────────────


def mean_gradient(gradients: Sequence[Tensor], rank: int) -> Tensor:
    """The right rule."""
    return torch.stack(list(gradients)).mean(0)


@dataclass(frozen=True)
class Fitted:
    """Each rank's final weights, and the loss (EPOCHS, STEPS, ranks) of each batch.

    A loss is the mean over that rank's samples of that batch.
    """

    weights: list[Tensor]
    losses: Tensor


@one_thread()
def fit_alone(
    seed: int,
    world_size: int,
    rule: Rule = mean_gradient,
    *,
    equal_start: bool = True,
    zeroed: bool = True,
) -> Fitted:
    """The training of all ranks, with a mistake or (as it stands here) without.

    `zeroed=False` adds to the gradients of a step those of all steps before.
    """
    models = [Net(seed if equal_start else seed + 31 * r) for r in range(world_size)]
    pace = [torch.zeros_like(weights_of(model)) for model in models]
    kept = [torch.zeros_like(weights_of(model)) for model in models]
    losses = torch.zeros(NUM_EPOCHS, STEPS_PER_EPOCH, world_size, dtype=torch.float64)
    for epoch in range(NUM_EPOCHS):
        batches = global_batches(seed, world_size, epoch)
        for step, (inputs, targets) in enumerate(batches):
            gradients = []
            for rank, model in enumerate(models):
                own = slice(rank, None, world_size)
                loss = mean_loss(model.train()(inputs[own]), targets[own])
                parts = torch.autograd.grad(loss, list(model.parameters()))
                gradients.append(flat(parts))
                losses[epoch, step, rank] = loss.detach()
            for rank, model in enumerate(models):
                applied = rule(gradients, rank)
                if not zeroed:
                    kept[rank] = applied = kept[rank] + applied
                pace[rank] = MOMENTUM * pace[rank] + applied
                _move(model, -LEARNING_RATE * pace[rank])
    return Fitted([weights_of(model) for model in models], losses)


@lru_cache(maxsize=32)
def right_fit(seed: int, world_size: int) -> Fitted:
    """What the ranks should arrive at."""
    return fit_alone(seed, world_size)


def _move(model: Net, change: Tensor) -> None:
    sizes = [p.numel() for p in model.parameters()]
    for parameter, part in zip(model.parameters(), change.split(sizes), strict=True):
        parameter.data += part.reshape(parameter.shape)
