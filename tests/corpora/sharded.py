"""One model, sharded by our ZeRO and by torch, and the bytes that each of them holds.

Ours and torch's get their numbers through one gloo group. `Ours` and its peers have one
form: `step(tokens)` is a whole step and gives the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.curriculum import load
from distlab.grading.kit.live_bytes import LiveBytes
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import RankContext
from tests.corpora.both_ways import CONFIG, SMALL, leave, meet

UNIT = "sharded_optimizer"
make_optimizer = partial(torch.optim.AdamW, lr=1e-2)


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; biases, norms and the like do not."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]


def tokens_of(config: TransformerConfig, step: int, batch: int, seed: int) -> Tensor:
    """A batch (batch, context) of a step."""
    generator = torch.Generator().manual_seed(1000 * step + seed)
    shape = batch, config.context
    return torch.randint(0, config.vocab_size, shape, generator=generator)


# ── four ways to take a step ────────────────────────────────────────────────────────


class Ours:
    """The unit's stage 1, 2 or 3; 3 with prefetch."""

    def __init__(self, comm: Comm, model: nn.Module, side: str, stage: int) -> None:
        unit = load(UNIT, side)
        self.model = model
        groups = make_groups(model)
        zero = unit.ShardedOptimizer(comm, model, groups, make_optimizer)
        self.zero = unit.at_stage(stage, zero)
        if stage == 3:
            self.zero.weights.is_prefetching = True
        self.bytes_per_rank = unit.bytes_per_rank

    def backward(self, tokens: Tensor) -> Tensor:
        """Forward and backward; the loss."""
        loss = next_token_loss(self.model(tokens), tokens)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        """The rest of a step."""
        self.zero.reduce_gradients()
        self.zero.step()
        self.zero.zero_grad()

    def step(self, tokens: Tensor) -> float:
        """A whole step."""
        loss = self.backward(tokens)
        self.finish()
        return float(loss)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is kept of each kind, between backward() and step()."""
        buckets = self.zero.buckets
        own = [bucket.shard.detach() for bucket in buckets]
        weights = [*own, *(bucket.flat for bucket in buckets)]
        found = [p.grad for b in buckets for p in (b.shard, *b.parameters)]
        gradients = [gradient for gradient in found if gradient is not None]
        return {
            "weights": weights,
            "gradients": gradients,
            "state": state_of(self.zero.optimizer),
        }


class Unsharded:
    """AdamW on all parameters; the gradient is that of the whole batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, make_optimizer(make_groups(model))

    def step(self, tokens: Tensor) -> float:
        """A whole step."""
        self.optimizer.zero_grad()
        loss = next_token_loss(self.model(tokens), tokens)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is kept of each kind."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return {
            "weights": [_local(p.detach()) for p in parameters],
            "gradients": [_local(gradient) for gradient in gradients],
            "state": state_of(self.optimizer),
        }


class Zro(Unsharded):
    """Torch's DistributedDataParallel and ZeroRedundancyOptimizer."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = ZeroRedundancyOptimizer(  # type: ignore[assignment]
            make_groups(model), optimizer_class=torch.optim.AdamW, lr=1e-2
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is kept of each kind; the state is that of the optimizer inside."""
        inner: Any = self.optimizer
        return {**super().tensors(), "state": state_of(inner.optim)}


class Fsdp2(Unsharded):
    """Torch's fully_shard, of each layer and then of the rest."""

    def __init__(self, model: nn.Module, *, is_stage_2: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=not is_stage_2)
        super().__init__(model)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that an optimizer keeps."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [_local(value) for value in kept if isinstance(value, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = to_local() if to_local else tensor
    return local


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory behind them, each piece of it once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


# ── programs ────────────────────────────────────────────────────────────────────────


def held(
    context: RankContext, folder: str, side: str, stage: int, is_small: bool = False
) -> dict[str, Any]:
    """Bytes held between backward() and step(), when there is state; and the formula.

    float32 and AdamW; `alive` are all tensors, whoever holds them.
    """
    comm = meet(context, folder)
    config = SMALL if is_small else CONFIG
    batches = [tokens_of(config, step, 1, context.rank) for step in range(2)]
    with LiveBytes() as memory:
        ours = Ours(comm, make_transformer(config).float(), side, stage)
        ours.step(batches[0])
        ours.backward(batches[1])
        size = sum(sum(bucket.sizes) for bucket in ours.zero.buckets)
        right = ours.bytes_per_rank(size, context.world_size, stage)
        found = {kind: num_bytes(own) for kind, own in ours.tensors().items()}
        alive = memory.settled(round(right * 1.005))
        ours.finish()
    kinds = ((4, 0, 0), (0, 4, 0), (0, 0, 8))
    parts = [ours.bytes_per_rank(size, context.world_size, stage, k) for k in kinds]
    formula = dict(zip(("weights", "gradients", "state"), parts, strict=True))
    leave()
    return {"held": {**found, "alive": alive}, "formula": {**formula, "alive": right}}


def peers_held(
    context: RankContext, folder: str, is_small: bool = False
) -> dict[str, Any]:
    """What torch's two hold of the same model, after a backward()."""
    meet(context, folder)
    config = SMALL if is_small else CONFIG
    found = {}
    makers: dict[str, Callable[[nn.Module], Unsharded]] = {
        "ZeroRedundancyOptimizer": Zro,
        "FSDP2": Fsdp2,
    }
    for name, maker in makers.items():
        peer = maker(make_transformer(config).float())
        peer.step(tokens_of(config, 0, 1, context.rank))
        found[name] = {kind: num_bytes(own) for kind, own in peer.tensors().items()}
    leave()
    return found
