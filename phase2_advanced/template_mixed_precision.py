"""Mixed precision: compute in 16 bits, keep the weights in 32, and mind the range.

Guide: phase2_advanced/guide/mixed_precision.md.
Source: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), section 3.
Symbols: n = comm.world_size; S = the loss scale.
Cost: 4 bytes more per weight for the master, 2 fewer per activation; one all_reduce of
one number per step for the scaler.

    model   16 bits   forward, backward ───────▶ gradients   16 bits
       ▲                                             │  up: widen, then average
       │ down: round                                 ▼
    master  32 bits ◀──── optimizer.step ─────── gradients   32 bits

bfloat16 has float32's range and 8 binary digits: small steps are lost beside a large
weight, and the master catches them. float16 has 11 digits and a small range: small
gradients become 0, and the loss scaler keeps them in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]


def master_copy(model: nn.Module) -> list[nn.Parameter]:
    """A float32 copy of each parameter that is trained, in the model's order.

    The optimizer gets these to step on; the model is left as it is.

    C1 the copies are float32, so that 1,000 tiny updates add up
    In torch.distributed: FSDP2 with MixedPrecisionPolicy keeps its shards in float32
    Cost: 4 bytes per weight. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # parameters of their own: what happens to them must not happen to the model
    raise NotImplementedError("mixed_precision.master_weights")


def gradients_to_master(
    comm: Comm, model: nn.Module, master: Sequence[nn.Parameter]
) -> None:
    """Up: each master's `.grad` becomes the mean of the model's over all ranks.

    Given: backward() has run on every rank, on equally many samples. A parameter that
    has no gradient has none on any rank; its master then has none either, or zeros.

    C2 the mean is added up in float32; the model's own gradients are gone after it
    In torch.distributed: MixedPrecisionPolicy(reduce_dtype=torch.float32)
    Example: n = 2, bfloat16 gradients 256 and 1 → 128.5, which bfloat16 cannot hold
    Cost: one all_reduce per parameter, 4 bytes a number. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # the next backward() adds to what it finds in the model's .grad
    raise NotImplementedError("mixed_precision.master_weights")


def master_to_model(master: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Down: the model's trained parameters become the master's values, rounded.

    C3 every parameter of the model keeps its dtype, and the master stays as it is
    In torch.distributed: FSDP2 casts its float32 shards before each all-gather
    Cost: none on the wire. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # tensor.copy_(other) rounds to the dtype of tensor
    raise NotImplementedError("mixed_precision.master_weights")


class LossScaler:
    """Keeps float16 gradients in range: a factor S on the loss, taken out again later.

    Every rank makes the same calls, in this order; unscale_ only if the gradients are
    wanted before the step, to clip them. The optimizer is that of the master.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    The ranks may hold different parameters, as in model or tensor parallelism: what
    overflows on one of them is then to be seen nowhere else.

    C1 the loss is multiplied by S, and every gradient is divided by S, once
    C2 if a gradient of any rank is inf or nan, no rank's optimizer steps
    C3 S is the same on every rank: times backoff_factor after such a step, times
       growth_factor after growth_interval steps in a row that were taken; a scaler
       that takes over the state goes on with the same S
    In torch.distributed: torch.amp.GradScaler; FSDP's ShardedGradScaler asks all ranks
    Cost: one all_reduce of one number per step. Check: distlab check 2.7
    """

    def __init__(
        self,
        comm: Comm,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.comm = comm
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.loss_scale = init_scale
        self.good_steps = 0  # taken in a row since the scale last changed
        self.overflow: bool | None = None  # in this step; None: nobody has looked yet

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times S: so is every gradient that backward() makes of it."""
        # TODO(mixed_precision.loss_scaler)
        # the caller calls backward() on what is returned
        raise NotImplementedError("mixed_precision.loss_scaler")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by S, in place, and ask for overflows.

        Collective. A second call before update() changes nothing. Parameters without
        a gradient are left alone; a rank may have no gradient at all.
        """
        # TODO(mixed_precision.loss_scaler)
        # self.overflow: is a gradient inf or nan, on this rank or on any other?
        # an optimizer's parameters: group["params"] of each of optimizer.param_groups
        raise NotImplementedError("mixed_precision.loss_scaler")

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step, with unscaled gradients, or skip; whether it did."""
        # TODO(mixed_precision.loss_scaler)
        # the caller may have called unscale_, or not
        raise NotImplementedError("mixed_precision.loss_scaler")

    def update(self) -> None:
        """Choose S for the next step, after what happened in this one."""
        # TODO(mixed_precision.loss_scaler)
        # what counts the steps in a row, and when does it begin anew?
        raise NotImplementedError("mixed_precision.loss_scaler")

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs for the same S in every step; plain numbers."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`, between two steps."""
        self.loss_scale = state["loss_scale"]
        self.good_steps = state["good_steps"]
        self.overflow = None


def train_step(
    comm: Comm,
    model: nn.Module,
    master: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    scaler: LossScaler | None = None,
) -> float:
    """Up, step, down: one step of 16-bit training; the mean loss over all ranks.

    Given: equal models on all ranks, and equal shares of the batch. The optimizer
    steps on `master`. bfloat16 needs no scaler. The loss is computed in float32: a
    mean over many numbers is what 16 bits are worst at.
    """
    dtype = next(model.parameters()).dtype
    loss = loss_fn(model(inputs.to(dtype)).float(), targets)
    (scaler.scale(loss) if scaler else loss).backward()
    gradients_to_master(comm, model, master)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    master_to_model(master, model)
    mean_loss = loss.detach().clone()
    comm.all_reduce(mean_loss)
    return float(mean_loss / comm.world_size)


def port(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
) -> bool:
    """One step in torch's own words; whether it was taken. There is no comm here.

    Given: a float32 model, another one on each rank, in which every parameter gets a
    gradient; torch's default process group; a torch.amp.GradScaler("cpu") with equal
    settings on all ranks. It skips a step if it finds inf or nan in the gradients of
    this rank: of other ranks' it knows nothing.

    C1 forward computes in bfloat16, the weights stay float32; the step is the one that
    would be taken without a scale
    C2 if a gradient of any rank is inf or nan, no rank's optimizer steps
    C3 the scale is the same on every rank: that of one scaler over all gradients
    In torch.distributed: ShardedGradScaler does so for FSDP, on a GPU
    Example: n = 2, a nan on rank 1 → False on both, and both scales are halved
    Cost: one all_reduce of one number. Check: distlab check 2.24
    """
    # TODO(mixed_precision.port)
    # torch.autocast("cpu", torch.bfloat16): what belongs into it, and what not?
    # a scaler looks for itself. How do you make it find what another rank has?
    raise NotImplementedError("mixed_precision.port")
