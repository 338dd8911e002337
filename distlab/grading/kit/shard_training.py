"""A small training whose weights torch may shard: model, batches, optimizer, step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.kit.flat import flat

SAMPLES = 3
WIDTHS = (6, 5, 7, 3)


def make_model(seed: int) -> nn.Sequential:
    """Three layers in float64, (N, 6) to (N, 3)."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTHS[1], WIDTHS[2]), nn.Tanh()),
        nn.Linear(WIDTHS[2], WIDTHS[3]),
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.copy_(torch.randn(shape, generator=generator).double() * 0.5)
    return model


def batch_of(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 6) and targets (samples, 3)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    drawn = torch.randn(SAMPLES, WIDTHS[0] + WIDTHS[-1], generator=generator)
    inputs, targets = drawn.double().split([WIDTHS[0], WIDTHS[-1]], 1)
    return inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whatever the dtype of the outputs is."""
    return (outputs.double() - targets).square().mean()


class MomentumSteps:
    """SGD with momentum, shard by shard: torch's own takes long with its first DTensor.

    Its state counts from the second step on.
    """

    param_groups: list[dict[str, Any]]
    state: Any  # by parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`; nothing here gives it a closure."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = local(state["momentum"])
                momentum.mul_(group["momentum"]).add_(local(parameter.grad))
                local(parameter).sub_(group["lr"] * momentum)


class Momentum(MomentumSteps, torch.optim.Optimizer):
    """The optimizer that a learner's code gets."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": lr, "momentum": 0.9})


class BaselineMomentum(MomentumSteps):
    """The same for the single-process baseline, at once.

    A process's first `torch.optim.Optimizer` imports torch's compiler: a second.
    """

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        settings = {"lr": lr, "momentum": 0.9}
        self.param_groups = [{"params": list(model.parameters())} | settings]
        self.state = defaultdict(dict)

    def zero_grad(self) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def local(tensor: Any) -> Tensor:
    """What this rank has of it."""
    mine: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine.detach()


def one_step(
    model: nn.Module,
    optimizer: Momentum | BaselineMomentum,
    batch: tuple[Tensor, Tensor],
) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def full_weights(model: nn.Module) -> Tensor:
    """All in one flat tensor; every rank takes part."""
    found = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    return flat(found)
