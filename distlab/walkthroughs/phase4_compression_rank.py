"""Run compression on each rank for phase 4's lab; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.comm import ByteMeter, Comm, Traffic, Work
from distlab.data.digits import load_digits_split
from distlab.given import gradient_compression as given
from distlab.models.mlp import make_mlp
from distlab.runner import RankContext

SIDE = 96  # rows and columns of the gradient whose bytes are counted
BATCH, LEARNING_RATE = 32, 0.1

Hook = Callable[[Comm, Any], Work]


def hooks(unit: ModuleType) -> dict[str, Hook]:
    """Return the hooks by name. Each hook of the unit has its own residual."""
    return {
        "fp16": given.fp16,
        "int8": unit.Int8(),
        "sign": given.Sign(),
        "top-k 1 %": unit.TopK(0.01),
        "PowerSGD r = 4": unit.PowerSGD(4),
    }


def sent_shares(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> dict[str, float]:
    """Return each hook's bytes in percent of a dense all-reduce's."""
    n, size = context.world_size, SIDE * SIDE
    dense = 2 * (n - 1) / n * 4 * size
    generator = torch.Generator().manual_seed(seed + context.rank)
    gradient, found = torch.randn(size, generator=generator), {}
    for name, hook in hooks(unit).items():
        traffic = Traffic()
        bucket = given.FlatBucket([torch.zeros(SIDE, SIDE)], gradient.clone())
        hook(ByteMeter(context.comm, traffic), bucket).wait()
        found[name] = 100 * traffic.sent_bytes / dense
    return found


def residuals(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    gradients: tuple[float, ...],
    ratio: float,
    num_steps: int,
) -> list[list[float]]:
    """Return this rank's residuals by step. The gradients never change."""
    given_flat = torch.tensor(gradients, dtype=torch.float64)
    hook, flat = unit.TopK(ratio), torch.empty_like(given_flat)
    bucket, kept = given.FlatBucket([flat.clone()], flat), []
    for _ in range(num_steps):
        flat.copy_(given_flat)
        hook(context.comm, bucket).wait()
        kept.append(hook.residuals.of(bucket).tolist())
    return kept


def train_digits(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    ratio: float,
    epochs: int,
    mode: str,
) -> list[float]:
    """Return the accuracy on the held-out digits in percent after each epoch.

    `mode` is dense, with (error feedback) or without.
    """
    comm, data, model = context.comm, load_digits_split(), make_mlp(seed=seed)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    bucket = given.FlatBucket(parameters, torch.empty(sum(sizes), dtype=torch.float64))
    hook, percent = unit.TopK(ratio), []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(data.train_inputs), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
            own = batch[comm.rank :: comm.world_size]
            model.zero_grad()
            outputs = model(data.train_inputs[own])
            cross_entropy(outputs, data.train_targets[own]).backward()
            gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
            torch.cat(gradients, out=bucket.flat)
            if mode == "dense":
                comm.all_reduce(bucket.flat)
            else:
                if mode == "without":
                    hook.residuals = given.Residuals()
                hook(comm, bucket).wait()
            with torch.no_grad():
                rate = LEARNING_RATE / comm.world_size
                for p, g in zip(parameters, bucket.flat.split(sizes), strict=True):
                    p.sub_(rate * g.view_as(p))
        with torch.no_grad():
            found = model(data.held_out_inputs).argmax(1)
        right = (found == data.held_out_targets).double().mean()
        percent.append(100 * float(right))
    return percent


def approximate(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    ranks: tuple[int, ...],
    num_steps: int,
) -> dict[int, dict[str, float]]:
    """Return bytes, and errors in percent, by PowerSGD's r, for a constant gradient.

    Its singular values are 1, 1/2, 1/3 and so on. `step k` is the error of that step's
    result, and `all` is the error of the mean of all steps.
    """
    n, found = context.world_size, {}
    for r in ranks:
        own = _gradient(seed, context.rank) / n
        exact = sum(_gradient(seed, rank) / n for rank in range(n))
        assert isinstance(exact, Tensor)
        traffic, hook = Traffic(), unit.PowerSGD(r)
        comm = ByteMeter(context.comm, traffic)
        bucket = given.FlatBucket([torch.zeros(SIDE, SIDE)], own.clone())
        total, steps = torch.zeros_like(exact), []
        for _ in range(num_steps):
            bucket.flat.copy_(own)
            hook(comm, bucket).wait()
            steps.append(_percent(bucket.flat - exact, exact))
            total += bucket.flat
        dense = 2 * (n - 1) / n * own.nbytes * num_steps
        found[r] = {
            "bytes": 100 * traffic.sent_bytes / dense,
            "step 1": steps[0],
            "all": _percent(total / num_steps - exact, exact),
        }
    return found


def _gradient(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 1)
    shape = SIDE, SIDE
    both = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    left, right = (torch.linalg.qr(matrix).Q for matrix in both)
    values = 1 / torch.arange(1, SIDE + 1, dtype=torch.float64)
    noise = torch.Generator().manual_seed(1000 * seed + 2 + rank)
    own = torch.randn(shape, generator=noise, dtype=torch.float64) / (10 * SIDE)
    found: Tensor = left * values @ right.T + own
    return found.flatten()


def _percent(error: Tensor, exact: Tensor) -> float:
    return 100 * float(error.norm() / exact.norm())
