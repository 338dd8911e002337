"""Checks of task 1.13, `trainer.evaluate`: exact over all samples, and harmless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.uneven import (
    left_early,
    made,
    on_one_rank_only,
    run_or_name,
)
from distlab.grading.kit.values import expect_values, same_everywhere
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 7, 1)
CLASSES, WIDTH = 3, 40
EXACT = 1e-10
LARGE = 2.0**24  # in float32 LARGE + 1 is LARGE
NEAR = 1e-5  # counts are exact in any dtype; their quotient may be in float32
# Samples in each batch of each rank: as many batches everywhere; and as it comes.
EVEN = ((4, 1), (2, 3), (1, 6), (5, 5), (3, 1), (1, 1), (2, 7))
MIXED = ((3, 0, 1), (5,), (), (0,), (2, 2, 2, 2), (1,), (4, 0))
UNEVEN = "with uneven, empty or missing batches"
IN_TRAINING = "with the model in training mode"

Row = tuple[int, float, int, int]


@dataclass(frozen=True)
class BatchCounts:
    """Of every batch: its rank, mean loss, number of right answers, and size."""

    world_size: int
    rows: tuple[Row, ...]

    def metrics(self) -> tuple[float, float]:
        """Loss and accuracy over all samples."""
        size = sum(row[3] for row in self.rows) or float("nan")
        loss = sum(row[1] * row[3] for row in self.rows) / size
        return loss, sum(row[2] for row in self.rows) / size

    def of_rank(self, rank: int) -> list[Row]:
        """The batches of one rank."""
        return [row for row in self.rows if row[0] == rank]


class Scorer(nn.Module):
    """Scores that depend on the mode, as with dropout, but the same in every run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(WIDTH, CLASSES, generator=generator, dtype=torch.float64)
        self.weights = nn.Parameter(weights)
        self.inside = nn.Sequential(nn.Identity())
        self.seen: list[tuple[bool, bool]] = []  # training?, gradients on?

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (B, CLASSES) of `inputs` (B, WIDTH)."""
        self.seen.append((self.training, torch.is_grad_enabled()))
        scores: Tensor = self.inside(inputs @ self.weights)
        return -3.0 * scores if self.training else scores


class Costs(nn.Module):
    """In float32, and its scores are its inputs; see `first_score`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (B, CLASSES) of `inputs` (B, CLASSES)."""
        return inputs * self.scale


def first_score(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples that the batches of `Costs` choose."""
    return outputs[:, 0].mean()


