"""Checks of task 1.7, `trainer.train_step`: weights of one process, loss of the batch.

Both against a simulation of all ranks in this process; see train_step_mistakes.py for
how a wrong result gets its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.digests import digest
from distlab.grading.checks.trainer.train_step_mistakes import (
    own_gradient,
    suspects_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.baseline import (
    LEARNING_RATE,
    STEPS,
    bent,
    make_batch,
    make_model,
    right_training,
    train,
)
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.returned import expect_float, number_of
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.kit.zoo import Zoo
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

# Four first: with three a hard-coded 2 could as well be n - 1.
WORLDS = (4, 3, 2, 7, 1)
BEND_WORLD = 3  # where a second optimiser is tried as well
WITH_BEND = "with an Adam-like optimizer and a tied and a 0-dimensional parameter"


class NotedSGD(torch.optim.SGD):
    """Plain SGD that notes when it is called; or SGD with a bend, see `bent`."""

    def __init__(
        self, model: nn.Module, note: Callable[[str], None], with_bend: bool
    ) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        self._note, self._with_bend = note, with_bend

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        self._note("zero_grad")
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        self._note("step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    change = bent(gradient) if self._with_bend else gradient
                    parameter -= group["lr"] * change
        return loss


def train_steps(
    context: RankContext, unit: ModuleType, seed: int, with_bend: bool = False
) -> dict[str, Any]:
    """Some steps from equal weights, each rank on its own share of each batch.

    With `with_bend` the model and the optimizer are unlike the usual ones, and the last
    rank has a sample of infinite loss in the last step.
    """
    events: list[tuple[str, float]] = []

    def note(what: str) -> None:
        events.append((what, time.monotonic()))

    model = (Zoo if with_bend else make_model)(seed).to(context.comm.device)
    model.zero_grad = lambda set_to_none=True: optimizer.zero_grad(set_to_none)  # type: ignore[method-assign]
    first = next(model.parameters())  # its gradient is the last one to be ready
    first.register_post_accumulate_grad_hook(lambda _: note("backward"))
    optimizer = NotedSGD(model, note, with_bend)
    losses = []
    for step in range(STEPS):
        inputs, targets = make_batch(seed, step, context.rank)
        is_last = step == STEPS - 1 and context.rank == context.world_size - 1
        loss = unit.train_step(
            context.comm,
            model,
            optimizer,
            _costly if with_bend and is_last else nn.functional.cross_entropy,
            inputs.to(context.comm.device),
            targets.to(context.comm.device),
        )
        losses.append(number_of(loss))
        note("returned")
    return {
        "weights": weights_of(model),
        "losses": losses,
        "events": events,
        "training": model.training,
    }


def _costly(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, and one sample more costs infinitely much, whatever its scores."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    costs = torch.zeros_like(losses)
    costs[0] = torch.inf
    return (losses + costs).mean()


def _bent(world_size: int) -> list[RunSpec]:
    bent = on_ranks(train_steps, with_bend=True).when(WITH_BEND)
    return [on_ranks(train_steps), *[bent] * (world_size == BEND_WORLD)]


@clause("trainer.train_step", "C1", worlds=WORLDS, runs=_bent)
def weights_of_one_process(runs: Runs) -> str | None:
    """After some steps the weights are one process's, on every rank."""
    run = runs.finished(train_steps)
    n, seed = runs.world_size, runs.seed
    weights = [value["weights"] for value in run.values]
    expected = right_training(seed, n).weights
    if not all_close(weights, expected):
        expect_values(
            weights,
            expected,
            what=f"the weights after {STEPS} steps",
            verb="are",
            suspects=suspects_of(run, seed, n),
        )
    expect_equal_bits(
        weights,
        what=f"the weights after {STEPS} steps",
        verb="are",
        rule="every rank must apply the very same averaged gradient",
    )
    expect_messages(run, "the weights are right, but not through comm")
    if not all(value["training"] for value in run.values):
        raise NotYetError(
            "train_step left the model in evaluation mode, expected it still in "
            "training mode",
            rule="a step of training: leave model.train() and model.eval() alone",
        )
    if n == BEND_WORLD:
        _expect_with_bend(runs)
    worst = max(float((w - expected[0]).abs().max()) for w in weights)
    marks = sorted({digest(w) for w in weights})
    return (
        f"n = {n}: weights {worst:.0e} from the single-process baseline, digest "
        f"{marks[0]} on every rank"
    )


def _expect_with_bend(runs: Runs) -> None:
    run = runs.finished(train_steps, with_bend=True)
    n, seed = runs.world_size, runs.seed
    expect_values(
        [value["weights"] for value in run.values],
        right_training(seed, n, with_bend=True, make=Zoo).weights,
        what=f"{WITH_BEND}, the weights",
        verb="are",
        suspects=[
            Suspect(
                slug="weights-not-gradients",
                values=train(
                    seed,
                    n,
                    own_gradient,
                    with_bend=True,
                    average_weights=True,
                    make=Zoo,
                ).weights,
                sentence="with an Adam-like optimizer, the ranks' weights were "
                "averaged after the step, expected averaged gradients before it",
                rule="average the gradients between backward() and step()",
            )
        ],
    )


@clause("trainer.train_step", "C2", worlds=WORLDS, runs=_bent)
def loss_of_the_whole_batch(runs: Runs) -> str | None:
    """The returned float is the mean loss over all ranks."""
    run = runs.finished(train_steps)
    n = runs.world_size
    losses = [value["losses"] for value in run.values]
    for rank, own in enumerate(losses):
        expect_float(own, f"train_step returned {{}} on rank {rank}")
    right = right_training(runs.seed, n)
    # Once the weights have gone astray (C1) only the first loss can be compared.
    weights = [value["weights"] for value in run.values]
    steps = STEPS if all_close(weights, right.weights) else 1
    local = right.losses[:steps]
    expected = local.mean(1)
    expect_values(
        [torch.tensor(rank[:steps], dtype=torch.float64) for rank in losses],
        same_everywhere(expected, n),
        what="the returned loss",
        suspects=[
            Suspect(
                slug="local-loss-returned",
                values=[local[:, rank] for rank in range(n)],
                sentence="each rank returned the loss over its own samples, expected "
                "the mean over all ranks",
                rule="average the loss over the ranks, as you did the gradients",
            ),
            Suspect(
                slug="sum-loss-returned",
                values=same_everywhere(expected * n, n),
                sentence=f"train_step returned the sum of the ranks' losses, {n} × the "
                "mean, expected the mean",
                rule="divide the sum by comm.world_size",
            ),
            Suspect(
                slug="",
                values=same_everywhere(expected / n, n),
                sentence=f"train_step returned 1/{n} of the mean loss, as if divided "
                f"by {n} twice, expected the mean",
                rule="divide once, after the sum",
            ),
            Suspect(
                slug="",
                values=same_everywhere(local[:, 0], n),
                sentence="every rank returned rank 0's loss, expected the mean over "
                "all ranks",
                rule="every rank's loss counts: sum them, then divide",
            ),
        ],
    )
    if n == BEND_WORLD:
        _expect_infinite(runs)
    return None


def _expect_infinite(runs: Runs) -> None:
    """A sample of infinite loss is in the mean like any other."""
    run = runs.finished(train_steps, with_bend=True)
    last = [
        torch.tensor(value["losses"][-1], dtype=torch.float64) for value in run.values
    ]
    expect_values(
        last,
        same_everywhere(torch.tensor(torch.inf, dtype=torch.float64), len(last)),
        what="when a sample on the last rank has an infinite loss, the returned loss",
    )
