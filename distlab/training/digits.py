"""The course's standard experiment: train on the digits on n ranks and in one process.

We run the same training twice: on ranks, with `distlab ddp` and the learner's or the
reference's `train_step`, and alone, in plain PyTorch. Then we compare weights. Accuracy
wouldn't show it if the ranks never communicate, or add where they should average. As
controls, you can run both of these mistakes as modes.

    shuffled order   0 1 2 3 4 5 6 7 8 …      one shuffle, the same on every rank
    rank 0 of 4      0       4       8 …      and so on: rank 1 has 1, 5, 9 …
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from distlab.curriculum import load_curriculum, naming_file, read_source
from distlab.curriculum.choose import Choice
from distlab.data.digits import load_digits_split
from distlab.digests import digest
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, Limits
from distlab.training.ddp import PRELOADS, Moment, Shard, train
from distlab.training.ddp_config import DdpConfig
from distlab.training.digits_rank import (
    Mode,
    accuracy_of,
    in_a_row,
    shuffled,
    train_plainly,
)
from distlab.training.proof import ACCURACY_FLOOR, Proof

__all__ = [
    "PRELOADS",
    "DigitsConfig",
    "DigitsResult",
    "Mode",
    "Moment",
    "Proof",
    "Shard",
    "compare",
    "train_alone",
    "train_on_ranks",
]

_GRAFTS = ("trainer.fit", "trainer.evaluate")  # learners may not have written them yet
_NUM_FIRST = 3  # how many places of a rank we name
_LIMITS = Limits(seconds=1800)  # many ranks on few cores take long, and are not stuck


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """The settings of a training; `code` is mine, reference or a path to a trainer.

    The mode "averaged" is correct data-parallel training, "alone" leaves out the
    averaging of gradients, and "summed" leaves out the division.
    """

    world_size: int = 4
    epochs: int = 20
    global_batch_size: int = 64
    learning_rate: float = 0.2
    seed: int = 0
    mode: Mode = "averaged"
    code: str = "reference"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"{self.epochs} epochs: choose at least 1")
        if self.world_size < 1 or self.global_batch_size % self.world_size:
            raise ValueError(
                f"a batch of {self.global_batch_size} samples cannot be shared equally "
                f"by {self.world_size} ranks"
            )

    def for_ddp(self) -> DdpConfig:
        """Return the same settings for `distlab ddp`; only whole batches are used."""
        return DdpConfig(
            dataset="digits",
            world_size=self.world_size,
            epochs=self.epochs,
            global_batch_size=self.global_batch_size,
            multiple_of=self.global_batch_size,
            learning_rate=self.learning_rate,
            lr_scaling="none",
            optimizer="sgd",
            momentum=0.0,
            weight_decay=0.0,
            seed=self.seed,
            device="cpu",
            code=(self.code,),
        )


@dataclass(frozen=True, kw_only=True)
class DigitsResult:
    """The result of a training; `weights` and `accuracies` have one entry per rank.

    `weights` are a rank's parameters in one vector. `communication` is the share of the
    training time that ranks spend in calls to others, and `step_bytes` is the number of
    bytes that one rank sends in a step. We count a library's all_reduce as a ring's.
    """

    config: DigitsConfig
    losses: tuple[float, ...]  # per epoch
    accuracies: tuple[float, ...]
    weights: tuple[Tensor, ...]
    epoch_s: float
    communication: float = 0.0
    step_bytes: float = 0.0
    shards: tuple[Shard, ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of steps in the whole training."""
        count = len(load_digits_split().train_targets)
        return self.config.epochs * (count // self.config.global_batch_size)

    @property
    def accuracy(self) -> float:
        """The accuracy of rank 0's model on the held-out digits."""
        return self.accuracies[0]

    @property
    def digests(self) -> tuple[str, ...]:
        """Each rank's weights as eight hex digits, which are equal if all bits are."""
        return tuple(digest(weights) for weights in self.weights)


def train_on_ranks(
    cluster: Cluster,
    config: DigitsConfig,
    *,
    on_shards: Callable[[list[Shard]], None] | None = None,
    on_moment: Callable[[Moment], None] | None = None,
) -> DigitsResult:
    """Train on `config.world_size` processes, and report progress to the callbacks.

    `on_shards` gets each rank's first places in the shuffled order, and `on_moment` the
    progress of rank 0.

    Raises:
        RunnerError: the ranks didn't finish; the message says why.
        SourceError: the trainer that `config.code` names can't be read.
    """

    def hear_moment(moment: Moment) -> None:
        if on_moment and moment.rank == 0:
            on_moment(moment)

    def hear_shards(shards: list[Shard], _: int) -> None:
        if on_shards:
            on_shards([*map(in_order, shards)])

    def in_order(shard: Shard) -> Shard:
        places = range(shard.rank, config.global_batch_size, config.world_size)
        return replace(shard, first=tuple(places[:_NUM_FIRST]))

    result = train(
        cluster,
        config.for_ddp(),
        None,
        _units(config.code),
        on_shards=hear_shards,
        on_moment=hear_moment,
        limits=_LIMITS,
        mode=config.mode,
    )
    return DigitsResult(
        config=config,
        losses=result.losses[0],
        accuracies=_accuracies(result.weights),
        weights=result.weights,
        epoch_s=result.epoch_s,
        communication=result.communication,
        step_bytes=result.step_bytes,
        shards=tuple(map(in_order, result.shards)),
    )


def train_alone(config: DigitsConfig) -> DigitsResult:
    """Run the same training in this process in plain PyTorch, without our trainer.

    It uses one thread, as each rank does, because a second one would only slow down so
    small a model.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(config)
    finally:
        torch.set_num_threads(num_threads)


def _train(config: DigitsConfig) -> DigitsResult:
    data, model = load_digits_split(), make_mlp(seed=config.seed)
    size, count = config.global_batch_size, len(data.train_targets)
    losses, epochs_s = [], []
    for epoch in range(config.epochs):
        started = time.perf_counter()
        order = shuffled(config.seed, epoch, count)[: count - count % size]
        found = train_plainly(model, config.learning_rate, data, order.split(size))
        losses.append(statistics.mean(found))
        epochs_s.append(time.perf_counter() - started)
    return DigitsResult(
        config=config,
        losses=tuple(losses),
        accuracies=(accuracy_of(model, data),),
        weights=(in_a_row(model),),
        epoch_s=statistics.median(epochs_s),
    )


def compare(
    on_ranks: DigitsResult,
    alone: DigitsResult,
    *,
    accuracy_floor: float = ACCURACY_FLOOR,
) -> Proof:
    """Compare the weights of every rank with those of one process."""
    (one,) = alone.weights
    return Proof(
        difference=max(float((held - one).abs().max()) for held in on_ranks.weights),
        digests=on_ranks.digests,
        accuracy=min(on_ranks.accuracies),
        accuracy_floor=accuracy_floor,
    )


def _accuracies(weights: tuple[Tensor, ...]) -> tuple[float, ...]:
    data, model, found = load_digits_split(), make_mlp(seed=0), []
    for each in weights:
        vector_to_parameters(each, model.parameters())
        found.append(accuracy_of(model, data))
    return tuple(found)


def _units(code: str) -> dict[str, Choice]:
    """Read the trainer's text once, so that every rank runs the same code."""
    curriculum = load_curriculum()
    with naming_file():
        own = read_source(curriculum, curriculum.units["trainer"], code)
        own.tree  # noqa: B018 - to see here, and not on each rank, whether it is Python
    trainer = read_source(curriculum, curriculum.units["trainer"], "reference")
    loader = read_source(curriculum, curriculum.units["data_loader"], "reference")
    return {
        "trainer": Choice(source=own, reference=trainer, grafts=_GRAFTS, parts=()),
        "data_loader": Choice(source=loader, reference=loader, grafts=(), parts=()),
    }
