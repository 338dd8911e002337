"""A whole training in this one process: what the ranks of `fit` should arrive at.

And what they arrive at with a known mistake, as in distlab/grading/reference.py; here
shares are unequal, some are empty, and the optimizer has momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from distlab.grading.reference import weights_of
from distlab.grading.threads import one_thread

NUM_EPOCHS = 2
NUM_SAMPLES, GLOBAL_BATCH = 10, 8  # the last batch of an epoch has two samples
STEPS_PER_EPOCH = -(-NUM_SAMPLES // GLOBAL_BATCH)
LEARNING_RATE, MOMENTUM = 0.3, 0.8
HELD_OUT = ((5, 2), (), (1,), (3, 0, 4), (2,), (), (6,))  # each rank's batches

Gradients = Sequence[Tensor | None]
Rule = Callable[[Gradients, Sequence[int], int], Tensor | None]
"""`(each rank's gradient, its samples, rank)` → with what `rank` steps, if it does."""


class Net(nn.Module):
    """Two layers, a buffer that counts, and a behavior that depends on the mode."""

    shift: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
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
        hidden = torch.tanh(self.first(inputs + self.shift))
        scores: Tensor = self.last(hidden if self.training else hidden.flip(1))
        return scores


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, as a function of nothing but these two."""
    return nn.functional.cross_entropy(outputs, targets)


@lru_cache(maxsize=8)
def data_of(seed: int, size: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """Inputs (size, 5) and class numbers (size,)."""
    generator = torch.Generator().manual_seed(seed * 31 + size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, :3] + inputs[:, 3:4]).argmax(1)


def global_batches(seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch, in the order that belongs to it."""
    inputs, targets = data_of(seed)
    generator = torch.Generator().manual_seed(seed + 1009 * (epoch + 1))
    order = torch.randperm(NUM_SAMPLES, generator=generator)
    for places in order.split(GLOBAL_BATCH):
        yield inputs[places], targets[places]


def share_of(
    epoch: int, step: int, rank: int, world_size: int, size: int, full: bool
) -> slice:
    """Which samples of a batch are a rank's: uneven, now and then none.

    With `full` no rank ever goes without: that is the control of an experiment.
    """
    step += epoch * STEPS_PER_EPOCH  # so that each rank comes to go without
    quotas = [1 if full else (r + step + 1) % 3 for r in range(world_size)]
    if sum(quotas) == 0:
        quotas[0] = 1
    edges = [size * sum(quotas[:r]) // sum(quotas) for r in range(world_size + 1)]
    return slice(edges[rank], edges[rank + 1])


class Shares:
    """One rank's loader. It notes the epochs that it was set to, and its steps."""

    def __init__(
        self,
        seed: int,
        rank: int,
        world_size: int,
        *,
        full: bool,
        device: torch.device,
    ) -> None:
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._full, self._device = full, device
        self.set_to: list[int] = []
        self.used: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """From here on, the order of `epoch`."""
        self.set_to.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.set_to[-1] if self.set_to else 0
        self.used.append(epoch)
        for step, batch in enumerate(global_batches(self._seed, epoch)):
            inputs, targets = batch
            size = len(inputs)
            if self._full and size < self._world_size:
                return  # too few for everyone; the control does without
            mine = share_of(epoch, step, self._rank, self._world_size, size, self._full)
            yield inputs[mine].to(self._device), targets[mine].to(self._device)


def held_out_of(seed: int, rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """One rank's part of what the model is measured on."""
    sizes = [sum(part) for part in HELD_OUT[:world_size]]
    inputs, targets = data_of(seed + 1, sum(sizes))
    first, last = sum(sizes[:rank]), sum(sizes[: rank + 1])
    parts = list(HELD_OUT[rank])
    return list(
        zip(
            inputs[first:last].split(parts) if parts else (),
            targets[first:last].split(parts) if parts else (),
            strict=True,
        )
    )


# ── all ranks, played in this process ───────────────────────────────────────────────


def weighted_mean(
    gradients: Gradients, counts: Sequence[int], rank: int
) -> Tensor | None:
    """The right rule."""
    parts = [g * c for g, c in zip(gradients, counts, strict=True) if g is not None]
    return torch.stack(parts).sum(0) / sum(counts)


@dataclass(frozen=True)
class Fitted:
    """Each rank's weights at the end, and (loss, accuracy) after each epoch.

    The metrics are those of rank 0's model; where all is right they are everyone's.
    `before` are those before each epoch, `training` those on what was trained on.
    """

    weights: list[Tensor]
    metrics: list[tuple[float, float]]
    before: list[tuple[float, float]]
    training: list[tuple[float, float]]


@one_thread()
def fit_alone(
    seed: int,
    world_size: int,
    rule: Rule = weighted_mean,
    *,
    equal_start: bool = True,
    zeroed: bool = True,
    epochs: Sequence[int] = tuple(range(NUM_EPOCHS)),
) -> Fitted:
    """The training of all ranks, with a mistake or (as it stands here) without.

    `epochs` are the orders that are really used; `zeroed=False` adds to the gradients
    of a step those of all steps before.
    """
    models = [Net(seed if equal_start else seed + 31 * r) for r in range(world_size)]
    pace = [torch.zeros_like(weights_of(model)) for model in models]
    kept = [torch.zeros_like(weights_of(model)) for model in models]
    held_out = _all_held_out(seed, world_size)
    metrics, training = [_measure(models[0], *held_out)], []
    for epoch in epochs:
        for step, (inputs, targets) in enumerate(global_batches(seed, epoch)):
            shares = [
                share_of(epoch, step, r, world_size, len(inputs), full=False)
                for r in range(world_size)
            ]
            counts = [len(inputs[share]) for share in shares]
            gradients = [
                _gradient(model, inputs[share], targets[share])
                for model, share in zip(models, shares, strict=True)
            ]
            for rank, model in enumerate(models):
                applied = rule(gradients, counts, rank)
                if applied is None:
                    continue
                if not zeroed:
                    kept[rank] = applied = kept[rank] + applied
                pace[rank] = MOMENTUM * pace[rank] + applied
                _move(model, -LEARNING_RATE * pace[rank])
        metrics.append(_measure(models[0], *held_out))
        training.append(_measure(models[0], *data_of(seed)))
    weights = [weights_of(model) for model in models]
    return Fitted(weights, metrics[1:], metrics[:-1], training)


@lru_cache(maxsize=32)
def right_fit(seed: int, world_size: int) -> Fitted:
    """What the ranks should arrive at."""
    return fit_alone(seed, world_size)


def _gradient(model: Net, inputs: Tensor, targets: Tensor) -> Tensor | None:
    if not len(inputs):
        return None
    loss = mean_loss(model.train()(inputs), targets)
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


def _move(model: Net, change: Tensor) -> None:
    sizes = [p.numel() for p in model.parameters()]
    for parameter, part in zip(model.parameters(), change.split(sizes), strict=True):
        parameter.data += part.reshape(parameter.shape)


def _all_held_out(seed: int, world_size: int) -> tuple[Tensor, Tensor]:
    batches = [
        batch for r in range(world_size) for batch in held_out_of(seed, r, world_size)
    ]
    inputs = torch.cat([inputs for inputs, _ in batches])
    return inputs, torch.cat([targets for _, targets in batches])


def _measure(model: Net, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model.eval()(inputs)
    right = float((outputs.argmax(1) == targets).double().mean())
    return float(mean_loss(outputs, targets)), right
