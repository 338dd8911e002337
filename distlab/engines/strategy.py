"""One rank's model, optimizer and group, which the worker's loop uses.

    Strategy     forward, backward, step, sums over the ranks, full state
      Torch      DDP (stage 0), DDP + ZeroRedundancyOptimizer (1), fully_shard (2, 3)
      Scratch    distlab.distributed
      Horovod, DeepSpeed, and TensorFlow with its own forward, backward and step

Each is in a file of its own, *_strategy.py, which registers it: see strategies.py.

We keep state unsharded and by the names of the parameters, so that any backend can load
what another one saved, on any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.dtensors import gathered
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.loaders import Batches, Loading
from distlab.engines.losses import Loss, Value, measure, own_parameters, tensors_in
from distlab.engines.optimizers import (
    expect_same_kind,
    expect_same_weights,
    held_by,
    indexed_state,
    kept,
    named_state,
    names_of,
)
from distlab.engines.samples import Microbatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Judged:
    """A batch of the validation: its mean loss, and the number of right predictions."""

    loss: Tensor | float
    count: Tensor | None = None
    """The divisor of the mean; None means the number of samples."""
    is_sum: bool = False
    num_right: Tensor | int = 0
    num_judged: int = 0
    """0 if the outputs aren't class scores."""


class Moved(Exception):  # noqa: N818  (it isn't an error)
    """This rank has taken over the others' state, so its loop continues from there."""


