"""Models whose gradients become ready in a known order, and who sees it happen.

Everything is float64; the parent works out the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distlab.comm import Call, Comm, ReduceOp, Work
from distlab.comm._call import Wrapper
from distlab.grading.kit.values import close

T = TypeVar("T")
WORLDS = (3, 2, 4, 1)
FEWER = (3, 2, 1)  # where a run has several steps
WIDTH = 6
LAYER_BYTES = 8 * WIDTH * (WIDTH + 1)  # weight and bias
MIB = 2**20
OVERFLOW = 4.0
"""An input that makes a gradient of `gain` inf: rank 1 has one in step 0."""

Happened = list[Any]
"""["gradient", name] · ["call", op, numbers, blocking] · ["wait", which call] ·
["written", numbers]: a tensor, between the start of its all_reduce and the wait."""


class EventComm(Wrapper):
    """Writes down what is asked of comm, in one list with the gradients.

    A tensor whose all_reduce is under way has no values until the wait: what is read
    there is nan, and what is written there is lost, as it may be on any machine.
    """

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

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `Comm.all_reduce`."""
        if not async_op or not isinstance(tensor, Tensor):
            return super().all_reduce(tensor, op, async_op, timeout_s=timeout_s)
        under_way = tensor.detach().clone()
        work = super().all_reduce(under_way, op, async_op)
        assert isinstance(work, _WatchedWork)
        work.will_fill(tensor, under_way)
        return work

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return EventComm(group, self._events)


class _WatchedWork:
    def __init__(self, work: Work, events: list[Happened], number: int) -> None:
        self._work, self._events, self._number = work, events, number
        self._filled: tuple[Tensor, Tensor, int] | None = None

    def will_fill(self, tensor: Tensor, under_way: Tensor) -> None:
        """`tensor` gets the values of `under_way` when somebody waits."""
        with torch.no_grad():
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        self._filled = tensor, under_way, tensor._version

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._events.append(["wait", self._number])
        self._work.wait(timeout_s)
        if self._filled is None:
            return
        (tensor, under_way, version), self._filled = self._filled, None
        if tensor._version != version:
            self._events.append(["written", tensor.numel()])
        with torch.no_grad():
            tensor.copy_(under_way)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


class Doubled:
    """What `doubling` returns: a Work."""

    def __init__(self, work: Work, flat: Tensor) -> None:
        self._work, self._flat, self._is_done = work, flat, False

    def wait(self, timeout_s: float | None = None) -> None:
        """Twice the sum is in `flat` then."""
        self._work.wait()
        if not self._is_done:
            self._flat *= 2
        self._is_done = True

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


def doubling(unit: Any, given: list[str]) -> Callable[[Comm, Any], Doubled]:
    """A comm_hook that has an effect: every sum is doubled.

    What it is called with, if that is no bucket, is noted in `given`.
    """

    def comm_hook(comm: Comm, bucket: Any) -> Doubled:
        if not isinstance(bucket, unit.Bucket):
            given.append(type(bucket).__name__)
        flat = bucket if isinstance(bucket, Tensor) else bucket.flat
        return Doubled(unit.start_all_reduce(comm, bucket), flat)

    return comm_hook


def tolerance(world_size: int) -> float:
    """What bfloat16 leaves of a sum over many ranks; over a few it is exact."""
    return 1e-10 if world_size <= 3 else 2**-6


class _Exact(torch.autograd.Function):
    """Nothing; `gain` gets a gradient that bfloat16 can add up without an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        """Return x."""
        ctx.save_for_backward(x)
        ctx.dtype = gain.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Multiples of 144: sums of some, and a half, third, quarter of them, fit.

        Or inf, for an input of OVERFLOW.
        """
        (x,) = ctx.saved_tensors
        parts = 144 * (1 + (10 * x[0].abs()).long() % 3)
        parts = parts.to(ctx.dtype).masked_fill(x[0] == OVERFLOW, torch.inf)
        return gradient, parts


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
    """Four layers, and a fifth that is used twice and has two names; one is frozen.

    `gain` is of another dtype than the rest, `shift` has no dimension, `nothing` no
    element, and one weight is non-contiguous.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(_layer(generator) for _ in range(4))
        self.frozen = _layer(generator).requires_grad_(False)
        self.tail = _layer(generator)
        self.end = self.tail
        self.gain = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        weight = next(self.layers[1].parameters())
        weight.data = weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, WIDTH) through all of them."""
        x = _Exact.apply(x, self.gain)  # type: ignore[no-untyped-call]
        x = x + self.shift + self.nothing.sum()
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
    inputs *= 1.0 + rank
    if rank == 1 and step == 0:
        inputs[0, -1] = OVERFLOW
    return inputs


def loss_of(*outputs: Tensor) -> Tensor:
    """A loss that has a gradient wherever the outputs are."""
    parts = [(output - 0.3).square().mean() for output in outputs]
    return torch.stack(parts).sum()


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
    outputs = model(*arguments)
    loss = loss_of(*outputs) if isinstance(outputs, tuple) else loss_of(outputs)
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
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


def doubled(parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Twice as large."""
    return [{name: 2 * tensor for name, tensor in part.items()} for part in parts]


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By name, the mean over the ranks."""
    return {
        name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]
    }


def like(actual: Sequence[Tensor], guess: Sequence[Tensor]) -> bool:
    """Whether each rank has what is guessed."""
    return all(close(a, g) for a, g in zip(actual, guess, strict=True))
