"""What ranks do for the checks of ZeRO's stage 3: layers whose weights come and go."""

from __future__ import annotations

import itertools
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.checks.sharded_optimizer.half import (
    forward_in_half,
    step_of_stage3,
)
from distlab.grading.checks.sharded_optimizer.moments import Told, watched, watching
from distlab.grading.checks.sharded_optimizer.scenarios import weights_of
from distlab.grading.kit.live_bytes import LiveBytes, has_memory, unseen
from distlab.grading.kit.plain_sgd import PlainSGD
from distlab.runner import RankContext

WIDTHS = (13, 26, 17, 31, 11)
BIASED = (True, False, True, False)
"""Which layers have a bias, in another bucket: its settings differ."""
ROWS = 2
ROOM = 8 * 8 * ROWS * max(WIDTHS)  # bytes of activations, and their kin
LEFT = ROOM // 4  # after forward there is an output: less than the smallest layer
PARTS = {False: ([0], [1, 2]), True: ([0], [1])}
"""The batches of each step, without and with prefetch."""
VIEW, GONE, OTHER = "view", "gone", "other"  # how a shard is lost
PAUSE_S = 1.0  # of virtual time: how long a layer computes in one direction
LR, MOMENTUM = 0.05, 0.9
make_optimizer = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


class Paused(torch.autograd.Function):
    """Nothing, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, pause: Any, x: Tensor) -> Tensor:
        """x, later."""
        ctx.pause = pause
        pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradient, later."""
        ctx.pause()
        return None, gradient


class Layer(nn.Module):
    """Linear and tanh; `pause` is called while it computes, forward and backward."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
        self.pause: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, inputs) to (ROWS, outputs)."""
        out: Tensor = self.linear(x).tanh()
        return Paused.apply(self.pause, out) if self.pause else out  # type: ignore


