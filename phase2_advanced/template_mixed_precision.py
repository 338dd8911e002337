"""Mixed precision: compute in 16 bits, keep master weights in float32.

Guide: phase2_advanced/guide/mixed_precision.md.
Source: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), section 3.
Symbols: n = comm.world_size.
Cost: 4 more bytes per weight for the master, 2 fewer per activation; one all_reduce of
one element per step for the scaler.

    model   16 bits   forward, backward ───────▶ gradients   16 bits
       ▲                                             │  cast up, then average
       │ round                                       ▼
    master  32 bits ◀──── optimizer.step ─────── gradients   32 bits

bfloat16 has float32's range but 8 significant bits, so an update that is small compared
with its weight is rounded away unless a float32 master accumulates it. float16 has 11
significant bits but a small range: small gradients become 0 unless you scale the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.given.mixed_precision import (
    LateGradients,
    check_scaling,
    in_range,
    read_state,
)

if TYPE_CHECKING:
    from distlab.comm import Comm

LossFn = Callable[[Tensor, Tensor], Tensor]


def master_copy(model: nn.Module) -> list[nn.Parameter]:
    """Return one float32 copy of each trained parameter, in the model's order.

    The optimizer will update these master weights. Don't modify the model.

    C1 The copies are stored in float32, so that 1,000 tiny updates add up instead of
       being rounded away.
    In torch.distributed: FSDP2 with MixedPrecisionPolicy keeps its shards in float32
    Cost: 4 bytes per weight. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # new parameters: an update of a master must not change the model
    raise NotImplementedError("mixed_precision.master_weights")


def gradients_to_master(
    comm: Comm, model: nn.Module, master: Sequence[nn.Parameter]
) -> None:
    """Set each master's `.grad` to the mean gradient over all ranks.

    Given: backward() has run on every rank, on equally many samples. A parameter
    without a gradient has none on any rank, and then its master gets None or zeros. A
    gradient may be non-contiguous, as its parameter may be.

    C2 The gradients are summed in float32 to compute their mean, and the model's own
       gradients are None afterwards.
    In torch.distributed: MixedPrecisionPolicy(reduce_dtype=torch.float32)
    Example: n = 2, bfloat16 gradients 256 and 1 → 128.5; in bfloat16 256 + 1 = 256
    Cost: one all_reduce per parameter, 4 bytes per element. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # the next backward() adds to the model's .grad if it is not None
    raise NotImplementedError("mixed_precision.master_weights")


def master_to_model(master: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Copy the master weights, rounded, into the model's trained parameters.

    C3 The model gets the master's values, rounded to the dtype of each of its
       parameters, and the master itself is not modified.
    In torch.distributed: FSDP2 casts its float32 shards before each all_gather
    Cost: no message. Check: distlab check 2.6
    """
    # TODO(mixed_precision.master_weights)
    # tensor.copy_(other) rounds to the dtype of tensor
    raise NotImplementedError("mixed_precision.master_weights")


