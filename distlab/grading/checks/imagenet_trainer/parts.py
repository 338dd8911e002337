"""A job of small parts, which note what is done with them, and the same by one process.

The gradient is large beside the scale's inverse, so that clipping with the scale still
in it gives other weights. In the second step one rank has an infinite input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.imagenet_trainer import Job
from distlab.grading.kit.flat import weights_of

SCALE, LR, DECAY = 8.0, 0.5, 0.75
STEPS, OVERFLOW = 4, 1  # in step OVERFLOW, counted from 0, a gradient is not finite
LARGE = 300
Batch = tuple[Tensor, Tensor]


class Gain(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """What it is called with, times the gain."""
        return x * self.gain


def new_model(seed: int) -> nn.Sequential:
    """Five inputs, three scores, in float64; one bias is not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), Gain()
        layers[0].bias.requires_grad_(False)
        return nn.Sequential(*layers).double()


def batches(seed: int, world_size: int) -> list[list[Batch]]:
    """By step and rank: in step s rank r has 5 + r + s samples; one is infinite.

    In the last step each has LARGE more, so the global batch has more than 256.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(STEPS):
        row = []
        for rank in range(world_size):
            size = 5 + rank + step + LARGE * (step == STEPS - 1)
            inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
            targets = torch.randint(3, (size,), generator=generator)
            if step == OVERFLOW and rank == world_size - 1:
                inputs[0, 0] = torch.inf
            row.append((inputs, targets))
        found.append(row)
    return found


class NotingEngine:
    """Averages each gradient when backward() has it; notes what goes in and out."""

    def __init__(self, comm: Comm, model: nn.Module) -> None:
        self.comm, self.model, self.syncs = comm, model, True
        self.is_autocast = False
        self.sizes: list[int] = []  # of the microbatches of this step
        self.outside: int = 0  # forwards that were not in autocast
        self.backward_inside: int = 0  # gradients that became ready in autocast
        self.was_training: list[bool] = []
        self.sent = 0
        self.was_syncing = True  # in the newest forward
        self.split = 0  # gradients for which backward() was not in its forward's block
        for parameter in trained(model):
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        self.backward_inside += self.is_autocast
        self.split += self.syncs != self.was_syncing
        if self.syncs:
            assert parameter.grad is not None
            self.comm.all_reduce(parameter.grad)
            parameter.grad /= self.comm.world_size
            self.sent += 1

    def __call__(self, inputs: Tensor) -> Tensor:
        """See Engine."""
        self.sizes.append(len(inputs))
        self.was_syncing = self.syncs
        self.outside += not self.is_autocast
        self.was_training.append(self.model.training)
        outputs: Tensor = self.model(inputs)
        return outputs

    def whole(self) -> nn.Module:
        """See Engine."""
        return self.model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See Engine."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Note that it is on."""
        before, self.is_autocast = self.is_autocast, True
        try:
            yield
        finally:
            self.is_autocast = before


