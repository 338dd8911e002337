"""What ranks do for the checks of ZeRO: a model, its batches, and one process's course.

Plain SGD in float64, with momentum (a number of state per element) and two groups whose
settings differ. Every rank has samples of its own, equally many.
"""

from __future__ import annotations

import io
import itertools
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.checks.sharded_optimizer.half import SLACK as SLACK
from distlab.grading.checks.sharded_optimizer.half import step_in_half
from distlab.grading.checks.sharded_optimizer.moments import Told, watching
from distlab.grading.kit.live_bytes import LiveBytes, unseen
from distlab.runner import RankContext

SIZES = (9, 23, 14, 3)
ROWS = 4
STEPS = 2
MAX_NORMS = (0.05, 1e6, 1.0, 1.0)  # the first shortens, the second does not
ZERO, INFINITE = 2, 3  # gradients without an element, and with one that is infinite
STALE = 1e8
WEIGHTS = {"lr": 0.05, "weight_decay": 0.2}
OTHERS = {"lr": 0.4, "weight_decay": 0.0, "dampening": 0.3, "label": "the others"}
MOMENTUM = 0.9
PER_ELEMENT = (8, 8, 8)
make_optimizer = partial(torch.optim.SGD, lr=1.0, momentum=MOMENTUM)


class Scale(nn.Module):
    """A layer with one parameter, of 3 elements, that it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(SIZES[-1], dtype=torch.float64))
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the gain."""
        return x * self.gain if self.is_used else x


def make_model(seed: int) -> nn.Sequential:
    """A linear layer, one of two of them, a Scale; one bias is not trained."""
    pairs = list(itertools.pairwise(SIZES))
    linears = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairs]
    rest = [nn.Tanh(), linears[1], nn.Tanh(), linears[2]]  # two weights in one layer
    model = nn.Sequential(linears[0], nn.Sequential(*rest), Scale())
    generator = torch.Generator().manual_seed(seed * 31 + 5)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(drawn * 0.4)
    linears[1].bias.requires_grad_(False)
    return model


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights in one group, all else in the other."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, **WEIGHTS}, {"params": others, **OTHERS}]


def make_batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs (ROWS, 9) and targets (ROWS, 3) of a rank."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    drawn = torch.randn(
        ROWS, SIZES[0] + SIZES[-1], generator=generator, dtype=torch.float64
    )
    inputs, targets = drawn.split([SIZES[0], SIZES[-1]], 1)
    return inputs.contiguous(), targets.contiguous()


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Add the gradients of a batch's mean loss."""
    inputs, targets = batch
    loss = (model(inputs) - targets).square().sum(1).mean()
    loss.backward()


def use_last_layer(model: nn.Module, is_used: bool) -> None:
    """Whether the last layer's parameter takes part from now on."""
    for layer in model.modules():
        if isinstance(layer, Scale):
            layer.is_used = is_used


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that change, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of them."""
    return {name: p.detach().cpu().clone() for name, p in trained(model).items()}


def flat(values: dict[str, Tensor]) -> Tensor:
    """All of them end to end."""
    return torch.cat([value.reshape(-1) for value in values.values()])


# ── in the ranks ────────────────────────────────────────────────────────────────────


class Alone:
    """A rank without other ranks: it has a number, and cannot send."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device


def settings_in_use(zero: Any) -> dict[str, dict[str, Any]]:
    """By a name of each bucket: the settings with which its shard is optimized."""
    return {
        bucket.names[0]: {k: v for k, v in group.items() if k != "params"}
        for group in zero.optimizer.param_groups
        for bucket in zero.buckets
        if any(parameter is bucket.shard for parameter in group["params"])
    }


