"""Given to the unit `tensor_parallel`: what its layers and operators have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import Comm

RegionOperator = Callable[[Comm, Tensor], Tensor]
"""What stands before or after a sharded layer: communication with a backward."""
Backward = Callable[[Any, Tensor], tuple[None, Tensor]]
"""The backward of an operator: of ctx and a gradient, those of comm (None) and of x."""


class Operators(NamedTuple):
    """The operators of an MLP or attention, each applied once."""

    before: RegionOperator
    after: RegionOperator


class Mesh(NamedTuple):
    """The two process groups of a rank."""

    tensor: Comm  # the ranks that hold one model replica together, a shard each
    data: Comm  # the ranks that hold the same shard, and train on other samples


class ParallelLinear(nn.Module):
    """A shard of the linear layer `full`, which is the same on every rank.

    `full` is not modified. A frozen weight or bias stays frozen. `operator` is applied
    to the input or to the output.

    Raises:
        ValueError: n does not divide the dimension that is sharded.
    """

    def __init__(self, comm: Comm, full: nn.Linear, operator: RegionOperator) -> None:
        super().__init__()
        self.comm, self.operator = comm, operator
        weight, bias = self.shard(full)
        self.weight = nn.Parameter(weight, full.weight.requires_grad)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias, full.bias.requires_grad)

    @abstractmethod
    def shard(self, full: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias (None without one), as contiguous copies."""


def reordered(full: nn.Linear, rows: Tensor) -> nn.Linear:
    """A linear layer with the rows of weight and bias of `full` in this order.

    `full` is not modified. A frozen weight or bias stays frozen.
    """
    layer = copy.deepcopy(full)
    for name, parameter in list(layer.named_parameters()):
        values = parameter.detach()[rows].contiguous()
        setattr(layer, name, nn.Parameter(values, parameter.requires_grad))
    return layer


def backward_of(forward: RegionOperator) -> Callable[[Backward], RegionOperator]:
    """Make an operator of the function `forward` and of the decorated backward.

    It is a custom autograd function of comm and x. backward finds comm in ctx.comm.
    """

    def with_backward(backward: Backward) -> RegionOperator:
        def keep_comm(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
            ctx.comm = comm
            return forward(comm, x)

        members = {"forward": staticmethod(keep_comm), "backward": backward}
        function = type(backward.__name__, (torch.autograd.Function,), members)
        operator: RegionOperator = function.apply  # type: ignore[attr-defined]
        return operator

    return with_backward