class Strategy:
    """One rank of a training; subclasses define how to average gradients.

    `module` and `optimizer` hold the parameters, and you call `forward` to run the
    model. Every method is collective unless it says otherwise.
    """

    rank: int
    world_size: int
    device: torch.device
    module: nn.Module
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None

    present: float = 1.0
    """The share of the ranks whose gradients are in the average of the last step."""
    factor: float = 1.0
    """The factor applied to the last step's gradients: see losses.py."""

    def __init__(self, config: DistributedConfig) -> None:
        self.config = config
        self.loss: Any = None
        self.loss_parameters: dict[str, nn.Parameter] = {}
        self._batches: dict[int, Batches] = {}
        self._frozen: list[nn.Module] | None = None
        self._counts: list[Tensor] = []  # of this rank's microbatches since the step
        self._num_in_step = 0
        self._num_mixed = 0

    # `sum` covers all ranks, unless they may come and go: then each is on its own, and
    # only step() averages over those that are there.

    @property
    def group_rank(self) -> int:
        """Return this rank's number among those that `sum` covers."""
        return self.rank

    @property
    def group_size(self) -> int:
        """Return the number of ranks that `sum` covers."""
        return self.world_size

    @property
    def saves(self) -> bool:
        """Return True on the one rank that saves checkpoints."""
        return self.rank == 0

    def share_state(
        self, state: Callable[[], Any], take: Callable[[Any], None]
    ) -> None:
        """Say how to get and replace the loop's state, for ranks that join it; local.

        Only a strategy whose ranks come and go needs this. After it has called `take`,
        it raises Moved.
        """

    def take_loss(self, loss: Any) -> None:
        """If the loss is a module, move it to the device and take rank 0's values."""
        if not isinstance(loss, nn.Module):
            return
        self.loss = loss.to(self.device)
        self.loss_parameters = own_parameters(loss, self.module)
        for value in (*self.loss_parameters.values(), *loss.buffers()):
            if value.is_floating_point():
                is_first = self.group_rank == 0
                own = value.detach() if is_first else torch.zeros_like(value)
                value.data.copy_(self.sum(own.clone()))

    # ── a step ──────────────────────────────────────────────────────────────────────

    def batches(self, loading: Loading, plan: Sequence[Microbatch]) -> Iterable[Any]:
        """Yield the batches of this rank's plan; local."""
        if id(loading) not in self._batches:
            self._batches[id(loading)] = Batches(loading)
        return self._batches[id(loading)].of(plan)

    def learn(self, loss: Loss, batch: Any, micro: Microbatch) -> Tensor:
        """Add the gradients of a microbatch; return its mean loss times its weight.

        A rank without samples still calls the model. It then multiplies the outputs by
        0, and not the loss, because the loss of a single sample may be nan.
        """
        self._num_in_step = micro.num_in_step
        with contextlib.nullcontext() if micro.ends_step else self.no_sync():
            if micro.weight:
                weighted = self._weighted(self.loss_of(loss, batch)[0], micro)
            else:
                weighted = self._nothing(loss, batch)
            self.backward(weighted)
        return weighted.detach()

    def _weighted(self, value: Value, micro: Microbatch) -> Tensor:
        num, weight, count = micro.num_samples, micro.weight, value.count
        self._num_mixed += value.is_mixed
        self._counts.append(torch.tensor(float(num)) if count is None else count)
        if value.is_sum:
            return value.loss * self.world_size
        if count is None:
            return value.loss * weight
        return value.loss * (count / num * weight).to(value.loss.dtype)

    def _nothing(self, loss: Loss, batch: Any) -> Tensor:
        """Return a loss of zero that gives gradients of zero."""
        outputs, targets = self._outputs(batch)
        parts = [(one * 0).sum() for one in tensors_in(outputs) if one.requires_grad]
        if not parts:
            return measure(loss, outputs, targets).loss * 0
        return torch.stack([one.double() for one in parts]).sum().nan_to_num()

    def judge(self, loss: Loss, batch: Any) -> Judged:
        """Evaluate the model on a batch of the validation."""
        value, outputs, targets = self.loss_of(loss, batch)
        mean, own = value.loss.double(), (value.count, value.is_sum)
        if not _are_scores(outputs, targets):
            return Judged(mean, *own)
        counts = torch.ones_like(targets, dtype=torch.bool)
        if value.ignored is not None:
            counts = targets != value.ignored
        right = ((outputs.argmax(1) == targets) & counts).sum()
        return Judged(mean, *own, right, int(counts.sum()))

    def loss_of(self, loss: Loss, batch: Any) -> tuple[Value, Any, Any]:
        """Return the loss of a batch, the outputs and the targets.

        Raises:
            EngineError: the batch isn't a tuple of inputs and targets, or the loss
                isn't a single number.
        """
        outputs, targets = self._outputs(batch)
        with self.autocast():
            return measure(loss, outputs, targets), outputs, targets

    def _outputs(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise EngineError(
                "a batch must be a tuple of inputs and targets; it is a "
                f"{type(batch).__name__}"
            )
        *inputs, targets = (placed(value, self.device) for value in batch)
        with self.autocast():
            return self.forward(*inputs), targets

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of backward() in this block without sending them."""
        yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context in which to compute forward and loss; local."""
        dtype = DTYPES.get(self.config.precision or "")
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's loss; outside no_sync, average them."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> float:
        """Clip the gradients, step and zero them; return their norm before clipping.

        With fp16, every rank skips a step whose gradients aren't finite.
        """
        self.share_loss_gradients()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            self.share_overflow()
        self.divide()
        norm = self.clip(self.config.gradient_clipping)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        for module in filter(None, (self.module, self.loss)):
            module.zero_grad()  # gradients that the optimizer doesn't own would grow
        return norm

    def share_loss_gradients(self) -> None:
        """Average the gradients of the loss's own parameters, which aren't wrapped."""
        for parameter in self.loss_parameters.values():
            if not parameter.requires_grad:
                continue
            own = parameter.grad
            if own is None:
                own = torch.zeros_like(parameter)
            parameter.grad = self.sum(own) / self.world_size

    def divide(self) -> None:
        """Rescale the gradients to those of a mean over everything in the step.

        Raises:
            EngineError: on every rank, if the parts of the loss can't be combined.
        """
        own = torch.zeros(3, dtype=torch.double, device=self.device)
        for count in self._counts:
            own[0] += count
        own[1], own[2] = len(self._counts), self._num_mixed
        count, num_parts, num_mixed = self.sum_of_step(own).tolist()
        self._counts, self._num_mixed = [], 0
        if num_mixed and num_parts > 1:
            raise EngineError(
                "the loss adds something to a cross-entropy with class weights or "
                "ignored targets, so we can't combine the parts of a step: use "
                "reduction='sum' there, and divide by the number of samples"
            )
        self.factor = self.present * self._num_in_step / count if count else 1.0
        if self.factor == 1.0:
            return
        gradients = [p.grad for p in self.trained() if p.grad is not None]
        torch._foreach_mul_(gradients, self.factor)

    def trained(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters in the order of model and loss; local."""
        held = {id(p) for p in held_by(self.optimizer)}
        known = [*self.module.parameters(), *self.loss_parameters.values()]
        return [p for p in known if id(p) in held]

    def share_overflow(self) -> None:
        """Let all ranks know if one of them has a gradient that isn't finite."""

    def clip(self, largest: float | None) -> float:
        """Scale the gradients to at most this norm; return the norm from before."""
        parameters = self.trained()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if largest is not None:
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return float(gathered(norm))

    def set_training(self, is_on: bool) -> None:
        """Switch dropout and similar layers to training or validation; local.

        If the caller has put a layer into evaluation mode, such as a frozen batch norm,
        it stays there, unless the whole model was in that mode.
        """
        modules = [self.module] if self.loss is None else [self.module, self.loss]
        if self._frozen is None:
            parts = (part for one in modules if one.training for part in one.modules())
            self._frozen = [part for part in parts if not part.training]
        for one in modules:
            one.train(is_on)
        for part in self._frozen:
            part.training = False

    @property
    def model_and_optimizer(self) -> tuple[Any, Any]:
        """Return the model and the optimizer that callbacks see."""
        return self.module, self.optimizer

    def rates(self) -> list[float]:
        """Return the learning rate of each group of parameters; local."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rate(self, rates: list[float]) -> None:
        """Give each group of parameters its learning rate; local."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # ── all ranks together ──────────────────────────────────────────────────────────

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        raise NotImplementedError

    def sum_of_step(self, tensor: Tensor) -> Tensor:
        """Sum `tensor`, in place, over the ranks whose gradients the step averages."""
        return self.sum(tensor)

    def weights(self) -> dict[str, Tensor]:
        """Return the model's unsharded state_dict on the CPU, on every rank."""
        return kept_state(self.module)

    def loss_weights(self) -> dict[str, Any]:
        """Return the state_dict of a loss that is a module; local."""
        return {} if self.loss is None else kept_state(self.loss)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter names, on every rank."""
        state = self.optimizer.state_dict()
        return named_state(self.optimizer, state, self.names())

    def settings(self) -> Any:
        """Return everything but tensors in weights() and optimizer_state(); local."""
        groups = self.optimizer.param_groups
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in groups],
            {
                name: value
                for name, value in self.module.state_dict().items()
                if not isinstance(value, Tensor)
            },
        ]

    def expect_fits(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint from another model, loss or optimizer; local.

        Raises:
            EngineError: names, shapes or the kind of optimizer differ.
        """
        expect_same_weights(state["weights"], self.module.state_dict(), "model")
        own = {} if self.loss is None else self.loss.state_dict()
        expect_same_weights(state.get("loss", own), own, "loss")
        expect_same_kind(state["optimizer"], self.optimizer, self.names())

    def load(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Continue with saved `weights()` and `optimizer_state()`.

        The optimizer keeps the settings of this training. A parameter without saved
        state starts without any.
        """
        self.module.load_state_dict(weights)
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(indexed_state(state, groups, self.names()))

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Continue with a saved loss scale, but keep the settings of this training.

        torch compares its count of good steps with the interval by ==. If the saved
        count exceeded a smaller interval, the scale would never grow again.
        """
        assert self.scaler is not None
        own = self.scaler.state_dict()
        now = ("growth_factor", "backoff_factor", "growth_interval")
        count = min(state["_growth_tracker"], own["growth_interval"] - 1)
        kept = {**state, **{name: own[name] for name in now}, "_growth_tracker": count}
        self.scaler.load_state_dict(kept)

    def load_loss(self, weights: dict[str, Any]) -> None:
        """Continue with saved `loss_weights()`; local."""
        if self.loss is not None and weights:
            self.loss.load_state_dict(weights)

    def names(self) -> list[str]:
        """Return the names of the parameters in the optimizer's order; local."""
        return names_of(self.optimizer, self.module, self.loss_parameters)

    def close(self) -> None:
        """Close the group if this object opened it."""


def placed(value: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device; leave everything else unchanged."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: placed(one, device) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(placed(one, device) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(placed(one, device) for one in value)
    return value


def kept_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's state_dict, unsharded and on the CPU."""
    return {name: kept(value) for name, value in module.state_dict().items()}


def make_scaler(config: DistributedConfig, device: torch.device) -> Any:
    """Make a GradScaler for fp16; otherwise return None."""
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