class Scaler:
    """As in 2.7; the scale is halved by a step that overflows."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.loss_scale = comm, SCALE
        self.overflow: bool | None = None
        self.num_updates = 0

    def scale(self, loss: Tensor) -> Tensor:
        """See Scaler."""
        return loss * self.loss_scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See Scaler."""
        if self.overflow is not None:
            return
        found = torch.zeros(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
                    found += not parameter.grad.isfinite().all()
        self.comm.all_reduce(found)
        self.overflow = bool(found)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take a step."""
        self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
        return not self.overflow

    def update(self) -> None:
        """See Job."""
        self.loss_scale *= 0.5 if self.overflow else 1.0
        self.overflow, self.num_updates = None, self.num_updates + 1

    def state_dict(self) -> dict[str, Any]:
        """See Stateful."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Stateful."""
        self.loss_scale = state["loss_scale"]


class Scheduler:
    """Divides the learning rate by the number of steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self) -> None:
        """Take a step."""
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR / (1 + self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """See Stateful."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Stateful."""
        self.num_steps = state["num_steps"]


class Average:
    """The average of the weights, in a row."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = weights_of(model).clone()
        self.num_updates = 0

    def update(self, model: nn.Module) -> None:
        """See Job."""
        self.num_updates += 1
        self.weights = DECAY * self.weights + (1 - DECAY) * weights_of(model)

    @contextlib.contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """See Average."""
        own = weights_of(model).clone()
        nn.utils.vector_to_parameters(self.weights, model.parameters())
        try:
            yield
        finally:
            nn.utils.vector_to_parameters(own, model.parameters())

    def state_dict(self) -> dict[str, Any]:
        """See Stateful."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Stateful."""
        self.weights = state["weights"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Loader:
    """Two batches in each epoch; one is left in the epoch that it was restored in."""

    def __init__(self, epoch: int, log: list[str]) -> None:
        self.epoch, self.log, self.left = epoch, log, 1

    def set_epoch(self, epoch: int) -> None:
        """See Loader. The same epoch changes nothing, and is not noted."""
        if epoch != self.epoch:
            self.log.append(f"set_epoch({epoch})")
            self.epoch, self.left = epoch, 2

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.log.append(f"epoch {self.epoch}: {self.left} batches")
        for _ in range(self.left):
            yield torch.full((2, 5), float(self.epoch)).double(), torch.tensor([0, 1])
        self.left = 2

    def state_dict(self) -> dict[str, Any]:
        """See Stateful."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Stateful."""
        self.epoch = state["epoch"]


def new_job(comm: Comm, seed: int, num_parts: int, clip_norm: float) -> Job:
    """A job on this rank; its gradients hold numbers of an earlier step."""
    model = new_model(seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    engine, optimizer = NotingEngine(comm, model), torch.optim.SGD(groups, lr=LR)
    return Job(
        comm=comm,
        model=model,
        engine=engine,
        optimizer=optimizer,
        scheduler=Scheduler(optimizer),
        loader=Loader(0, []),
        loss_fn=nn.functional.cross_entropy,
        evaluate=lambda model: None,
        scaler=Scaler(comm),
        average=Average(model),
        hook=object(),
        clip_norm=clip_norm,
        grad_accum_steps=num_parts,
        autocast=engine.autocast,
    )


# ── one process that has the global batch ───────────────────────────────────────────


@dataclass
class Baseline:
    """What there is after each step, and the loss of each step."""

    weights: list[Tensor]
    averages: list[Tensor]
    rates: list[float]
    losses: list[float]


def baseline(
    seed: int, world_size: int, num_parts: int, clip_norm: float, wrong: str = ""
) -> Baseline:
    """The steps by one process; `wrong` is a mistake that it makes."""
    model = new_model(seed)
    weights, average, rate, moved = weights_of(model), weights_of(model).clone(), LR, 0
    scale, old = SCALE, torch.ones_like(weights)
    found = Baseline([], [], [], [])
    for row in batches(seed, world_size):
        nn.utils.vector_to_parameters(weights, model.parameters())
        pieces = [_gradients(model, batch, num_parts) for batch in row]
        gradient = _combined(pieces, wrong) + (
            old / scale if wrong == "not zeroed" else 0
        )
        if wrong == "divided by n":
            gradient = gradient / world_size
        factor = scale if wrong == "clipped with the scale" else 1.0
        norm = gradient.norm() * factor
        gradient = gradient * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        stepped = bool(gradient.isfinite().all())
        old = gradient
        if stepped:
            weights = weights - rate * gradient
        if stepped or wrong == "scheduler moves":
            moved += 1
            rate = LR / (1 + moved)
        if stepped or wrong == "average moves":
            average = DECAY * average + (1 - DECAY) * weights
        scale *= 1.0 if stepped else 0.5
        found.weights.append(weights)
        found.averages.append(average)
        found.rates.append(rate)
        found.losses.append(_loss(model, row))
    return found


Piece = tuple[int, Tensor]
"""The samples of a microbatch, and the gradient of its mean loss."""


def _gradients(model: nn.Module, batch: Batch, num_parts: int) -> list[Piece]:
    inputs, targets = (one.tensor_split(num_parts) for one in batch)
    found = []
    for part, wanted in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(model(part), wanted)
        gradients = dict(
            zip(trained(model), torch.autograd.grad(loss, trained(model)), strict=True)
        )
        every = [gradients.get(p, torch.zeros_like(p)) for p in model.parameters()]
        found.append((len(part), torch.cat([g.flatten() for g in every])))
    return found


def _combined(ranks: Sequence[Sequence[Piece]], wrong: str) -> Tensor:
    """The gradient of the global batch; or the mean of means over microbatches."""
    if wrong == "mean of microbatches":
        rows = [torch.stack([g for _, g in pieces]).mean(0) for pieces in ranks]
        return torch.stack(rows).mean(0)
    if wrong == "mean of ranks":
        return torch.stack([_combined([pieces], "") for pieces in ranks]).mean(0)
    every = [piece for pieces in ranks for piece in pieces]
    total = torch.stack([count * gradient for count, gradient in every]).sum(0)
    return total / sum(count for count, _ in every)


def _loss(model: nn.Module, row: Sequence[Batch]) -> float:
    """The mean loss over the global batch."""
    inputs, targets = (torch.cat(column) for column in zip(*row, strict=True))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), targets))
