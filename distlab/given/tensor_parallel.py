"""Shared parts of the layers and operators in unit `tensor_parallel`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from distlab.comm import Comm

RegionOperator = Callable[[Comm, Tensor], Tensor]
"""Communication before or after a sharded layer, which also has a backward."""


class Operators(NamedTuple):
    """The two operators of an MLP or of attention, each of which is applied once."""

    before: RegionOperator
    after: RegionOperator


class Mesh(NamedTuple):
    """The two process groups of a rank."""

    tensor: Comm  # the ranks that hold one model replica together, a shard each
    data: Comm  # the ranks that hold the same shard, and train on other samples


class ParallelLinear(nn.Module):
    """A shard of the linear layer `full`, which is the same on every rank.

    `full` isn't modified. A weight or bias that is frozen in it is frozen here as well.
    `operator` is applied to the input or to the output.

    Raises:
        ValueError: n doesn't divide the dimension that is sharded.
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
        """Return contiguous copies of this rank's weight and bias; None for no bias."""


def reordered(full: nn.Linear, rows: Tensor) -> nn.Linear:
    """Return a linear layer with the rows of `full`, weight and bias, in this order.

    `full` isn't modified. A weight or bias that is frozen in it is frozen here as well.
    """
    layer = copy.deepcopy(full)
    for name, parameter in list(layer.named_parameters()):
        values = parameter.detach()[rows].contiguous()
        setattr(layer, name, nn.Parameter(values, parameter.requires_grad))
    return layer
