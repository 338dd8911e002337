"""Train on the digits with `distlab.distributed`, and compare with one plain process.

The ranks run the example script of `distlab.distributed`. The baseline trains on the
same global batches, in the order that the ranks' sampler has drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distlab.curriculum import find_root
from distlab.curriculum.choose import Part
from distlab.data.digits import load_digits_split
from distlab.digests import digest
from distlab.distributed import parts
from distlab.distributed.example import LEARNING_RATE
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, Limits
from distlab.training.digits_rank import in_a_row, train_plainly
from distlab.training.library_rank import train_as_rank
from distlab.training.proof import Proof

PRELOADS = ("torch._dynamo", "distlab.training.library_rank")
NAMES = (
    "init_process_group",
    "DistributedDataParallel",
    "DistributedSampler",
    "all_reduce",
)
"""The public names that the training uses."""
_LIMITS = Limits(seconds=1800)


@dataclass(frozen=True, kw_only=True)
class LibraryResult:
    """The result of the ranks; `weights` and `batches` have one entry for each rank."""

    losses: tuple[float, ...]  # per epoch
    accuracy: float  # the lowest of all ranks
    weights: tuple[Tensor, ...]
    batches: tuple[list[list[list[int]]], ...]  # of an epoch, of a step: the samples


def needed_parts(code: str) -> list[Part]:
    """Return whose code each task of the training runs; `code` is mine or reference.

    Raises:
        ValueError: `code` is anything else.
    """
    if code == "reference":
        return []
    if code != "mine":
        raise ValueError(
            f"the demo of phase 3 runs several units: --code is mine or reference, "
            f"not {code}"
        )
    parts.forget("mine")
    return parts.tasks(*NAMES)


def train_on_ranks(
    cluster: Cluster,
    world_size: int,
    num_epochs: int,
    code: str,
    on_epoch: Callable[[int, float], None],
) -> LibraryResult:
    """Train on `world_size` processes; `on_epoch` gets each epoch's mean loss.

    Raises:
        RunnerError: the ranks didn't finish; the message says why.
    """

    def on_report(_: int, report: dict[str, Any]) -> None:
        on_epoch(report["epoch"], report["loss"])

    cluster.warm(*PRELOADS)
    values = (
        cluster.run(
            train_as_rank,
            world_size,
            num_epochs,
            code,
            str(find_root()),
            limits=_LIMITS,
            on_report=on_report,
        )
        .require_finished()
        .values
    )
    return LibraryResult(
        losses=tuple(values[0]["losses"]),
        accuracy=min(value["accuracy"] for value in values),
        weights=tuple(value["weights"] for value in values),
        batches=tuple(value["batches"] for value in values),
    )


def train_alone(result: LibraryResult) -> Tensor:
    """Return the weights of one plain PyTorch process after the same global batches."""
    model = make_mlp(seed=0)
    batches = (
        [sample for shard in shards for sample in shard]
        for epoch_of_ranks in zip(*result.batches, strict=True)
        for shards in zip(*epoch_of_ranks, strict=True)
    )
    train_plainly(model, LEARNING_RATE, load_digits_split(), batches)
    return in_a_row(model)


def compare(result: LibraryResult, alone: Tensor, accuracy_floor: float) -> Proof:
    """Compare the weights of every rank with those of one process."""
    return Proof(
        difference=max(float((held - alone).abs().max()) for held in result.weights),
        digests=tuple(digest(weights) for weights in result.weights),
        accuracy=result.accuracy,
        accuracy_floor=accuracy_floor,
    )