class LossScaler:
    """Dynamic loss scaling: keep float16 gradients in range.

    Every rank makes the same calls in this order. The call of unscale_ is optional and
    gives you the gradients before the step. The optimizer updates the master.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    The ranks may hold different parameters, as in model or tensor parallelism, so an
    overflow on one rank may be invisible on the others. A step may have several
    optimizers, as for a GAN's two networks. Every rank then calls unscale_ and step
    for each of them in the same order, and update once for all.

    C1 The loss is multiplied by the scale, and every gradient is divided by it exactly
       once, no matter which optimizer the gradient belongs to.
    C2 If a gradient is inf or nan on any rank, its optimizer skips the step on every
       rank. Another optimizer still steps if its own gradients are finite on all ranks.
    C3 The scale is the same on every rank, and changes in the same way as in torch's
       GradScaler. After a step in which an optimizer was skipped, it is multiplied by
       backoff_factor. After growth_interval consecutive steps without a skip, it is
       multiplied by growth_factor, even if growth_interval was lowered in between. A
       scaler that loads a saved state continues with the same scales.
    Given: LateGradients. It refuses a backward() between unscale_ and step, a second
    step or an update without a step, and has a sharded optimizer (3.13) reduce its
    gradients. Call step and update once per step, after the last microbatch.
    In torch.distributed: torch.amp.GradScaler, which all_reduces for DTensors only
    Cost: one all_reduce of one element per optimizer. Check: distlab check 2.7
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
        check_scaling(init_scale, growth_factor, backoff_factor, growth_interval)
        self.comm = comm
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.loss_scale = init_scale
        self.good_steps = 0  # successful steps in a row since the scale last changed
        self.overflow: dict[Any, bool] = {}  # of optimizers unscaled in this step
        self.late = LateGradients()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, so that backward() scales every gradient."""
        # TODO(mixed_precision.loss_scaler)
        # the caller calls backward() on the returned tensor
        raise NotImplementedError("mixed_precision.loss_scaler")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place; note an overflow.

        Collective. A second call before update() changes nothing. Skip parameters
        without a gradient; a rank may have no gradient at all. A gradient may have any
        dtype, be non-contiguous, or have no elements.

        Raises:
            RuntimeError: backward() has run since the first call.
        """
        self.late.look(optimizer)
        # TODO(mixed_precision.loss_scaler)
        # self.overflow[optimizer]: is a gradient of it inf or nan, on any rank?
        # the optimizer's parameters: group["params"] for group in param_groups
        raise NotImplementedError("mixed_precision.loss_scaler")

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step with unscaled gradients, or skip; return True if it stepped.

        Raises:
            RuntimeError: it has already been called for this optimizer since update().
        """
        self.late.begin_step(optimizer)
        # TODO(mixed_precision.loss_scaler)
        # the caller may or may not have called unscale_
        raise NotImplementedError("mixed_precision.loss_scaler")

    def update(self) -> None:
        """Set the scale for the next step; call it at the end of every step.

        Raises:
            RuntimeError: there has been no step since the last call.
            FloatingPointError: the scale has shrunk so far that it can't be the reason.
        """
        self.late.end_step()
        # TODO(mixed_precision.loss_scaler)
        # which attribute counts the steps in a row, and when is it reset?
        raise NotImplementedError("mixed_precision.loss_scaler")
        self.loss_scale = in_range(self.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`, even torch's GradScaler's, between two steps.

        Raises:
            ValueError: it isn't such a state.
        """
        self.loss_scale, self.good_steps = read_state(state)
        self.overflow.clear()
        self.late.forget()


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
    """Run one step of 16-bit training; return the mean loss over all ranks.

    Given: equal models on all ranks, and equally many samples. The optimizer updates
    `master`. bfloat16 needs no scaler. Compute the loss in float32, as it is a mean
    over many elements, and 16-bit sums lose precision.
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


def with_torch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
) -> bool:
    """Run one step with torch.amp, without comm; return True if it stepped.

    Given: a float32 model with plain tensors, a different one on each rank, in which
    every parameter gets a gradient. A parameter may be a scalar or a transposed view,
    and `.grad` may hold the gradient of an earlier step. Also torch's default process
    group, and a torch.amp.GradScaler("cpu") with equal settings on all ranks. With
    plain tensors, it skips a step only if this rank's gradients contain inf or nan.

    C1 The forward pass computes in bfloat16 while the weights stay in float32, and the
       step is the same as it would be without a loss scale.
    C2 If a gradient is inf or nan on any rank, the optimizer skips the step on every
       rank.
    C3 The scale is the same on every rank, as if a single scaler had seen the gradients
       of all ranks.
    In torch.distributed: ShardedGradScaler for FSDP1; GradScaler itself for DTensors
    Example: n = 2, a nan on rank 1 → False on both ranks, and both scales are halved
    Cost: one all_reduce of one element. Check: distlab check 2.24
    """
    # TODO(mixed_precision.port)
    # torch.autocast("cpu", torch.bfloat16): what belongs inside it, and what does not?
    # a GradScaler checks local gradients. How can another rank's inf reach it?
    raise NotImplementedError("mixed_precision.port")
