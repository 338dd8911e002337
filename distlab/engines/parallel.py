"""One rank's model, optimizer and group: what the worker's loop stands on.

    Parallel    forward, backward, step, sums over the ranks, full state
      Torch     DDP (stage 0), DDP + ZeroRedundancyOptimizer (1), fully_shard (2, 3)
      Scratch   distlab.distributed                                    scratch.py
      Horovod   horovod_parallel.py, DeepSpeed   deepspeed_parallel.py
      TensorFlow: its own forward, backward and step     tensorflow_parallel.py

State is kept by the names of the parameters and unsharded: what one backend saved
another one loads, on any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.samples import Loading, Microbatch, make_loader

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Judged:
    """A batch of the validation: its mean loss, and how many targets were met."""

    loss: Tensor | float
    num_right: Tensor | int = 0
    num_judged: int = 0
    """0 where the outputs are no class scores."""


class Parallel:
    """A training's rank; the subclasses say how gradients are averaged.

    `module` has the parameters, `forward` is what is called; `optimizer` has them too.
    Every method is collective unless it says otherwise.
    """

    rank: int
    world_size: int
    device: torch.device
    module: nn.Module
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, config: DistributedConfig) -> None:
        self.config = config

    # ── a step ──────────────────────────────────────────────────────────────────────

    def batches(self, loading: Loading, plan: Sequence[Microbatch]) -> Iterable[Any]:
        """The batches of this rank's plan; local."""
        return make_loader(loading, plan)

    def learn(self, loss: Loss, batch: Any, micro: Microbatch) -> Tensor:
        """Add the gradients of a microbatch; its mean loss times its weight."""
        with contextlib.nullcontext() if micro.ends_step else self.no_sync():
            weighted = self.loss_of(loss, batch)[0] * micro.weight
            self.backward(weighted)
        return weighted.detach()

    def judge(self, loss: Loss, batch: Any) -> Judged:
        """How good the model is on a batch of the validation."""
        value, outputs, targets = self.loss_of(loss, batch)
        if not _are_scores(outputs, targets):
            return Judged(value.double())
        right = (outputs.argmax(1) == targets).sum()
        return Judged(value.double(), right, targets.numel())

    def loss_of(self, loss: Loss, batch: Any) -> tuple[Tensor, Any, Tensor]:
        """The mean loss of a batch, the outputs and the targets.

        Raises:
            EngineError: the batch is no tuple of inputs and targets.
        """
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise EngineError(
                "a batch must be a tuple of inputs and targets; it is a "
                f"{type(batch).__name__}"
            )
        *inputs, targets = (value.to(self.device, non_blocking=True) for value in batch)
        with self.autocast():
            outputs = self.forward(*inputs)
            return loss(outputs, targets), outputs, targets

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a backward() in this block are only added up, and not sent."""
        yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Where forward and loss are computed; local."""
        dtype = DTYPES.get(self.config.precision or "")
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's loss; outside no_sync, average them."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> float:
        """Clip, step and zero the gradients; the norm of all gradients before.

        With fp16 a step whose gradients are not finite is left out on every rank.
        """
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            self.share_overflow()
        norm = self.clip(self.config.gradient_clipping)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def share_overflow(self) -> None:
        """Have all ranks know whether one has a gradient that is not finite."""

    def clip(self, largest: float | None) -> float:
        """Scale the gradients to at most this norm; the norm before."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if largest is not None:
            nn.utils.clip_grads_with_norm_(self.module.parameters(), largest, norm)
        return float(full(norm))

    def set_training(self, is_on: bool) -> None:
        """Switch dropout and the like on for training, off for validation; local."""
        self.module.train(is_on)

    def rates(self) -> list[float]:
        """The learning rate of each group of parameters; local."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rate(self, rates: list[float]) -> None:
        """Give each group of parameters its learning rate; local."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # ── all ranks together ──────────────────────────────────────────────────────────

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """The unsharded state_dict of the model on the CPU, on every rank."""
        return {
            name: full(value).detach().cpu().clone()
            for name, value in self.module.state_dict().items()
        }

    def optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer by the names of the parameters, on every rank."""
        return named_state(self.optimizer.state_dict(), self.names())

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continue with what `weights()` and `optimizer_state()` gave."""
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(indexed_state(state, self.names()))

    def names(self) -> list[str]:
        """The names of the parameters in the order of the optimizer; local."""
        by_id = {id(p): name for name, p in self.module.named_parameters()}
        groups = self.optimizer.param_groups
        return [by_id[id(p)] for group in groups for p in group["params"]]

    def close(self) -> None:
        """End the group, if this made it."""


def full(value: Any) -> Any:
    """A DTensor as the plain tensor that all shards are together; collective then."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def named_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state_dict with names in place of numbers, on the CPU."""
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {
        names[index]: {key: _kept(value) for key, value in own.items()}
        for index, own in sorted(state["state"].items())
    }
    return {"state": values, "param_groups": groups}


def _kept(value: Any) -> Any:
    return full(value).detach().cpu().clone() if isinstance(value, Tensor) else value


def indexed_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The reverse of `named_state`."""
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: dict(own) for name, own in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def make_optimizer(
    model: nn.Module, wanted: torch.optim.Optimizer | Make | None
) -> torch.optim.Optimizer:
    """The caller's optimizer, or what the caller's function makes; AdamW by default."""
    if isinstance(wanted, torch.optim.Optimizer):
        return wanted
    parameters = [p for p in model.parameters() if p.requires_grad]
    return (wanted or torch.optim.AdamW)(parameters)


def make_scaler(config: DistributedConfig, device: torch.device) -> Any:
    """A GradScaler for fp16, else None."""
    if config.precision != "fp16":
        return None
    return torch.amp.GradScaler(
        device.type,
        init_scale=config.scaler_init_scale,
        growth_interval=config.scaler_growth_interval,
    )


def _are_scores(outputs: Any, targets: Tensor) -> bool:
    return (
        isinstance(outputs, Tensor)
        and outputs.ndim == targets.ndim + 1
        and not targets.is_floating_point()
    )
