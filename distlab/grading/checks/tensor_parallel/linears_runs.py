"""What the checks of task 2.17 run: linear layers, split and whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from distlab.comm import Comm
from distlab.grading.checks.tensor_parallel.shared import (
    as_tensor,
    attempt,
    drawn,
    enter,
    leave,
)
from distlab.runner import RankContext

OTHER = 5  # features of the side that is not cut: no small world size divides it
TOKENS = (2, 3)


def make_linear(seed: int, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A float64 layer with weights of about one, and a bias that shows."""
    whole = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    whole.weight.data = drawn(seed, -2, outputs, inputs)
    if bias:
        whole.bias.data = drawn(seed, -3, outputs)
    return whole


def linears_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Both layers, there and back, with a bias and without one; and two refusals."""
    n, rank, comm = context.world_size, context.rank, context.comm
    found: dict[str, Any] = {}
    for bias in (True, False):
        end = "" if bias else " without bias"
        sizes = (OTHER, 3 * n)
        column, memory = made(unit.ColumnParallelLinear, comm, seed, sizes, bias, enter)
        upstream = drawn(seed, -5, *TOKENS, 3 * n).chunk(n, 2)[rank]
        x = drawn(seed, -4, *TOKENS, OTHER)
        found["column" + end] = {
            **_there_and_back(column, x, upstream, comm.device),
            **memory,
            "none": as_tensor(column(x[:0].to(comm.device))),
        }
        sizes = (3 * n, OTHER)
        row, memory = made(unit.RowParallelLinear, comm, seed, sizes, bias, leave)
        x = drawn(seed, -6, *TOKENS, 3 * n).chunk(n, 2)[rank].contiguous()
        upstream = drawn(seed, -7, *TOKENS, OTHER)
        found["row" + end] = {
            **_there_and_back(row, x, upstream, comm.device),
            **memory,
            "none": as_tensor(row(x[:0].to(comm.device))),
            "inf": as_tensor(row(with_inf(n).chunk(n)[rank].to(comm.device))),
        }
    odd = 3 * n + 1
    wide, long = make_linear(seed, OTHER, odd), make_linear(seed, odd, OTHER)
    found["refused"] = [
        attempt(lambda: unit.ColumnParallelLinear(comm, wide, enter)),
        attempt(lambda: unit.RowParallelLinear(comm, long, leave)),
    ]
    return found


def with_inf(n: int) -> Tensor:
    """The inputs of one token, one of them inf."""
    x = torch.zeros(3 * n, dtype=torch.float64)
    x[0] = torch.inf
    return x


def made(
    kind: Any,
    comm: Comm,
    seed: int,
    sizes: tuple[int, int],
    bias: bool,
    operator: Callable[[Comm, Tensor], Tensor],
) -> tuple[nn.Module, dict[str, Any]]:
    """A sharded layer; its parameters in the full layer's memory; if that is kept."""
    whole = make_linear(seed, *sizes, bias).to(comm.device)
    places = {p.untyped_storage().data_ptr() for p in whole.parameters()}
    memory = StorageWeakRef(whole.weight.untyped_storage())
    layer: nn.Module = kind(comm, whole, operator)
    del whole
    if not memory.expired():  # a circle of references may hold it still
        gc.collect()
    shared = [
        name
        for name, p in layer.named_parameters()
        if p.untyped_storage().data_ptr() in places
    ]
    return layer, {"shared": shared, "kept": not memory.expired()}


def _there_and_back(
    layer: nn.Module, given: Tensor, upstream: Tensor, device: torch.device
) -> dict[str, Any]:
    # The same numbers; in memory the second dimension comes first.
    x = given.transpose(0, 1).contiguous().transpose(0, 1).to(device).requires_grad_()
    y = layer(x)
    if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
        y.backward(upstream.to(device))
    bias = layer.bias
    return {
        "out": as_tensor(y),
        "x": as_tensor(x.grad),
        "weight": as_tensor(layer.weight.grad),
        "bias": as_tensor(bias.grad if isinstance(bias, Tensor) else None),
        "stored": [as_tensor(layer.weight), as_tensor(bias)],
        "held": [held(p) for p in layer.parameters()],
    }


def held(parameter: Tensor) -> list[int]:
    """How many elements it has, and how many its memory has room for."""
    room = parameter.untyped_storage().nbytes() // parameter.element_size()
    return [parameter.numel(), room]
