"""Optimizers for large batches: LARS and LAMB, which scale the step of each layer.

A layer whose update is large beside its weights would diverge at the learning rate that
the others need. Both give each parameter a trust ratio: the norm of the weights over
that of the update. Biases and norms (parameters of one dimension) have the ratio 1 and
no weight decay, as in the papers' experiments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")


class LARS(Optimizer):
    """SGD with momentum, each parameter's gradient scaled by its trust ratio.

    v = m v + lr · ratio · (g + β w);  w = w - v;  ratio = η |w| / (|g| + β |w|)

    Source: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks
    (arXiv 1708.03888), algorithm 1.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
        }
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with the current gradients.

        If there is a `closure`, first call it with gradients enabled to recompute them.
        Return its result, such as the loss.
        """
        loss = _called(closure)
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                decay = group["weight_decay"] if weights.dim() > 1 else 0.0
                update = weights.grad + decay * weights
                if weights.dim() > 1:
                    below = weights.grad.norm() + decay * weights.norm()
                    update *= _ratio(group["trust"] * weights.norm(), below)
                state = self.state[weights]
                if not state:
                    state["momentum"] = torch.zeros_like(weights)
                state["momentum"].mul_(group["momentum"]).add_(
                    update, alpha=group["lr"]
                )
                weights -= state["momentum"]
        return loss


class LAMB(Optimizer):
    """Adam, each parameter's update scaled to the norm of its weights.

    r = m̂ / (√v̂ + ε) + λ w;  w = w - lr · (|w| / |r|) · r

    Source: You et al., Large Batch Optimization for Deep Learning (arXiv 1904.00962),
    algorithm 2, with φ(z) = z.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with the current gradients.

        If there is a `closure`, first call it with gradients enabled to recompute them.
        Return its result, such as the loss.
        """
        loss = _called(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(weights)
                    state["square"] = torch.zeros_like(weights)
                state["step"] += 1
                mean, square = state["mean"], state["square"]
                mean.lerp_(weights.grad, 1 - first)
                square.mul_(second).addcmul_(
                    weights.grad, weights.grad, value=1 - second
                )
                update = mean / (1 - first ** state["step"])
                update /= (square / (1 - second ** state["step"])).sqrt_() + group[
                    "eps"
                ]
                if weights.dim() > 1:
                    update += group["weight_decay"] * weights
                    update *= _ratio(weights.norm(), update.norm())
                weights.add_(update, alpha=-group["lr"])
        return loss


def _called(closure: Any) -> Any:
    """What the closure of a step returns; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """The quotient; 1 where one of them is 0, as for weights that are all zero."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    norm_weight_decay: float | None = None,
) -> Optimizer:
    """The optimizer of this name over the model's trained parameters.

    `norm_weight_decay`, if given, is that of biases and norms, the parameters of one
    dimension. `momentum` is that of sgd and lars.

    Raises:
        ValueError: no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {name!r}: {', '.join(OPTIMIZERS)}")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": weight_decay}]
    if norm_weight_decay is not None:
        groups = [
            {
                "params": [p for p in trained if (p.dim() > 1) == is_matrix],
                "weight_decay": weight_decay if is_matrix else norm_weight_decay,
            }
            for is_matrix in (True, False)
        ]
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum)
    if name == "lars":
        return LARS(groups, lr=lr, momentum=momentum)
    return LAMB(groups, lr=lr) if name == "lamb" else AdamW(groups, lr=lr)
