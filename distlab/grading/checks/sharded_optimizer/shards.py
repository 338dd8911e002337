"""What ranks do for 3.14 and 3.15: shards with drawn gradients, clipped and saved."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.grading.checks.sharded_optimizer.scenarios import (
    STEPS,
    make_groups,
    make_model,
    make_optimizer,
    weights_of,
)
from distlab.runner import RankContext

MAX_NORMS = (
    0.05,
    1e6,
    1.0,
    1.0,
    0.9,
    1.0,
    1.0,
)  # the first shortens, the second does not
ZERO, INFINITE = 2, 3  # where the gradient is zero, where it has an infinite element
LEVEL, LONE = 4, 5  # norm 1, but less on each of two ranks; zero except on rank 0
ORDER = 6  # the order in which the ranks' squares are added decides the last bit
STALE = 1e8
PLAIN: dict[str, Any] = {"count": 7, "is_warm": True, "rule": None, "kind": "cosine"}
"""Entries of an optimizer that are no tensors."""
REFUSALS = (KeyError, ValueError, RuntimeError, IndexError, TypeError)


class Alone:
    """A rank without other ranks: it has a number, and cannot send."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, local_rank: int
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.local_rank = local_rank


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
    if number == LEVEL:
        size = sum(value.numel() for value in gradient.values())
        return {n: torch.full_like(v, size**-0.5) for n, v in gradient.items()}
    if number == LONE:
        gradient = {name: torch.zeros_like(value) for name, value in gradient.items()}
        next(iter(gradient.values())).view(-1)[0] = 0.5
    if number == ORDER:
        # Rank 0's squares are 1.5², and those of any other rank less than half of its
        # last bit: added one by one they are lost, and together they aren't.
        size = sum(value.numel() for value in gradient.values())
        tiny = (3 * 0.45 * 2**-51 / size) ** 0.5
        gradient = {n: torch.full_like(v, tiny) for n, v in gradient.items()}
        next(iter(gradient.values())).view(-1)[0] = 1.5
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
    saved = zero.state_by_name()
    resumed = _resumed(unit, comm, model, seed, zero.state_dict())
    return {"saved": saved, "resumed": resumed, "plain": _saved_plain(zero)}


def _saved_plain(zero: Any) -> dict[str, Any]:
    """What is saved of entries that are no tensors, by parameter; or the error."""
    for bucket in zero.buckets:
        zero.optimizer.state[bucket.shard].update(PLAIN)
    try:
        saved = zero.state_by_name()
    except (AttributeError, *REFUSALS) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(saved, dict):  # which is judged without these entries
        return {}
    return {
        name: {key: entry.get(key, "nothing") for key in PLAIN}
        for name, entry in saved.items()
    }


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
        alone = Alone(rank, n, comm.device, comm.local_rank)
        zero = unit.ShardedOptimizer(alone, copy, make_groups(copy), make_optimizer)
        try:
            zero.load_state_dict(states)
        except REFUSALS as error:
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
