"""Flat vectors of parameters: find the layer of each parameter, and form buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import Comm, Work
from distlab.given.sharded_optimizer.freed import guard, release

ParamGroup = dict[str, Any]  # `params` and their settings, as torch.optim takes them
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


Ranges = Sequence[tuple[int, int, int]]
"""Each range: a parameter's number, its first element, and the one after its last."""


class Bucket:
    """Parameters of one group as views of a single vector, `flat`, padded at its end.

    `shard` is this rank's chunk of `flat` as a parameter that shares its memory, and
    `shard_ranges` lists the ranges of elements in it. `names`, `sizes` and `parameters`
    are in the same order.
    """

    def __init__(
        self,
        comm: Comm,
        group: ParamGroup,
        named: dict[str, nn.Parameter],
        shard_ranges: Callable[[Sequence[int]], Ranges],
    ) -> None:
        self.group, self.names = group, list(named)
        self.parameters = list(named.values())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.shard_ranges = shard_ranges(self.sizes)
        length = -(-sum(self.sizes) // comm.world_size) * comm.world_size
        self.flat = flatten([p.detach() for p in self.parameters], length)
        views = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.shard = nn.Parameter(self.flat.chunk(comm.world_size)[comm.rank])
        self.in_flight: list[Work] = []  # what prefetch() has started
        self.was_used = [False] * len(named)  # since the last step, on this rank
        self.pieces: list[nn.Parameter] = []  # see uneven.py

    @property
    def is_unsharded(self) -> bool:
        """True if `flat` has memory."""
        return self.flat.untyped_storage().nbytes() > 0 or not self.flat.numel()

    def take_gradients(self) -> Tensor:
        """Return all gradients in a vector like `flat`, and set each .grad to None.

        A parameter without a gradient gets zeros.

        Raises:
            ValueError: a gradient is sparse.
        """
        gradients = []
        for number, p in enumerate(self.parameters):
            if p.grad is None:
                gradients.append(self.flat.new_zeros(self.sizes[number]))
                continue
            if p.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {self.names[number]} is sparse: ZeRO needs dense "
                    "ones, as of nn.Embedding(…, sparse=False)"
                )
            self.was_used[number] = True
            gradients.append(p.grad)
            p.grad = None
        return flatten(gradients, self.flat.numel())

    def allocate(self) -> None:
        """Give `flat` memory again; its values are undefined."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        release(self.parameters)

    def free(self) -> None:
        """Free the memory of `flat`; you may not read it or its views after that."""
        self.wait()
        self.flat.untyped_storage().resize_(0)
        guard(self.parameters, self.names)

    def wait(self) -> None:
        """Wait for all operations in flight."""
        while self.in_flight:
            self.in_flight.pop().wait()

    def slices(self) -> list[slice]:
        """Return the slice of the shard that each of `shard_ranges` occupies."""
        found, offset = [], 0
        for _, start, stop in self.shard_ranges:
            found.append(slice(offset, offset + stop - start))
            offset += stop - start
        return found


class Layer(NamedTuple):
    """A module that computes, and the parameters that belong to it, by name."""

    module: nn.Module
    named: dict[str, nn.Parameter]


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's children in order; a list of modules counts as its elements.

    If a parameter belongs to several of them or directly to the model, it counts as the
    model's own. The model itself is then the first layer.
    """
    modules = list(_computing(model))
    places: dict[nn.Parameter, list[int]] = {}
    for place, module in enumerate(modules):
        for parameter in module.parameters():
            places.setdefault(parameter, []).append(place)
    layers = [Layer(module, {}) for module in modules]
    whole = Layer(model, {})
    for name, parameter in model.named_parameters():
        own = places.get(parameter, [])
        layer = layers[own[0]] if len(own) == 1 else whole
        layer.named[name] = parameter
    return [whole, *layers] if whole.named else layers


def _computing(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _computing(child)
        else:
            yield child


def flatten(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Copy all tensors into one vector of this length, with zeros at its end."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    rest = length - sum(part.numel() for part in flat)
    return torch.cat([*flat, flat[0].new_zeros(rest)])
