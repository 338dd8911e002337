"""Names for a loss or an accuracy that is not that of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.grading.kit.values import Suspect, same_everywhere

Row = tuple[int, float, int, int]
MIXED_UP = "batches-not-samples"


@dataclass(frozen=True)
class BatchCounts:
    """Of every batch: its rank, mean loss, number of right answers, and size."""

    world_size: int
    rows: tuple[Row, ...]

    def metrics(self, rows: Sequence[Row] | None = None) -> tuple[float, float]:
        """Loss and accuracy over all samples of these batches, or of all there are."""
        rows = self.rows if rows is None else rows
        size = sum(row[3] for row in rows) or float("nan")
        loss = sum(row[1] * row[3] for row in rows) / size
        return loss, sum(row[2] for row in rows) / size

    def of_rank(self, rank: int) -> list[Row]:
        """The batches of one rank."""
        return [row for row in self.rows if row[0] == rank]


def wrong_losses(right: BatchCounts) -> list[Suspect]:
    """What known mistakes make of the loss."""
    total = sum(row[1] * row[3] for row in right.rows)
    samples = sum(row[3] for row in right.rows)
    of_batches = sum(row[1] for row in right.rows if row[3])
    return [
        *_common(right, 0, "loss"),
        _everywhere(right, "", right.metrics()[1], "the loss is the accuracy: swapped"),
        _everywhere(
            right,
            "",
            0.0,
            "the loss is 0: no batch was added up",
            "every batch of every rank counts; batches can be iterated over only once",
        ),
        _everywhere(
            right,
            MIXED_UP,
            of_batches / samples,
            "the loss is the sum of the batches' means / the number of samples: a "
            "batch's mean was not multiplied by its size",
            "loss_fn gives a mean: times len(inputs) it is the sum over the batch",
        ),
        *_by_batches(right, 0, "loss"),
        _everywhere(
            right, "", total, "the loss is the sum over all samples: never divided"
        ),
    ]


def wrong_accuracies(right: BatchCounts) -> list[Suspect]:
    """What known mistakes make of the accuracy."""
    count = sum(row[2] for row in right.rows)
    accuracy = right.metrics()[1]
    return [
        _everywhere(
            right,
            "",
            0.0,
            "the accuracy is 0: no right answer was counted",
            "every batch of every rank counts; batches can be iterated over only once",
        ),
        *_common(right, 1, "accuracy"),
        *_by_batches(right, 1, "accuracy"),
        _everywhere(
            right, "", 100 * accuracy, "the accuracy is in percent: expected 0 … 1"
        ),
        _everywhere(
            right, "", count, "the accuracy is a number of samples: never divided"
        ),
    ]


def _by_batches(right: BatchCounts, column: int, what: str) -> list[Suspect]:
    """The sum over all samples, divided by how many batches there are."""
    total = right.metrics()[column] * sum(row[3] for row in right.rows)
    return [
        _everywhere(
            right,
            MIXED_UP,
            total / count,
            f"the {what} is the sum over all samples / the number of batches: "
            "batches were counted, not samples",
            "a batch counts with its size: add len(inputs), not 1",
        )
        for count in {len(right.rows), sum(row[3] > 0 for row in right.rows)}
    ]


def _common(right: BatchCounts, column: int, what: str) -> list[Suspect]:
    n = right.world_size

    def value(rows: Sequence[Row]) -> float:
        return right.metrics(rows)[column]

    own = [value(right.of_rank(rank)) for rank in range(n)]
    known = [number for number in own if number == number]  # without samples: nan
    batches = [value([row]) for row in right.rows if row[3]]
    per_rank = [
        [value([row]) for row in right.of_rank(rank) if row[3]] for rank in range(n)
    ]
    own_means = [sum(values) / max(1, len(values)) for values in per_rank]
    means: list[tuple[float, str]] = [
        (sum(known) / n, "the ranks'"),
        (sum(known) / len(known), "the ranks'"),
        (sum(batches) / len(batches), "all batches'"),
        (sum(own_means) / n, "the ranks' means of their batches'"),
    ]
    found = [
        Suspect(
            slug="local-metrics",
            values=_tensors(own),
            sentence=f"every rank returned the {what} of this rank's samples only",
            rule="add up over the ranks, then divide",
        ),
        _everywhere(
            right,
            "local-metrics",
            own[0],
            f"every rank returned the {what} of rank 0's samples",
        ),
    ]
    found += [
        _everywhere(
            right,
            "mean-of-means",
            mean,
            f"the {what} is the plain mean of {whose}, as if all were equally large",
        )
        for mean, whose in means
    ]
    return [
        *found,
        _everywhere(
            right,
            "sum-not-mean",
            sum(known),
            f"the {what}s of the ranks were added up and never divided",
        ),
        _everywhere(
            right,
            "sum-not-mean",
            n * value(right.rows),
            f"the {what} is {n} × the expected {what}",
        ),
        _everywhere(
            right,
            "divided-twice",
            value(right.rows) / n,
            f"the {what} is 1/{n} of the expected {what}: divided by the samples "
            "of all ranks and by the number of ranks",
        ),
    ]


def _everywhere(
    right: BatchCounts, slug: str, value: float, sentence: str, rule: str = ""
) -> Suspect:
    return Suspect(
        slug=slug,
        values=same_everywhere(
            torch.tensor(value, dtype=torch.float64), right.world_size
        ),
        sentence=sentence,
        rule=rule,
    )


def _tensors(values: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]
