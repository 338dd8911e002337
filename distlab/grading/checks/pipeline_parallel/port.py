"""Checks of task 2.26, `pipeline_parallel.port`: a batch through torch's pipelining.

Microbatches in flight are counted from the order of a stage's forwards and backwards:
torch keeps the outputs of the last stage to the end of a step, and those do not count.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.given.pipeline_parallel import LossFn
from distlab.grading.checks.pipeline_parallel.losses import wrong_losses
from distlab.grading.checks.pipeline_parallel.unusual import unusual_stages
from distlab.grading.clause import clause
from distlab.grading.kit.flat import gradients_of
from distlab.grading.kit.returned import expect_loss
from distlab.grading.kit.stages import NOT_YOURS, ROUNDED, make_batch
from distlab.grading.kit.torch_group import WORLDS, finished, join
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.kit.zoo import loss_of
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

PER_MICROBATCH = 2  # samples
WITH_NAN = 3  # ranks


def num_microbatches(n: int) -> int:
    """How many of them n ranks get; of several ranks no multiple."""
    return 2 * n + 2 * (n > 2)


class Order:
    """Forwards and backwards in the order in which they came."""

    def __init__(self) -> None:
        self._events: list[tuple[str, int]] = []
        self._count = 0

    def forward(self, part: object) -> int:
        """A graph has begun, which lives as long as `part`; its number."""
        number, self._count = self._count, self._count + 1
        self._events.append(("F", number))
        weakref.finalize(part, self._gone, number)
        return number

    def backward(self, number: int) -> None:
        """Its backward has come."""
        self._events.append(("B", number))

    def _gone(self, number: int) -> None:
        # Before the first microbatch torch runs a stage once, only to see what comes
        # out, and drops that.
        if ("B", number) not in self._events:
            self._events.remove(("F", number))

    def __str__(self) -> str:
        return "".join(kind for kind, _ in self._events)


class _Part:
    """Lives as long as the graph of one forward."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.part, ctx.order = _Part(), order
        ctx.number = order.forward(ctx.part)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.order.backward(ctx.number)
        return gradient, None


class NotedStage(nn.Module):
    """A stage that notes when it goes forward and backward."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.order = stage, Order()

    def forward(self, x: Tensor) -> Tensor:
        """What the stage makes of it."""
        made: Tensor = _Watched.apply(self.stage(x), self.order)  # type: ignore[no-untyped-call]
        return made


def nan_for(first: Tensor) -> LossFn:
    """A loss in float32; of the microbatch with these targets it is nan."""

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(output, targets).float()
        return loss * torch.nan if torch.equal(targets, first) else loss

    return loss_fn


def ported_pipeline(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, Any]:
    """One batch, and on three ranks another one, in which a loss is nan."""
    join(context)
    found = _batch(context, unit, seed)
    if context.world_size == WITH_NAN:
        found["nan"] = _batch(context, unit, seed + 1, with_nan=True)
    leave_default_group()
    return found


def _batch(
    context: RankContext, unit: ModuleType, seed: int, with_nan: bool = False
) -> dict[str, Any]:
    """Only the first rank has inputs, only the last one has targets."""
    n, rank = context.world_size, context.rank
    stage = unusual_stages(seed, n, turned=False)[rank]
    watched = NotedStage(stage)
    m = num_microbatches(n)
    inputs, targets = make_batch(seed, 0, PER_MICROBATCH * m)
    loss = unit.with_torch(
        watched,
        nan_for(targets[:PER_MICROBATCH]) if with_nan else loss_of,
        torch.full_like(inputs, NOT_YOURS) if rank else inputs,
        targets if rank == n - 1 else torch.zeros_like(targets),
        m,
    )
    is_number = isinstance(loss, int | float) or (
        isinstance(loss, Tensor) and loss.numel() == 1
    )
    return {
        "gradients": gradients_of(stage),
        "loss": float(loss) if is_number else None,
        "events": str(watched.order),
    }


@lru_cache(maxsize=16)
def one_process(seed: int, n: int) -> tuple[list[Tensor], Tensor]:
    """Each stage's gradients, and the loss."""
    stages = unusual_stages(seed, n, turned=False)
    inputs, targets = make_batch(seed, 0, PER_MICROBATCH * num_microbatches(n))
    loss = loss_of(nn.Sequential(*stages)(inputs), targets)
    loss.backward()
    return [gradients_of(stage) for stage in stages], loss.detach()


