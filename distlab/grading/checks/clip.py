"""Checks of task 2.3, `gradient_accumulation.clip`: the weights, and the norm."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.clip_mistakes import (
    LEARNING_RATE,
    MAX_NORMS,
    norms_of,
    right_training,
    wrong_norms,
    wrong_trainings,
)
from distlab.grading.checks.messages import expect_messages
from distlab.grading.checks.microbatches import (
    LEVEL,
    make_microbatches,
    make_model,
    weights_of,
)
from distlab.grading.checks.train_step import expect_float, number_of
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import (
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 5, 1)
# clip_grad_norm_ divides by the norm plus 1e-6.
TOLERANCE = 1e-6
EXACT = 2  # norms: the first gradient is not clipped, the second not yet when measured


class Counted(torch.optim.SGD):
    """Plain SGD that counts its steps; torch's own would import its compiler."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


def clip_steps(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Steps with different limits: some are longer than the gradient, some shorter."""
    device = context.comm.device
    model = make_model(seed).to(device)
    optimizer = Counted(model.parameters(), lr=LEARNING_RATE)
    norms = []
    for step, max_norm in enumerate(MAX_NORMS):
        sizes = LEVEL[context.rank % len(LEVEL)]
        microbatches = [
            (inputs.to(device), targets.to(device))
            for inputs, targets in make_microbatches(seed, step, context.rank, sizes)
        ]
        loss_fn = nn.functional.cross_entropy
        norm = unit.clip(
            context.comm, model, optimizer, loss_fn, microbatches, max_norm
        )
        norms.append(number_of(norm))
    return {"weights": weights_of(model), "norms": norms, "steps": optimizer.steps}


@clause("gradient_accumulation.clip", "C1", worlds=WORLDS)
def clipped_once(impl: Implementation, harness: RankHarness) -> str | None:
    """V: after some steps the weights are those of one process."""
    n, seed = harness.world_size, harness.seed
    run = harness.run(impl, clip_steps)
    weights = [value["weights"] for value in run.values]
    expected = right_training(seed, n)
    _expect_steps(run)
    expect_values(
        weights,
        expected,
        what=f"the weights after {len(MAX_NORMS)} steps",
        verb="are",
        tolerance=TOLERANCE,
        suspects=[] if all_close(weights, expected) else wrong_trainings(seed, n),
        rule="accumulate, send, then clip, then step",
    )
    expect_equal_bits(
        weights,
        what=f"the weights after {len(MAX_NORMS)} steps",
        rule="every rank must apply the very same gradient",
    )
    expect_messages(run, "the weights are right, but not by way of comm")
    return f"n = {n}: the weights of one process after {len(MAX_NORMS)} steps"


def _expect_steps(run: Run) -> None:
    for rank, value in enumerate(run.values):
        steps = value["steps"]
        if steps not in (0, len(MAX_NORMS)):
            is_each = steps == len(MAX_NORMS) * len(LEVEL[rank])
            raise NotYetError(
                f"in {len(MAX_NORMS)} calls of clip rank {rank} called "
                f"optimizer.step() {steps} times",
                slug="stepped-every-microbatch" if is_each else "",
                rule="one step, after the last microbatch",
            )


@clause("gradient_accumulation.clip", "C2", worlds=WORLDS)
def norm_before_clipping(impl: Implementation, harness: RankHarness) -> str | None:
    """V: the returned number is the norm of the whole gradient, on every rank."""
    return expect_norms(harness.run(impl, clip_steps), harness.seed, "clip")


def expect_norms(run: Run, seed: int, name: str) -> str:
    """What `name` has returned on every rank, step by step.

    Raises:
        NotYetError: it is not the norm before clipping.
    """
    n, norms = run.world_size, [value["norms"] for value in run.values]
    for rank, own in enumerate(norms):
        expect_float(own, f"{name} returned {{}} on rank {rank}")
    # Once the weights have gone astray (C1) only the first norm can be compared.
    weights = [value["weights"] for value in run.values]
    count = len(MAX_NORMS) if all_close(weights, right_training(seed, n), 1e-6) else 1
    expected = norms_of(seed, n)[:count]
    expect_values(
        [torch.tensor(own[:count], dtype=torch.float64) for own in norms],
        same_everywhere(expected, n),
        what="the returned norm",
        tolerance=TOLERANCE,
        suspects=wrong_norms(seed, n, count),
        rule="of all gradients as one vector: the root of the sum of all squares",
    )
    if count > 1:
        _expect_all_digits(norms, same_everywhere(expected[:EXACT], n))
    return f"n = {n}: norms {', '.join(f'{x:.3f}' for x in expected.tolist())}"


def _expect_all_digits(norms: list[list[float]], expected: list[Tensor]) -> None:
    try:
        expect_values(
            [torch.tensor(own[:EXACT], dtype=torch.float64) for own in norms],
            expected,
            what="the returned norm",
        )
    except NotYetError as error:
        error.rule = "take the norm in the gradients' own dtype; float(tensor) keeps it"
        raise
