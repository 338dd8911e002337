"""Models whose gradients become ready in a known order, and who sees it happen.

Everything is float64; the parent works out the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distlab.comm import Call, Comm, Work
from distlab.comm._call import Wrapper
from distlab.grading.kit.values import close

T = TypeVar("T")
WORLDS = (3, 2, 4, 1)
FEWER = (3, 2, 1)  # where a run has several steps
WIDTH = 6
LAYER_BYTES = 8 * WIDTH * (WIDTH + 1)  # weight and bias
MIB = 2**20

Happened = list[Any]
"""["gradient", name] · ["call", op, numbers, blocking] · ["wait", which call]."""


class Watched(Wrapper):
    """Writes down what is asked of comm, in one list with the gradients."""

    def __init__(self, inner: Comm, events: list[Happened]) -> None:
        super().__init__(inner)
        self._events, self._num_calls = events, 0

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        size = call.sent.numel() if isinstance(call.sent, Tensor) else 0
        self._events.append(["call", call.op, size, call.blocking])
        result = proceed()
        if call.blocking:
            return result
        return _WatchedWork(result, self._events, number)  # type: ignore[return-value,arg-type]

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return Watched(group, self._events)


class _WatchedWork:
    def __init__(self, work: Work, events: list[Happened], number: int) -> None:
        self._work, self._events, self._number = work, events, number

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._events.append(["wait", self._number])
        self._work.wait(timeout_s)


def watch_gradients(model: nn.Module, events: list[Happened]) -> None:
    """From now on each gradient that is ready is written down, before anyone else."""
    for name, parameter in model.named_parameters():

        def told(_: Tensor, name: str = name) -> None:
            events.append(["gradient", name])

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(told)


def _layer(generator: torch.Generator, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=bias).double()
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.5)
    return layer


class Chain(nn.Module):
    """Four layers, and a fifth that is used twice and has two names; one is frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(_layer(generator) for _ in range(4))
        self.frozen = _layer(generator).requires_grad_(False)
        self.tail = _layer(generator)
        self.end = self.tail

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, WIDTH) through all of them."""
        for layer in (*self.layers, self.frozen, self.tail, self.end):
            x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """Layers of one shape; on each rank they are used in another order.

    `forward` takes the names of those that are used, in their order. With `forks` the
    way back forks so often, and comes together again, as it does in a deep ResNet.
    """

    def __init__(self, seed: int, forks: int = 0) -> None:
        super().__init__()
        self.forks = forks
        generator = torch.Generator().manual_seed(seed + 1)
        self.layers = nn.ModuleDict(
            {name: _layer(generator, bias=False) for name in "abcd"}
        )

    def forward(self, x: Tensor, names: str) -> Tensor:
        """`x` (B, WIDTH) through the layers with these names."""
        for name in names:
            x = torch.tanh(self.layers[name](x))
        for _ in range(self.forks):
            x = (x + x.neg()) / 2 + x
        return x


def order_of(rank: int) -> str:
    """The order in which a rank uses the branches."""
    place = rank % 4
    return "abcd"[place:] + "abcd"[:place]


def make_inputs(seed: int, step: int, rank: int) -> Tensor:
    """What a rank's batch is like in a step: (4, WIDTH)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    inputs = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return inputs * (1.0 + rank)


def loss_of(outputs: Tensor) -> Tensor:
    """A loss that has a gradient wherever the outputs are."""
    return (outputs - 0.3).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every .grad by name."""
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def own_gradients(model: nn.Module, *arguments: Any) -> dict[str, Tensor]:
    """Those of one batch, worked out by this process; zeros where there is none."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        loss_of(model(*arguments)), list(named.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(named[name]) if gradient is None else gradient
        for name, gradient in zip(named, found, strict=True)
    }


@lru_cache(maxsize=64)
def chain_gradients(seed: int, step: int, n: int) -> list[dict[str, Tensor]]:
    """Of `Chain`, for each of n ranks."""
    model = Chain(seed)
    return [own_gradients(model, make_inputs(seed, step, rank)) for rank in range(n)]


@lru_cache(maxsize=32)
def branch_gradients(seed: int, n: int) -> list[dict[str, Tensor]]:
    """Of `Branches`, for each of n ranks in its order."""
    model = Branches(seed)
    return [
        own_gradients(model, make_inputs(seed, 0, rank), order_of(rank))
        for rank in range(n)
    ]


def end_to_end(named: dict[str, Tensor]) -> Tensor:
    """All of them in one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in named.values()])


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By name, the mean over the ranks."""
    return {
        name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]
    }


def like(actual: Sequence[Tensor], guess: Sequence[Tensor]) -> bool:
    """Whether each rank has what is guessed."""
    return all(close(a, g) for a, g in zip(actual, guess, strict=True))
