"""torch's SyncBatchNorm on pretend GPUs: its kernels, which torch has for GPUs only.

The layer itself stays torch's, so a simulated rank makes the same calls as a real one:
an all-gather of each channel's mean, inverse deviation and count in the forward pass,
and an all-reduce of two sums in the backward pass. Here are the five functions that it
calls in between, for tensors in main memory.

Source: torch.nn.modules._functions.SyncBatchNorm for their calls; torch's
aten/src/ATen/native/cuda/Normalization.cuh for what each computes.
Symbols: x of shape (samples, channels, …); mean, invstd and the sums of shape
(channels,); mean_all and invstd_all of shape (ranks, channels).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm, functional
from torch.nn.modules._functions import SyncBatchNorm as Synchronized
from torch.nn.parallel import DistributedDataParallel

from distlab.sim.torch.replacing import Replaced

_torch: Any = torch


def replace_batch_norm(replaced: Replaced) -> None:
    """Let SyncBatchNorm run on ranks that pretend to have a GPU."""
    for name, ours in (
        ("batch_norm_stats", _stats),
        ("batch_norm_gather_stats_with_counts", _gathered),
        ("batch_norm_elemt", _normalized),
        ("batch_norm_backward_reduce", _sums),
        ("batch_norm_backward_elemt", _gradient),
    ):
        replaced.for_ranks(_torch, name, ours)
    replaced.with_original(SyncBatchNorm, "forward", _forward)
    replaced.for_ranks(
        DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None
    )


def _forward(original: Any, layer: Any, x: Tensor) -> Tensor:
    """Do what torch's forward() does, which would refuse a tensor on the CPU."""
    if not (layer.training and dist.is_initialized()):
        return original(layer, x)  # type: ignore[no-any-return]
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    factor = layer.momentum or 0.0
    if layer.track_running_stats:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # the mean over all batches
            factor = 1.0 / layer.num_batches_tracked.item()
    running = layer.track_running_stats
    mean, var = (layer.running_mean, layer.running_var) if running else (None, None)
    group = layer.process_group or dist.group.WORLD
    n = dist.get_world_size(group)
    if n == 1:
        return functional.batch_norm(
            x, mean, var, layer.weight, layer.bias, True, factor, layer.eps
        )
    out: Tensor = Synchronized.apply(
        x, layer.weight, layer.bias, mean, var, layer.eps, factor, group, n
    )
    return out


def _along(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in float32, as on a GPU."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_wide(x), _along(x), correction=0)
    return mean, torch.rsqrt(var + eps)


def _gathered(
    x: Tensor,
    mean_all: Tensor,
    invstd_all: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Combine the ranks' means and inverse deviations, and update the running ones."""
    share = counts.view(-1, 1)
    total = share.sum()
    mean = (share * mean_all).sum(0) / total
    squares = (share * (invstd_all**-2 - eps + (mean_all - mean) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return mean, torch.rsqrt(squares / total + eps)


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    out = (_wide(x) - _by_channel(mean, x)) * _by_channel(invstd, x)
    if weight is not None:
        out = out * _by_channel(weight, x)
    if bias is not None:
        out = out + _by_channel(bias, x)
    return out.to(x.dtype)


def _sums(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums of dy and of dy (x - mean), and both parameters' gradients."""
    dy = _wide(gradient)
    sum_dy = dy.sum(_along(x))
    sum_dy_xmu = (dy * (_wide(x) - _by_channel(mean, x))).sum(_along(x))
    like = sum_dy if weight is None else weight
    return (
        sum_dy,
        sum_dy_xmu,
        (sum_dy_xmu * invstd).to(like.dtype),
        sum_dy.to(like.dtype),
    )


def _gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    slope = _by_channel(sum_dy_xmu / total * invstd**2, x)
    own = _wide(gradient) - _by_channel(sum_dy / total, x)
    own = (own - (_wide(x) - _by_channel(mean, x)) * slope) * _by_channel(invstd, x)
    if weight is not None:
        own = own * _by_channel(weight, x)
    return own.to(x.dtype)
