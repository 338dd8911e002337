"""What ranks do for the checks of ZeRO: a model, its batches, and one process's course.

Plain SGD in float64, with momentum (a number of state per element) and two groups whose
settings differ. Every rank has samples of its own, equally many.
"""

from __future__ import annotations

import itertools
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.sharded_optimizer.half import SLACK as SLACK
from distlab.grading.checks.sharded_optimizer.half import step_in_half
from distlab.grading.checks.sharded_optimizer.moments import Told, watched, watching
from distlab.grading.kit.live_bytes import LiveBytes, unseen
from distlab.grading.kit.plain_sgd import PlainSGD
from distlab.runner import RankContext

SIZES = (9, 23, 14, 3)
ROWS = 4
STEPS = 2
WEIGHTS = {"lr": 0.05, "weight_decay": 0.2}
OTHERS = {"lr": 0.4, "weight_decay": 0.0, "dampening": 0.3, "label": "the others"}
MOMENTUM = 0.9
LEFT_OUT = 1, 2
"""The step and the rank of `train_stage1` where the last layer isn't used."""
STAGE2_PARTS = ([0], [1, 2], [3])
"""The batches of each step of `train_stage2`."""
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


# ── in the ranks ────────────────────────────────────────────────────────────────────


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
            use_last_layer(model, (step, comm.rank) != LEFT_OUT)
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
        "half": step_in_half(context, unit, stage=1),
        "numbered": _numbered(context, unit, seed),
    }


LIKE_WEIGHTS = {"lr": WEIGHTS["lr"], "weight_decay": 0.0}


def _numbered(context: RankContext, unit: ModuleType, seed: int) -> list[list[str]]:
    """By group, the parameters that the shards of its buckets belong to.

    The first group has nothing to train, and the others agree in `lr`: a scheduler
    finds each by its number.
    """
    model = make_model(seed)
    weights, others = make_groups(model)
    frozen = {"params": [p for p in model.parameters() if not p.requires_grad]}
    others["params"] = [p for p in others["params"] if p.requires_grad]
    groups = [{**frozen, **LIKE_WEIGHTS}, weights, {**others, **LIKE_WEIGHTS}]
    zero = unit.ShardedOptimizer(context.comm, model, groups, make_optimizer)
    return [
        [
            name
            for bucket in zero.buckets
            if any(parameter is bucket.shard for parameter in group["params"])
            for name in bucket.names
        ]
        for group in zero.optimizer.param_groups
    ]


def _state_numbers(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers the optimizer says that it keeps."""
    kept = [v for state in optimizer.state.values() for v in state.values()]
    return sum(value.numel() for value in kept if isinstance(value, Tensor))


def train_stage2(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Three steps: plain, with two backward(), and with a layer left out on rank 0."""
    comm, steps, told = context.comm, [], Told()
    batches = [
        [make_batch(seed, part, comm.rank) for part in parts] for parts in STAGE2_PARTS
    ]
    with LiveBytes() as memory:
        model = make_model(seed)
        groups = make_groups(model)
        inside = watched(comm)
        zero = unit.ShardedOptimizer(inside, model, groups, make_optimizer)
        watching(unit.ShardedGradients, memory, told, inside)(zero)
        for step, parts in enumerate(batches):
            is_left_out = step == 2 and comm.rank == 0 and comm.world_size > 1
            use_last_layer(model, not is_left_out)
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
    half = step_in_half(context, unit, stage=2)
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
        self.optimizer = PlainSGD(groups(self.model), lr=1.0, momentum=MOMENTUM)

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