@clause("pipeline_parallel.port", "C1", worlds=WORLDS, runs=[on_ranks(ported_pipeline)])
def gradients_of_one_process(runs: Runs) -> str | None:
    """The .grad of every stage."""
    run, n = finished(runs, ported_pipeline), runs.world_size
    right, m = one_process(runs.seed, n)[0], num_microbatches(n)
    known = [
        (
            "microbatches-summed",
            float(m),
            f"the gradients are the sum of the {m} microbatches' mean gradients, "
            "expected their mean",
            "scale_grads=True, which is what a schedule does unless told otherwise",
        ),
        (
            "",
            1 / m,
            f"the gradients are 1/{m} of the expected ones, as if divided twice by the "
            f"{m} microbatches",
            "a schedule divides by the microbatches; the loss is a plain mean",
        ),
        (
            "",
            0.0,
            "after the batch no stage has a gradient, expected a backward pass for "
            "each microbatch",
            "a schedule with a loss_fn, and step with the target on the last rank",
        ),
    ]
    expect_values(
        [value["gradients"] for value in run.values],
        right,
        what="the .grad of the stage",
        suspects=[
            Suspect(
                slug=slug,
                values=[factor * gradient for gradient in right],
                sentence=sentence,
                rule=rule,
            )
            for slug, factor, sentence, rule in known
        ],
        tolerance=ROUNDED,
    )
    return f"n = {n}: gradients of a single process, {m} microbatches"


@clause("pipeline_parallel.port", "C2", worlds=WORLDS, runs=[on_ranks(ported_pipeline)])
def loss_everywhere(runs: Runs) -> str | None:
    """What each rank returned."""
    run = finished(runs, ported_pipeline)
    n = runs.world_size
    loss, m = one_process(runs.seed, n)[1], num_microbatches(n)
    expect_loss(
        [value["loss"] for value in run.values],
        loss,
        f"the returned loss of {m} microbatches",
        lambda: wrong_losses(_losses(runs.seed, n)),
    )
    if runs.world_size == WITH_NAN:
        expect_values(
            [torch.tensor(_number(value["nan"]["loss"])) for value in run.values],
            same_everywhere(torch.tensor(torch.nan), WITH_NAN),
            what="when the first microbatch's loss is nan, the returned loss",
        )
    return None


def _losses(seed: int, n: int) -> list[Tensor]:
    """Of each microbatch."""
    model = nn.Sequential(*unusual_stages(seed, n, turned=False))
    inputs, targets = make_batch(seed, 0, PER_MICROBATCH * num_microbatches(n))
    parts = zip(
        inputs.split(PER_MICROBATCH), targets.split(PER_MICROBATCH), strict=True
    )
    with torch.no_grad():
        return [loss_of(model(part), wanted) for part, wanted in parts]


def _number(loss: float | None) -> float:
    return torch.inf if loss is None else loss


@clause(
    "pipeline_parallel.port", "C3", worlds=(3, 2, 4), runs=[on_ranks(ported_pipeline)]
)
def few_in_flight(runs: Runs) -> str | None:
    """The order of forwards and backwards on each rank."""
    run, n = finished(runs, ported_pipeline), runs.world_size
    m = num_microbatches(n)
    orders = [value["events"] for value in run.values]
    peaks = [_peak(order) for order in orders]
    if any(peak > n - rank for rank, peak in enumerate(peaks)):
        over = next(rank for rank, peak in enumerate(peaks) if peak > n - rank)
        raise NotYetError(
            f"with {m} microbatches, rank {over} has up to {peaks[over]} in flight, "
            f"expected at most {n - over}, as in 1F1B",
            slug="gpipe-in-disguise" if peaks == [m] * n else "",
            evidence=[
                (
                    rank,
                    "wrong" if peak > n - rank else "right",
                    f"{order[:24]}   {peak} at most, {n - rank} are enough",
                )
                for rank, (order, peak) in enumerate(zip(orders, peaks, strict=True))
            ],
            rule="Schedule1F1B: one forward, one backward",
        )
    return f"n = {n}: at most {', '.join(map(str, peaks))} in flight"


def _peak(events: str) -> int:
    alive = peak = 0
    for event in events:
        alive += 1 if event == "F" else -1
        peak = max(peak, alive)
    return peak