def train_stage1(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """STEPS steps; what is held after the first, what each step sends."""
    comm = context.comm
    batches = [make_batch(seed, step, comm.rank) for step in range(STEPS)]
    with LiveBytes() as memory:
        model = make_model(seed)
        zero = unit.ShardedOptimizer(comm, model, make_groups(model), make_optimizer)
        steps, held = [], 0
        for step, batch in enumerate(batches):
            backward(model, batch)
            start = context.traffic.sent_bytes
            zero.reduce_gradients()
            reduced = context.traffic.sent_bytes
            zero.step()
            sent = [reduced - start, context.traffic.sent_bytes - reduced]
            zero.zero_grad()
            if step == 0:
                held = memory.settled(after_step(comm.world_size))
            with unseen():
                steps.append({"weights": weights_of(model), "sent": sent})
    return {
        "steps": steps,
        "held": held,
        "state": _state_numbers(zero.optimizer),
        "settings": settings_in_use(zero),
        "half": step_in_half(context, unit, "ShardedOptimizer"),
    }


def clip_gradients(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """For each of MAX_NORMS: the norm that clip returns, and the shards' gradients."""
    comm, results = context.comm, []
    model = make_model(seed)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, STALE)
    zero = unit.ShardedOptimizer(comm, model, make_groups(model), make_optimizer)
    for number, max_norm in enumerate(MAX_NORMS):
        gradient = gradient_to_clip(seed, number, weights_of(model))
        give_gradients(zero, gradient, comm.rank, comm.world_size)
        norm = zero.clip(max_norm)
        shards = [bucket.shard.grad.clone() for bucket in zero.buckets]
        results.append({"norm": norm, "gradient": torch.cat(shards)})
    return results


def gradient_to_clip(
    seed: int, number: int, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient that is clipped to MAX_NORMS[number]."""
    gradient = drawn_gradient(seed + number, weights)
    if number == ZERO:
        return {name: torch.zeros_like(value) for name, value in gradient.items()}
    if number == INFINITE:
        next(iter(gradient.values())).view(-1)[0] = torch.inf  # of rank 0 only
    return gradient


def save_state(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """STEPS steps with drawn gradients; the state, and a step at another world size."""
    comm, n = context.comm, context.world_size
    model = make_model(seed)
    zero = unit.ShardedOptimizer(comm, model, make_groups(model), make_optimizer)
    for step in range(STEPS):
        gradient = drawn_gradient(seed + step, weights_of(model))
        give_gradients(zero, gradient, comm.rank, n)
        zero.optimizer.step()
        for bucket in zero.buckets:
            comm.all_gather(bucket.flat, bucket.shard.detach())
    saved = zero.state_dict()
    return {"saved": saved, "resumed": _resumed(unit, comm, model, seed, saved)}


def other_world(world_size: int) -> int:
    """How many ranks go on with what `world_size` ranks have saved."""
    return world_size - 1 if world_size > 3 else world_size + 1


def _resumed(
    unit: ModuleType, comm: Comm, model: nn.Module, seed: int, saved: Any
) -> list[dict[str, Any]]:
    """The next step of ranks of another world, a few on each of these, or the error.

    Its gradient is drawn, so that no message is needed.
    """
    states, n = _exchanged(comm, saved), other_world(comm.world_size)
    start, found = weights_of(model), []
    for rank in range(comm.rank, n, comm.world_size):
        copy = make_model(seed)
        copy.load_state_dict(model.state_dict())
        alone = Alone(rank, n, comm.device)
        zero = unit.ShardedOptimizer(alone, copy, make_groups(copy), make_optimizer)
        try:
            zero.load_state_dict(states)
        except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
            return [{"error": f"{type(error).__name__}: {error}"}]
        give_gradients(zero, drawn_gradient(seed + STEPS, start), rank, n)
        zero.optimizer.step()
        found.append({"rank": rank, "weights": weights_of(copy)})
    return found


def drawn_gradient(seed: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A random gradient for these weights, the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 53 + 77)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in weights.items()
    }


def give_gradients(zero: Any, whole: dict[str, Tensor], rank: int, n: int) -> None:
    """Each shard gets its part of these gradients."""
    for bucket in zero.buckets:
        vector = torch.zeros_like(bucket.flat)
        own = torch.cat([whole[name].reshape(-1) for name in bucket.names])
        vector[: own.numel()] = own
        bucket.shard.grad = vector.chunk(n)[rank].clone()


def _exchanged(comm: Comm, value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if comm.world_size == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    lengths = torch.zeros(comm.world_size, dtype=torch.int64)
    comm.all_gather(lengths, torch.tensor([own.numel()]))
    most = int(lengths.max())
    padded = torch.cat([own, own.new_zeros(most - own.numel())])
    everything = own.new_zeros(comm.world_size * most)
    comm.all_gather(everything, padded)
    return [
        torch.load(io.BytesIO(part[:length].numpy().tobytes()), weights_only=True)
        for part, length in zip(
            everything.chunk(comm.world_size), lengths.tolist(), strict=True
        )
    ]


def _state_numbers(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers the optimizer says that it keeps."""
    kept = [v for state in optimizer.state.values() for v in state.values()]
    return sum(value.numel() for value in kept if isinstance(value, Tensor))


def train_stage2(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Three steps: plain, with two backward(), and with a layer left out on rank 0."""
    comm, steps, told = context.comm, [], Told()
    plan = [[0], [1, 2], [3]]
    batches = [[make_batch(seed, part, comm.rank) for part in parts] for parts in plan]
    with LiveBytes() as memory:
        model = make_model(seed)
        sharded_gradients = watching(
            unit.ShardedGradients, comm.world_size, memory, told
        )
        zero = sharded_gradients(comm, model, make_groups(model), make_optimizer)
        for step, parts in enumerate(batches):
            use_last_layer(model, step < 2 or comm.rank > 0)
            sent = context.traffic.sent_bytes
            for batch in parts:
                backward(model, batch)
            held = memory.settled(after_backward(comm.world_size, step))
            zero.reduce_gradients()
            sent = context.traffic.sent_bytes - sent
            zero.step()
            zero.zero_grad()
            rest = memory.settled(after_step(comm.world_size))
            with unseen():
                weights = weights_of(model)
            steps.append({"weights": weights, "held": held, "rest": rest, "sent": sent})
    half = step_in_half(context, unit, "ShardedGradients")
    return {"steps": steps, "told": told, "half": half}


# ── in one process ──────────────────────────────────────────────────────────────────


def elements(world_size: int) -> tuple[int, int]:
    """The elements of all buckets, and of all shards of one rank, with padding."""
    sizes = bucket_sizes()
    shards = sum(-(-size // world_size) for size in sizes)
    return shards * world_size, shards


def after_step(world_size: int) -> int:
    """At most so many bytes are alive: the weights, and the state of the shards."""
    whole, shard = elements(world_size)
    return 8 * (whole + shard) + SLACK


def after_backward(world_size: int, step: int) -> int:
    """At most so many at stage 2: the weights, and the shards' gradients and state."""
    whole, shard = elements(world_size)
    return 8 * (whole + shard * (1 + (step > 0))) + SLACK


def bucket_sizes() -> list[int]:
    """Of each layer, the elements of each group."""
    sizes = []
    for layer in make_model(0).children():
        for is_weight in (True, False):
            own = [
                p.numel()
                for p in layer.parameters()
                if p.requires_grad and (p.dim() > 1) == is_weight
            ]
            sizes += [sum(own)] if own else []
    return sizes


def gradients_of(
    model: nn.Module, seed: int, part: int, ranks: range, left_out: int | None = None
) -> list[dict[str, Tensor]]:
    """Each rank's gradient of a batch; rank `left_out` leaves the last layer out."""
    found = []
    for rank in ranks:
        model.zero_grad()
        use_last_layer(model, rank != left_out)
        backward(model, make_batch(seed, part, rank))
        found.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in trained(model).items()
            }
        )
    model.zero_grad()
    return found


def mean_of(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Their mean, name by name."""
    count = len(gradients)
    return {n: sum(g[n] for g in gradients) / count for n in gradients[0]}  # type: ignore[misc]


class One:
    """One process with all samples; `groups` may be other than they should be."""

    def __init__(self, seed: int, groups: Any = make_groups) -> None:
        self.seed, self.model = seed, make_model(seed)
        self.optimizer = make_optimizer(groups(self.model))

    def step(self, gradient: dict[str, Tensor]) -> None:
        """A step with this gradient."""
        for name, parameter in trained(self.model).items():
            parameter.grad = gradient[name].clone()
        self.optimizer.step()

    def gradients(
        self, part: int, n: int, left_out: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Each of n ranks' gradient of batch number `part`, with the weights of now."""
        return gradients_of(self.model, self.seed, part, range(n), left_out)
