"""DistributedDataParallel beside torch's: the same models, batches and steps in both.

A case is a model with what is special about it. Each rank trains it twice, wrapped by
the unit and wrapped by torch, on gloo and in float64, with momentum and weight decay,
so that a gradient of zeros is not the same as none. The result is the largest
difference of losses, gradients, parameters and rank 0's buffers; inf if a gradient is
None in one of them only. A case of REFUSED must end with an error in both: then its
result is 0, else inf.

    python benchmarks/_beside_ddp.py [part of a name]
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import this file by name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.utils.checkpoint as torchs  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks._both_ways import leave, meet  # noqa: E402
from distlab.curriculum import load  # noqa: E402
from distlab.runner import Cluster, Limits, RankContext  # noqa: E402

UNIT = "distributed_data_parallel"
BUCKET_MIB = 0.0005  # several buckets, also for the smallest model
STEPS, BATCH, WIDTH = 4, 6, 8
TOLERANCE = 1e-12

Wrap = Callable[..., Any]


class Case(NamedTuple):
    """One line of the table: `largest(cluster)` is the largest difference to torch."""

    name: str
    num_ranks: int
    largest: Callable[[Cluster], float]


# ── models ──────────────────────────────────────────────────────────────────────────


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Plain(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(3))

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` (BATCH, WIDTH) through all layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """An embedding whose weight is also the head's, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.middle = _linear()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """The head's outputs for tokens drawn from `x`."""
        tokens = (10 * x[:, 0].abs()).long() % WIDTH
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Frozen(Plain):
    """The middle layer requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Normed(Plain):
    """Batch norm, whose buffers differ between ranks after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(WIDTH))


class Direct(Plain):
    """Parameters that belong to no layer: a vector, a scalar, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through all layers, and all parameters of this module."""
        x = super().forward(x * self.gain + self.shift, rank, step)
        return torch.cat([x, self.nothing])


class Convolved(nn.Module):
    """Convolutions; the case turns parameters and buffers to channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 2), nn.Conv2d(4, 3, 2)
        self.register_buffer("mask", torch.rand(2, 4, 3, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` as images of 2 channels and 4 times 4 pixels."""
        images = torch.tanh(x).repeat(1, 4).view(-1, 2, 4, 4)
        masked = self.first(images) * self.mask[:1]
        return self.second(torch.tanh(masked)).flatten(1)


class Transposed(Plain):
    """A weight whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH + 1, WIDTH) / WIDTH
        self.turned = nn.Parameter(weight.T)

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through all layers and the weight."""
        return super().forward(x, rank, step) @ self.turned


class Branching(Plain):
    """Each rank uses two of four layers, other ones in each step; never the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(4))

    def used(self, rank: int, step: int) -> tuple[int, int]:
        """The layers of this rank in this step."""
        return (0, 1) if (rank + step) % 2 else (1, 2)

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the layers used."""
        for number in self.used(rank, step):
            x = torch.tanh(self.layers[number](x))
        return x


@dataclass
class Output:
    """What some models return."""

    values: Tensor
    more: dict[str, list[Tensor]]


class InDataclass(Branching):
    """The same with its outputs in a dataclass."""

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """Two outputs, one of them further inside."""
        first, second = (self.layers[k](x) for k in self.used(rank, step))
        return Output(torch.tanh(first), {"all": [torch.tanh(second)]})


class Checkpointed(Plain):
    """Blocks that compute their activations again; the last block is one of them."""

    checkpoint: Callable[..., Tensor]

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the first layer, then through the others in checkpoints."""
        x = torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            x = type(self).checkpoint(nn.Sequential(layer, nn.Tanh()), x)
        return x


class ByTheCourse(Checkpointed):
    """With the checkpoint() of unit 2.5."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """The unit's."""
        unit = load("activation_checkpointing", "reference")
        return unit.checkpoint(block, x)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    """With torch's reentrant one."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """Torch's."""
        return torchs.checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


class NotReentrant(Checkpointed):
    """With torch's other one."""

    @staticmethod
    def checkpoint(block: Any, x: Tensor) -> Tensor:
        """Torch's."""
        return torchs.checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


class LossBeside(Branching):
    """A part of the loss is an attribute: find_unused cannot see it."""

    aside: Tensor

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """`x` through the layers used; the last layer's loss in `aside`."""
        self.aside = self.layers[3](x).square().mean()
        return super().forward(x, rank, step)


class SparseGradient(Plain):
    """An embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: Tensor, rank: int, step: int) -> Any:
        """The embeddings of tokens drawn from `x`, through all layers."""
        tokens = (10 * x[:, 0].abs()).long() % WIDTH
        return super().forward(self.embedding(tokens), rank, step)


# ── steps ───────────────────────────────────────────────────────────────────────────


def _inputs(rank: int, step: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def _loss(outputs: Any) -> Tensor:
    if isinstance(outputs, Output):
        return _loss(outputs.values) + sum(map(_loss, outputs.more["all"]))
    return (outputs - 0.3).square().mean()  # type: ignore[no-any-return]


Backward = Callable[[Any, int, int], Tensor]
"""(ddp, rank, step) → the loss, after its backward()."""


def once(ddp: Any, rank: int, step: int) -> Tensor:
    """One batch."""
    loss = _loss(ddp(_inputs(rank, step), rank, step))
    loss.backward()
    return loss


def accumulated(ddp: Any, rank: int, step: int) -> Tensor:
    """Three microbatches; two of them under no_sync()."""
    losses = []
    for number in range(3):
        with ddp.no_sync() if number < 2 else nullcontext():
            losses.append(_loss(ddp(_inputs(rank, step, number), rank, step)))
            losses[-1].backward()
    return torch.stack(losses).sum()


def two_forwards(ddp: Any, rank: int, step: int) -> Tensor:
    """Two batches, one backward()."""
    first = _loss(ddp(_inputs(rank, step), rank, step))
    loss = first + _loss(ddp(_inputs(rank, step, 1), rank, step + 1))
    loss.backward()
    return loss


def with_loss_beside(ddp: Any, rank: int, step: int) -> Tensor:
    """The outputs' loss, and another that is an attribute of the module."""
    loss = _loss(ddp(_inputs(rank, step), rank, step)) + ddp.module.aside
    loss.backward()
    return loss  # type: ignore[no-any-return]


def input_gradient_first(ddp: Any, rank: int, step: int) -> Tensor:
    """A gradient penalty: torch.autograd.grad() for the inputs, then backward()."""
    inputs = _inputs(rank, step).requires_grad_()
    loss = _loss(ddp(inputs, rank, step))
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    loss = loss + slope.square().mean()
    loss.backward()
    return loss


def after_an_error(ddp: Any, rank: int, step: int) -> Tensor:
    """In step 1 an error ends backward() in the middle, and is caught."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    if step == 1:
        inputs = _inputs(rank, step)
        layers = ddp.module.layers
        handle = layers[0].weight.register_hook(fail)
        try:
            _loss(ddp(inputs, rank, step)).backward()
        except ArithmeticError:
            handle.remove()
    return once(ddp, rank, step)


def trained(ddp: Any, rank: int, backward: Backward) -> Iterator[list[Tensor | None]]:
    """After each step its loss, gradients and parameters, and rank 0's buffers."""
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = backward(ddp, rank, step)
        optimizer.step()
        module = ddp.module
        gradients = [
            None if p.grad is None else p.grad.clone() for p in module.parameters()
        ]
        values = [*module.parameters(), *(module.buffers() if rank == 0 else ())]
        yield [loss.detach(), *gradients, *(v.detach().clone() for v in values)]


def difference(ours: list[Tensor | None], torchs: list[Tensor | None]) -> float:
    """The largest one; inf if a gradient is None on one side only."""
    largest = 0.0
    for own, other in zip(ours, torchs, strict=True):
        if own is None or other is None:
            largest = max(largest, 0.0 if own is other else math.inf)
        elif own.numel():
            gap = float((own - other).abs().max())
            largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest


@dataclass(frozen=True)
class Trained:
    """What each rank does: both train, step by step."""

    model: type[nn.Module]
    backward: Backward = once
    options: tuple[tuple[str, Any], ...] = ()
    copied: bool = False
    refused: bool = False

    def __call__(self, context: RankContext, folder: str) -> float:
        """The largest difference on this rank."""
        comm = meet(context, folder)
        torch.manual_seed(context.rank)  # rank 0's weights become every rank's
        model, options = self.model().double(), dict(self.options)
        unit = load(UNIT, "reference")
        # A group for each: an error may leave messages in it that never meet.
        own, other = comm.new_group(range(comm.world_size)), dist.new_group()
        made: list[Wrap] = [
            lambda m: unit.DistributedDataParallel(
                m, own, bucket_size_mib=BUCKET_MIB, **options
            ),
            lambda m: nn.parallel.DistributedDataParallel(
                m, bucket_cap_mb=BUCKET_MIB, process_group=other, **options
            ),
        ]
        both = [self.run(wrap, copy.deepcopy(model), context.rank) for wrap in made]
        leave()
        if self.refused:
            return 0.0 if both == [[], []] else math.inf
        if not all(both):
            return math.inf
        return max(difference(*pair) for pair in zip(*both, strict=True))

    def run(self, wrap: Wrap, model: nn.Module, rank: int) -> list[list[Tensor | None]]:
        """What `trained` yields; nothing after an error in a case of REFUSED."""
        try:
            ddp = wrap(model)
            if self.copied:
                ddp = copy.deepcopy(ddp)
            return list(trained(ddp, rank, self.backward))
        except (RuntimeError, TypeError, ValueError) as error:
            if not self.refused:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            return []


UNUSED = (("find_unused_parameters", True),)
OWN_BUFFERS = (("broadcast_buffers", False),)
EQUAL = {
    "plain": Trained(Plain),
    "tied weights": Trained(Tied),
    "frozen layer": Trained(Frozen),
    "batch norm": Trained(Normed),
    "batch norm, own buffers": Trained(Normed, options=OWN_BUFFERS),
    "parameters on the model": Trained(Direct),
    "channels_last": Trained(Convolved),
    "transposed weight": Trained(Transposed),
    "branching": Trained(Branching, options=UNUSED),
    "branching, accumulated": Trained(Branching, accumulated, UNUSED),
    "dataclass output": Trained(InDataclass, options=UNUSED),
    "checkpoint of 2.5": Trained(ByTheCourse),
    "reentrant checkpoint": Trained(Reentrant),
    "other checkpoint": Trained(NotReentrant),
    "no_sync": Trained(Normed, accumulated),
    "two forwards": Trained(Plain, two_forwards),
    "gradient penalty": Trained(Plain, input_gradient_first),
    "deepcopy": Trained(Tied, copied=True),
}
REFUSED = {
    "two forwards, branching": Trained(Branching, two_forwards, UNUSED, refused=True),
    "loss beside the output": Trained(
        LossBeside, with_loss_beside, UNUSED, refused=True
    ),
    "after a failed backward": Trained(Plain, after_an_error, refused=True),
}


def play(context: RankContext, folder: str, name: str) -> float:
    """The largest difference in this case, on this rank."""
    return {**EQUAL, **REFUSED}[name](context, folder)


def largest(cluster: Cluster, name: str, num_ranks: int) -> float:
    """The largest difference on all ranks; inf if they come to no end."""
    with tempfile.TemporaryDirectory() as folder:
        run = cluster.run(
            play, num_ranks, folder, name, limits=Limits(seconds=60.0), journal=False
        )
    return max(run.values) if run.outcome == "finished" else math.inf


def cases() -> list[Case]:
    """All of them, on 2 and on 3 ranks."""
    return [
        Case(name, n, partial(largest, name=name, num_ranks=n))
        for name in (*EQUAL, *REFUSED)
        for n in (2, 3)
    ]


def main(part: str = "") -> int:
    """Print the table; 1 if a difference is larger than rounding."""
    worst = 0.0
    with Cluster(preload=("torch._dynamo", "benchmarks._beside_ddp")) as cluster:
        for case in cases():
            if part in case.name:
                gap = case.largest(cluster)
                worst = max(worst, gap)
                print(f"{case.name:<26} {case.num_ranks} ranks   {gap:.1e}", flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    from benchmarks import _beside_ddp  # the ranks import it by this name

    sys.exit(_beside_ddp.main(*sys.argv[1:]))