@dataclass(frozen=True)
class _Once:
    """Batches that can be gone through once and have no length, as from a file."""

    batches: list[tuple[Tensor, Tensor]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.batches:
            yield self.batches.pop(0)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, as a function of nothing but these two."""
    return nn.functional.cross_entropy(outputs, targets)


def batches_of(
    seed: int, rank: int, sizes: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    """One rank's batches; ranks' data differ much, so that means differ too."""
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    batches = []
    for size in sizes:
        inputs = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, CLASSES, (size,), generator=generator)
        batches.append((inputs * (1.0 + rank), targets))
    return batches


def evaluate_once(
    context: RankContext, unit: ModuleType, seed: int, mixed: bool, training: bool
) -> dict[str, Any]:
    """One evaluation; what the model saw of it, and what is left behind."""
    device, rank = context.comm.device, context.rank
    model = Scorer(seed).to(device)
    model.train(training)
    model.weights.grad = torch.ones_like(model.weights)  # the caller's
    sizes = (MIXED if mixed else EVEN)[rank]
    batches = batches_of(seed, rank, sizes)
    once = _Once([(x.to(device), y.to(device)) for x, y in batches])
    result = unit.evaluate(context.comm, model, mean_loss, iter(once))
    return {
        "metrics": numbers_of(result),
        "seen": model.seen,
        "training": model.training,
        "inside": [module.training for module in model.inside.modules()],
        "gradients": torch.is_grad_enabled(),
    }


def evaluate_chosen(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """Two evaluations of a model in float32, with losses that are chosen."""
    device, rank = context.comm.device, context.rank
    spoiled = torch.nan if rank == context.world_size - 1 else 1.0
    found = []
    for losses in ((LARGE if rank == 0 else 1.0, 1.0), (1.0, spoiled)):
        rows = [torch.full((1, CLASSES), loss).to(device) for loss in losses]
        target = torch.zeros(1, dtype=torch.int64, device=device)
        once = _Once([(row, target) for row in rows])
        metrics = unit.evaluate(
            context.comm, Costs().to(device), first_score, iter(once)
        )
        found.append(numbers_of(metrics))
    return found


def _evaluations(world_size: int) -> list[RunSpec]:
    """At the first world size also those with chosen losses."""
    chosen = on_ranks(evaluate_chosen).when("with a float32 model")
    usual = on_ranks(evaluate_once, mixed=False, training=False)
    return [usual, *[chosen] * (world_size == WORLDS[0])]


@clause("trainer.evaluate", "C1", worlds=WORLDS, runs=_evaluations)
def over_all_samples(runs: Runs) -> str | None:
    """Batches and ranks of unequal size count by their samples, with any loss."""
    run = _evaluated(runs, mixed=False, training=False)
    expect_metrics(
        [value["metrics"] for value in run.values],
        counted(runs.seed, runs.world_size, mixed=False),
    )
    if runs.world_size == WORLDS[0]:
        _expect_chosen(runs.finished(evaluate_chosen))
    return None


def _expect_chosen(run: Run) -> None:
    """Sums in float64 though the model is in float32, and a nan that is not hidden."""
    n = run.world_size
    for number, (loss, what) in enumerate(
        (
            (
                (LARGE + 2 * n - 1) / (2 * n),
                f"with a float32 model and batch losses of {LARGE:.0f} and 1, the "
                "returned loss",
            ),
            (
                torch.nan,
                "when a batch on the last rank has the loss nan, the returned loss",
            ),
        )
    ):
        found = [value[number] or (torch.inf, 0.0) for value in run.values]
        expect_values(
            [torch.tensor(own[0], dtype=torch.float64) for own in found],
            same_everywhere(torch.tensor(loss, dtype=torch.float64), n),
            what=what,
        )


@clause(
    "trainer.evaluate",
    "C2",
    worlds=WORLDS,
    runs=[on_ranks(evaluate_once, mixed=True, training=False).when(UNEVEN)],
)
def whatever_comes(runs: Runs) -> str | None:
    """Ranks with more or fewer batches, with empty ones, and with none."""
    run = _evaluated(runs, mixed=True, training=False)
    with judged_after(over_all_samples, runs, "C1"):
        expect_metrics(
            [value["metrics"] for value in run.values],
            counted(runs.seed, runs.world_size, mixed=True),
            UNEVEN,
        )
    return None


@clause(
    "trainer.evaluate",
    "C3",
    worlds=WORLDS,
    runs=[
        on_ranks(evaluate_once, mixed=False, training=True).when(IN_TRAINING),
        on_ranks(evaluate_once, mixed=False, training=False),
    ],
)
def nothing_is_left(runs: Runs) -> str | None:
    """The mode is evaluation during the call, the former after it; no gradients."""
    for training in (True, False):
        run = _evaluated(runs, mixed=False, training=training)
        for rank, value in enumerate(run.values):
            _expect_harmless(rank, value, training)
    return None


def _expect_harmless(rank: int, value: dict[str, Any], training: bool) -> None:
    was = "training" if training else "evaluation"
    is_now = "training" if value["training"] else "evaluation"
    if not value["seen"]:
        raise NotJudgedError("the model was never called: see C1")
    if any(mode for mode, _ in value["seen"]):
        raise NotYetError(
            f"rank {rank} evaluated the model in training mode, expected evaluation "
            "mode",
            slug="wrong-mode",
            rule="dropout and BatchNorm behave differently then: model.eval() first",
        )
    if any(on for _, on in value["seen"]):
        raise NotYetError(
            f"rank {rank} ran the model with gradients enabled, expected them disabled "
            "during evaluation",
            slug="gradients-in-evaluation",
            rule="no gradient is needed here: torch.no_grad() around the loop",
        )
    if value["training"] != training:
        raise NotYetError(
            f"rank {rank}'s model was in {was} mode before evaluate and is in {is_now} "
            f"mode afterwards, expected {was} mode again",
            slug="wrong-mode",
            rule="store model.training first, and restore it at the end",
        )
    if value["inside"] != [training] * len(value["inside"]):
        raise NotYetError(
            f"after evaluate, rank {rank}'s model is in {was} mode again, but its "
            "submodules aren't, expected all of them to be",
            slug="wrong-mode",
            rule="model.train(…) reaches the modules inside; model.training = … only "
            "the model",
        )
    if not value["gradients"]:
        raise NotYetError(
            f"after evaluate, gradients are still disabled on rank {rank}, expected "
            "them enabled again for the next backward()",
            rule="with torch.no_grad(): switches them on again at its end",
        )


def _evaluated(runs: Runs, **how: bool) -> Run:
    sizes = MIXED if how["mixed"] else EVEN
    fewest = min(map(len, sizes[: runs.world_size]))
    fewer = [r for r in range(runs.world_size) if len(sizes[r]) == fewest]

    def name(run: Run) -> NotYetError | None:
        why = "has no batch" if fewest == 0 else "has fewer batches"
        early = left_early(run, fewer, why) if how["mixed"] else None
        return early or on_one_rank_only(run)

    try:
        return run_or_name(runs, evaluate_once, name, **how)
    except NotYetError as error:
        once = error.run
        if how["mixed"] and once and "ZeroDivisionError" in error.message:
            even = runs.ended(evaluate_once, **{**how, "mixed": False})
            if any(made(record) > 1 for record in even.ranks):  # one for each batch
                early = left_early(once, fewer, "has no batch", ended="raised")
                raise early or error from error
        raise


# ── the right numbers ───────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def counted(seed: int, world_size: int, *, mixed: bool) -> BatchCounts:
    """Loss and number of right answers of every batch of every rank."""
    model = Scorer(seed).eval()
    rows = []
    for rank, sizes in enumerate((MIXED if mixed else EVEN)[:world_size]):
        for inputs, targets in batches_of(seed, rank, sizes):
            with torch.no_grad():
                outputs = model(inputs)
            loss = float(mean_loss(outputs, targets)) if len(inputs) else 0.0
            right = int((outputs.argmax(1) == targets).sum())
            rows.append((rank, loss, right, len(inputs)))
    return BatchCounts(world_size, tuple(rows))


def expect_metrics(found: list[Any], right: BatchCounts, situation: str = "") -> None:
    """On every rank the loss and the accuracy are those of all samples together.

    Raises:
        NotYetError: they are not.
    """
    if None in found:
        raise NotYetError(
            f"evaluate returned no loss and accuracy on rank {found.index(None)}, "
            "expected both numbers on every rank",
            slug="returned-none",
            rule="return Metrics(loss=…, accuracy=…) on every rank",
            situation=situation,
        )
    pairs = torch.tensor(found, dtype=torch.float64)
    if pairs.isnan().any():
        failure = _not_a_number(pairs.isnan().any(1).tolist(), right)
        raise failure.but(situation=situation)
    n = right.world_size
    for column, what, tolerance in ((0, "loss", EXACT), (1, "accuracy", NEAR)):
        expected = torch.tensor(right.metrics()[column], dtype=torch.float64)
        try:
            expect_values(
                list(pairs[:, column]),
                same_everywhere(expected, n),
                what=f"the {what}",
                tolerance=tolerance,
            )
        except NotYetError as error:
            rule = "make the tensor that is summed with dtype=torch.float64"
            told = {"rule": rule} if error.slug == "wrong-dtype" else {}
            raise error.but(situation=situation, **told) from error


def _not_a_number(is_nan: list[bool], right: BatchCounts) -> NotYetError:
    """A rank without samples in some batch, or in none, may make nan; or it was put."""
    without = [
        not right.of_rank(r) or any(row[3] == 0 for row in right.of_rank(r))
        for r in range(right.world_size)
    ]
    ranks = [rank for rank, nan in enumerate(is_nan) if nan]
    if any(without) and (all(is_nan) or all(without[rank] for rank in ranks)):
        return NotYetError(
            "evaluate returned nan, expected numbers: the mean over no samples is nan, "
            "and so is 0 × nan",
            slug="mean-of-nothing",
            rule="skip a batch without samples",
        )
    on = "every rank" if all(is_nan) else f"rank {ranks[0]} but not on all ranks"
    return NotYetError(
        f"evaluate returned nan on {on}, expected numbers on every rank",
        rule="after all_reduce every rank has the sums: every rank divides and returns",
    )


def numbers_of(result: Any) -> tuple[float, float] | None:
    """Loss and accuracy as plain numbers, however they were returned."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        return None
    numbers = []
    for value in result:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            return None
        numbers.append(float(value))
    return numbers[0], numbers[1]
