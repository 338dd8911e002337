"""What ranks do with a hook of torch's DDP: some steps, and each call of the hook.

`register_comm_hook` is replaced by one that registers a hook around the learner's. It
notes the gradients of the bucket, the parameters that they belong to, and what the hook
asks torch to send. In the last step the last rank goes backward only after rank 0's
second call of the hook: rank 0 calls it, unless its first call waits for a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distlab.comm import leave_default_group
from distlab.grading.kit.torch_group import join
from distlab.grading.kit.torchrun_env import keep_wrappers
from distlab.runner import RankContext

WIDTH, LAYERS = 6, 6
CALL_ORDER = (0, 2, 1, 4, 3, 5)
"""In forward. In the first step DDP has one bucket, with the parameters in the order of
their definition; from the second step on they come in the order of backward."""
LAYER_MIB = WIDTH * WIDTH * 8 / 2**20  # float64
RATIO = 0.1  # 7 of the 72 elements of two layers, 21 of all 216
STEPS = 4
WAIT_S = 6.0  # how long the last rank waits for rank 0's second call


class Detour(nn.Module):
    """Linear layers of one size, not called in the order in which they are defined."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers).double()
        generator = torch.Generator().manual_seed(seed)
        for layer in layers:
            drawn = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
            layer.weight.data.copy_(0.6 * drawn)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, WIDTH) both."""
        for number in CALL_ORDER:
            x = torch.tanh(self.layers[number](x))
        return x


def inputs_of(seed: int, step: int, rank: int) -> Tensor:
    """Samples of one rank in one step, (5, WIDTH)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def steps_with_hook(
    context: RankContext, unit: ModuleType, seed: int, layers: int
) -> list[dict[str, Any]]:
    """By step: .grad of all parameters end to end, and the calls of the hook.

    A bucket has so many `layers`.
    """
    join(context)
    keep_wrappers()
    module, calls = Detour(seed), list[dict[str, Any]]()
    turn = _Turn(context)
    parameters = list(module.parameters())
    with _recorded_hooks(parameters, calls, turn):
        model = unit.compressed(module, RATIO, layers * LAYER_MIB)
    steps = []
    for step in range(STEPS):
        calls.clear()
        module.zero_grad()
        loss = model(inputs_of(seed, step, context.rank)).square().sum()
        # With one bucket there is no second call to wait for.
        turn.begin(is_last=step == STEPS - 1 and layers < LAYERS)
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        steps.append(
            {
                "gradients": torch.cat([g.detach().flatten() for g in gradients]),
                "calls": list(calls),
                "waited_in_vain": turn.in_vain,
            }
        )
    leave_default_group()
    return steps


class _Turn:
    """The last rank computes no gradient of the last step before it may."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._n = context.rank, context.world_size
        self._store = c10d._get_default_store()
        self._is_last_step = False
        self.in_vain = False

    def begin(self, *, is_last: bool) -> None:
        """Forward is over."""
        self._is_last_step = is_last
        if is_last and 0 < self._rank == self._n - 1:
            try:
                self._store.wait(["second call"], timedelta(seconds=WAIT_S))
            except dist.DistStoreError:
                self.in_vain = True

    def called(self, count: int) -> None:
        """The hook is called for the bucket of this number in this step."""
        if self._is_last_step and self._rank == 0 and count == 2:
            self._store.set("second call", "began")


@contextmanager
def _recorded_hooks(
    parameters: Sequence[nn.Parameter], calls: list[dict[str, Any]], turn: _Turn
) -> Iterator[None]:
    wrapper: Any = nn.parallel.DistributedDataParallel
    register = wrapper.register_comm_hook
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}

    @wraps(register)
    def registered(self: Any, state: object, hook: Any) -> None:
        @wraps(hook)
        def recorded(state: Any, bucket: Any) -> Any:
            call = {
                "index": bucket.index(),
                "parameters": [numbers[id(p)] for p in bucket.parameters()],
                "gradients": bucket.buffer().clone(),
                "sent": list[tuple[str, int]](),
            }
            calls.append(call)
            turn.called(len(calls))
            with _Sent(call["sent"]):
                return hook(state, bucket)

        register(self, state, recorded)

    wrapper.register_comm_hook = registered
    try:
        yield
    finally:
        wrapper.register_comm_hook = register


class _Sent(TorchDispatchMode):
    """While it is entered: name and bytes of what each collective was given to send.

    By the cost of the byte meter: all_gather (n-1) times the bytes, all_reduce
    2(n-1)/n times, all others (n-1) times.
    """

    def __init__(self, sent: list[tuple[str, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent = sent

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        done = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            if tensors:
                self._note(func._opname.strip("_"), max(tensors, key=_size))
        return done

    def _note(self, name: str, largest: Tensor) -> None:
        n, size = dist.get_world_size(), _size(largest)
        if name == "allgather_base":  # the largest is the output
            sent = (n - 1) * size // n
        elif "allreduce" in name:
            sent = 2 * (n - 1) * size // n
        else:
            sent = (n - 1) * size
        self._sent.append((f"{name} of {str(largest.dtype)[6:]}", sent))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
