"""What ranks do with hooks of torch's DDP: some steps, and each call of a hook.

`register_comm_hook` is replaced by one that registers a hook around the learner's. It
notes the gradients of the bucket, the parameters that they belong to, and what the hook
asks torch to send. In one run, the last rank goes backward in each step only after rank
0's hook has returned for every bucket: it never does if it waits for a message.
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

from distlab.comm import leave_default_group
from distlab.grading.checks.compression_port.futures import Watch, type_of_value
from distlab.grading.kit.again import played_once
from distlab.grading.kit.torch_group import join
from distlab.grading.kit.torchrun_env import keep_wrappers
from distlab.runner import RankContext

SHAPES = ((4, 6), (4, 6), (6, 4), (6, 5), (5, 4), (6, 6))  # of the weights
CALL_ORDER = (0, 2, 1, 4, 3, 5)
"""In forward. By default DDP has one bucket in the first step, with the parameters in
the order of their definition; later they come in the order of backward."""
SIZES = (1, *(rows * columns for rows, columns in SHAPES))  # the first one is the gain
ALL = sum(SIZES)  # 159 elements
BUCKET = 40  # DDP closes a bucket of so many elements, or more
RATIO = 0.1  # 15 of all 159 elements
SMALL_RATIO = 0.005  # of any bucket less than one element
STEPS = 4
DTYPES = (torch.float64, torch.float32)  # of the first model and of the second
INFINITE = 1, 1  # in the second model's second step rank 0 has infinite gradients,
INFINITES = slice(SIZES[0], SIZES[0] + 2)  # two in one bucket, and one of them is sent
SPARSE = (1.0, -2.0)  # all that rank 0 has in its first step with several buckets
WAIT_S = 6.0  # how long the last rank waits for rank 0's hooks
HOLD_S = 0.3  # how long a message is held back that a callback may be waiting for


class Detour(nn.Module):
    """Linear layers of several sizes, not called in the order of their definition.

    One parameter has a single element, and one is frozen.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(0.6 * values)

        self.gain = nn.Parameter(torch.tensor([1.3], dtype=torch.float64))
        self.layers = nn.ParameterList(drawn(*shape) for shape in SHAPES)
        self.frozen = nn.Parameter(drawn(6).detach(), requires_grad=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, 6) both."""
        for number in CALL_ORDER:
            x = torch.tanh(nn.functional.linear(x, self.layers[number]))
        return self.gain * x + self.frozen * x

    def trained(self) -> list[nn.Parameter]:
        """The parameters that DDP sees, in the order of their definition."""
        return [p for p in self.parameters() if p.requires_grad]


def inputs_of(seed: int, step: int, rank: int, model: int) -> Tensor:
    """Samples of one rank in one step, (5, 6).

    The second model, and one with several buckets, gets zeros on rank 0 in its first
    step: no gradient is left to choose from.
    """
    if model and step == rank == 0:
        return torch.zeros(5, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def steps_with_hook(
    context: RankContext, unit: ModuleType, seed: int, elements: int
) -> list[list[dict[str, Any]]]:
    """One model, whose buckets have so many `elements`. See `_train`."""
    return _train(context, unit, seed, [(RATIO, elements)])


@played_once
def steps_of_two_models(
    context: RankContext, unit: ModuleType, seed: int
) -> list[list[dict[str, Any]]]:
    """Two models, in turns; the second one has a bucket for each parameter.

    And it has float32 weights.
    """
    return _train(context, unit, seed, [(RATIO, BUCKET), (SMALL_RATIO, 1)])


def _train(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    settings: Sequence[tuple[float, int]],
) -> list[list[dict[str, Any]]]:
    """By model, by step: .grad of all parameters end to end, and the calls of the hook.

    A step that torch ended with an error has no gradients, and it is the last one, if
    the calls say why.
    """
    join(context)
    keep_wrappers()
    is_several = len(settings) == 1 and settings[0][1] < ALL
    turn = _Turn(context, is_on=is_several)
    modules = [Detour(seed + at, DTYPES[at]) for at in range(len(settings))]
    models, calls = [], list[dict[str, Any]]()
    with turn.watch:
        for module, (ratio, elements) in zip(modules, settings, strict=True):
            with _recorded_hooks(module.trained(), calls, turn):
                size = elements * module.gain.element_size()
                models.append(unit.compressed(module, ratio, size / 2**20))
        found: list[list[dict[str, Any]]] = [[] for _ in settings]
        for step in range(STEPS):
            for at, (module, model) in enumerate(zip(modules, models, strict=True)):
                calls.clear()
                module.zero_grad()
                x = inputs_of(seed, step, context.rank, at or is_several).to(DTYPES[at])
                values: tuple[float, ...] = ()
                if (at, step) == INFINITE and context.rank == 0:
                    values = torch.inf, torch.inf
                if is_several and step == context.rank == 0:
                    values = (*[0.0] * (SIZES[1] - len(SPARSE)), *SPARSE)
                with _first_gradients(module, values):
                    found[at].append(_step(module, model, x, calls, turn))
                if found[at][-1]["gradients"] is None:
                    return found
    leave_default_group()
    return found


@contextmanager
def _first_gradients(module: Detour, values: Sequence[float]) -> Iterator[None]:
    """Meanwhile the first elements of the first weight have these gradients."""

    def replaced(gradient: Tensor) -> Tensor:
        found = gradient.clone()
        found.view(-1)[: len(values)] = found.new_tensor(values)
        return found

    handle = module.layers[0].register_hook(replaced) if values else None
    yield
    if handle is not None:
        handle.remove()


def _step(
    module: Detour, model: Any, x: Tensor, calls: list[dict[str, Any]], turn: _Turn
) -> dict[str, Any]:
    found: dict[str, Any] = {"waited_in_vain": False, "gradients": None}
    try:
        loss = model(x).square().sum()
        found["waited_in_vain"] = turn.begin()
        loss.backward()
    except RuntimeError:
        if not turn.is_explained(calls):
            raise
    else:
        gradients = [p.grad for p in module.trained() if p.grad is not None]
        found["gradients"] = torch.cat([g.detach().flatten() for g in gradients])
    return found | {"calls": [turn.told(call) for call in calls]}


class _Turn:
    """The last rank computes no gradient of a step before it may."""

    def __init__(self, context: RankContext, *, is_on: bool) -> None:
        self._rank, self._n = context.rank, context.world_size
        self._is_held_back = is_on and 0 < self._rank == self._n - 1
        self._has_late_message = self._is_held_back
        self._store = c10d._get_default_store()
        self._step = 0
        self._is_in_vain = False
        self.watch = Watch(self._callback_acts, self._hold)

    def begin(self) -> bool:
        """Forward is over; whether the last rank has waited in vain."""
        self._step += 1
        if self._is_held_back and not self._is_in_vain:
            self._is_in_vain = not self._comes(f"returned {self._step}", WAIT_S)
        return self._is_in_vain

    def returned(self, call: dict[str, Any], number: int, is_last: bool) -> None:
        """The hook has returned; `is_last` says from the step's last bucket."""
        count = sum(count for _, count in call["sent"])
        self._store.set(f"sent {self._step} {number} {self._rank}", str(count))
        if is_last and self._rank == 0:
            self._store.set(f"returned {self._step}", "yes")

    def is_explained(self, calls: Sequence[dict[str, Any]]) -> bool:
        """Whether the calls of this rank or of another one say why torch failed."""
        if any(type_of_value(call["future"]) for call in calls):
            return True
        steps, numbers = (self._step - 1, self._step), range(len(SIZES))
        sizes_differ = any(self._differ(s, i) for s in steps for i in numbers)
        return sizes_differ or self._store.check(["callback"])

    def _differ(self, step: int, number: int) -> bool:
        """Whether the ranks are known to have sent unequally in a call of the hook."""
        keys = [f"sent {step} {number} {rank}" for rank in range(self._n)]
        return len({self._store.get(k) for k in keys if self._store.check([k])}) > 1

    def told(self, call: dict[str, Any]) -> dict[str, Any]:
        """What a judge reads of a call."""
        named = type_of_value(call["future"])
        return {k: v for k, v in call.items() if k != "future"} | {"value": named}

    def _callback_acts(self) -> None:
        self._store.set("callback", "yes")

    def _hold(self) -> None:
        """Before a hook sends its second message: once, the last rank is late."""
        if self._has_late_message and self._step == STEPS:
            self._has_late_message = False
            self._comes("callback", HOLD_S)

    def _comes(self, key: str, limit_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except dist.DistStoreError:
            return False
        return True


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
                "waits": False,  # a callback of the hook's future
                "sends_later": False,
                "returned": "",
                "future": None,
            }
            calls.append(call)
            with turn.watch.of(call):
                future = hook(state, bucket)
            turn.returned(call, len(calls) - 1, bucket.is_last())
            if not isinstance(future, torch._C.Future):
                call["returned"] = type(future).__name__
                future = torch.futures.Future[Tensor]()
                future.set_result(bucket.buffer())
            call["future"] = future
            return future

        register(self, state, recorded)

    wrapper.register_comm_hook = registered
    try:
        yield
    finally:
        wrapper.register_comm_hook = register