def make_layers(seed: int) -> nn.Sequential:
    """A float64 model whose layers differ in size; some have no bias."""
    sizes = itertools.pairwise(WIDTHS)
    model = nn.Sequential(
        *(Layer(a, b, bias) for (a, b), bias in zip(sizes, BIASED, strict=True))
    )
    generator = torch.Generator().manual_seed(seed * 17 + 3)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(drawn * 0.3)
    # Rank 0's shard of this bias is zeros.
    model.get_parameter("2.linear.bias").data[: -(-WIDTHS[3] // 2)] = 0.0
    return model


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, with settings of their own."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}]


def make_inputs(seed: int, step: int, rank: int) -> Tensor:
    """(ROWS, 13), of a rank."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    return torch.randn(ROWS, WIDTHS[0], generator=generator, dtype=torch.float64)


def layer_elements(world_size: int) -> list[int]:
    """Of each layer, the elements of a shard of it."""
    return [
        -(-a * b // world_size) + bias * -(-b // world_size)
        for (a, b), bias in zip(itertools.pairwise(WIDTHS), BIASED, strict=True)
    ]


def shard_bytes(world_size: int) -> int:
    """What all shards of one rank have of the weights."""
    return 8 * sum(layer_elements(world_size))


def nudge(seed: int, name: str, shape: torch.Size) -> Tensor:
    """A change of the weights between two forwards."""
    place = sum(map(ord, name))
    generator = torch.Generator().manual_seed(seed * 13 + place)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1


def _nudge_shards(zero: Any, comm: Any, seed: int) -> None:
    for bucket in zero.buckets:
        vector = torch.zeros(bucket.flat.shape, dtype=torch.float64)
        shapes = [p.shape for p in bucket.parameters]
        parts = [
            nudge(seed, name, shape).reshape(-1)
            for name, shape in zip(bucket.names, shapes, strict=True)
        ]
        vector[: sum(map(len, parts))] = torch.cat(parts)
        with torch.no_grad():
            bucket.shard += vector.chunk(comm.world_size)[comm.rank]


def _look(inside: list[int], memory: LiveBytes, most: int, *_: Any) -> None:
    inside.append(memory.settled(most))


class Whole:
    """Watches how many bytes of the buckets' vectors have memory, and at most had."""

    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.peak = 0

    def look(self) -> None:
        """Called after every operation."""
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        """Bytes now."""
        return sum(b.flat.untyped_storage().nbytes() for b in self.buckets)


def lost_shards(zero: Any) -> list[tuple[str, str]]:
    """Shards without memory, or that the optimizer does not have: whose, and why."""
    groups = zero.optimizer.param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    lost = []
    for bucket in zero.buckets:
        if not has_memory(bucket.shard.data):
            is_view = _share_memory(bucket.shard.data, bucket.flat)
            lost.append((bucket.names[0], VIEW if is_view else GONE))
        elif id(bucket.shard) not in updated:
            lost.append((bucket.names[0], OTHER))
    return lost


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def recording(fully_sharded: Any, unsharded: list[list[int]]) -> Any:
    """A FullySharded that records which layer it unshards, and which follows that."""

    class Recording(fully_sharded):  # type: ignore[misc]
        def unshard_layer(self, number: int, following: int, *rest: Any) -> None:
            unsharded.append([number, following])
            super().unshard_layer(number, following, *rest)

    return Recording


def _sharded(unit: ModuleType, comm: Comm, model: nn.Module) -> Any:
    return unit.ShardedOptimizer(comm, model, make_groups(model), make_optimizer)


def only_forward(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Two forwards without gradients, as in evaluation; other weights in between."""
    comm, inside, told = context.comm, list[int](), Told()
    unsharded: list[list[int]] = []
    inputs = make_inputs(seed, 0, comm.rank)
    with LiveBytes() as memory, torch.no_grad():
        model = make_layers(seed).eval()
        watched_comm = watched(comm)
        zero = _sharded(unit, watched_comm, model)
        fully_sharded = watching(unit.FullySharded, memory, told, watched_comm)
        recording(fully_sharded, unsharded)(zero, unit.ShardedGradients(zero))
        if lost := lost_shards(zero):
            return {"lost": lost}
        shards = shard_bytes(comm.world_size) + ROOM
        for number, layer in enumerate(model):
            most = (
                shards + 8 * comm.world_size * layer_elements(comm.world_size)[number]
            )
            look = partial(_look, inside, memory, most)
            layer.linear.register_forward_hook(look)  # type: ignore[union-attr]
        cut, sent = memory.settled(shards), context.traffic.sent_bytes
        first = model(inputs).clone()
        sent = context.traffic.sent_bytes - sent
        after = memory.settled(shards - ROOM + LEFT)
        _nudge_shards(zero, comm, seed)
        second = model(inputs).clone()
    return {
        "outputs": [first, second],
        "cut": cut,
        "inside": inside[: len(WIDTHS) - 1],
        "after": after,
        "sent": sent,
        "ahead": unsharded[: len(WIDTHS) - 1],
        "half": forward_in_half(context, unit),
        "told": told,
    }


def train_stage3(
    context: RankContext, unit: ModuleType, seed: int, prefetch: bool = False
) -> dict[str, Any]:
    """The steps of PARTS; the weights after each are put together in the end.

    And then a forward without gradients, as in an evaluation.
    """
    comm, steps, whole = context.comm, [], Whole()
    unsharded, told = list[list[int]](), Told()
    batches = [make_inputs(seed, part, comm.rank) for part in range(3)]
    for batch in batches[::2]:
        batch.requires_grad_()  # so the first layer, too, needs its weights in backward
    with LiveBytes(whole.look) as memory:
        model = make_layers(seed)
        watched_comm = watched(comm)
        zero = _sharded(unit, watched_comm, model)
        fully_sharded = watching(unit.FullySharded, memory, told, watched_comm)
        stage3 = recording(fully_sharded, unsharded)(zero, unit.ShardedGradients(zero))
        if lost := lost_shards(zero):
            return {"lost": lost}
        stage3.is_prefetching = prefetch
        whole.buckets = zero.buckets
        for step, parts in enumerate(PARTS[prefetch]):
            sent = context.traffic.sent_bytes
            for part in parts:
                loss = model(batches[part]).square().sum(1).mean()
                unsharded.clear()
                loss.backward()
            held = memory.settled(
                shard_bytes(comm.world_size) * (2 + (step > 0)) + ROOM
            )
            zero.reduce_gradients()
            sent = (context.traffic.sent_bytes - sent) / len(parts)
            zero.step()
            zero.zero_grad()
            with unseen():
                shards = [bucket.shard.detach().clone() for bucket in zero.buckets]
            seen = {"held": held, "kept": whole.now}
            seen |= {"sent": sent, "ahead": list(unsharded)}
            steps.append({"shards": shards, **seen})
        with torch.no_grad():
            outputs = model(batches[0])
        half = None if prefetch else step_of_stage3(context, unit)
    names = [list(bucket.names) for bucket in zero.buckets]
    found = {"steps": steps, "names": names, "peak": whole.peak, "told": told}
    return {**found, "outputs": outputs, "half": half}


def timed(
    context: RankContext, unit: ModuleType, seed: int, prefetch: bool
) -> list[float]:
    """Seconds of virtual time of a forward and of a backward()."""
    model = make_layers(seed)
    zero = _sharded(unit, context.comm, model)
    stage3 = unit.FullySharded(zero, unit.ShardedGradients(zero))
    stage3.is_prefetching = prefetch
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.pause = partial(context.clock.sleep, PAUSE_S)
    started = context.comm.time()
    loss = model(make_inputs(seed, 0, context.rank)).square().sum()
    forward = context.comm.time()
    loss.backward()
    return [forward - started, context.comm.time() - forward]


def one_process(
    seed: int, n: int, prefetch: bool = False
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The weights after each step of one process with all samples.

    And then each rank's outputs of the first batch.
    """
    model = make_layers(seed)
    optimizer = PlainSGD(make_groups(model), lr=LR, momentum=MOMENTUM)
    found = []
    for parts in PARTS[prefetch]:
        for part in parts:
            inputs = torch.cat([make_inputs(seed, part, rank) for rank in range(n)])
            model(inputs).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights_of(model))
    with torch.no_grad():
        return found, [model(make_inputs(seed, 0, rank)) for rank in range(n)]
