"""Checks of task 2.3, `gradient_accumulation.clip`: the weights, and the norm."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.gradient_accumulation.clipped_training import (
    LEARNING_RATE,
    MAX_NORMS,
    norms_of,
    right_steps,
    right_training,
)
from distlab.grading.checks.gradient_accumulation.microbatches import (
    LEVEL,
    Zoo,
    finished,
    loss_for,
    make_microbatches,
    weights_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.again import turned
from distlab.grading.kit.apart import apart
from distlab.grading.kit.like_reference import expect_like_reference, up_to
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.plain_sgd import CountedSGD
from distlab.grading.kit.returned import expect_float, number_of
from distlab.grading.kit.values import (
    all_close,
    close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.kit.zoo import with_old_gradients
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 5, 1)
# clip_grad_norm_ divides by the norm plus 1e-6.
TOLERANCE = 1e-6
EXACT = 2  # norms: the first gradient is not clipped, the second not yet when measured


def clip_steps(
    context: RankContext, unit: ModuleType, seed: int, part: bool = False
) -> dict[str, Any]:
    """Steps with different limits: some are above the gradient's norm, some below.

    With `part`, the optimizer has only some of the model's parameters, and one of these
    is a transposed view.
    """
    device = context.comm.device
    model = Zoo(seed, transposed=part).to(device)
    with_old_gradients(model)
    every = list(model.parameters())
    groups = [{"params": every[:5]}, {"params": every[5:]}]
    optimizer = CountedSGD(groups[:1] if part else groups, lr=LEARNING_RATE)
    norms, stepped = [], []
    for step, max_norm in enumerate(MAX_NORMS):
        sizes = turned(LEVEL, seed)[context.rank % len(LEVEL)]
        microbatches = [
            (inputs.to(device), targets.to(device))
            for inputs, targets in make_microbatches(seed, step, context.rank, sizes)
        ]
        before = weights_of(model)
        loss_fn = loss_for(context.rank, context.world_size, sizes)
        norm = unit.clip(
            context.comm, model, optimizer, loss_fn, microbatches, max_norm
        )
        norms.append(number_of(norm))
        stepped.append((before - weights_of(model)) / LEARNING_RATE)
    return {
        "weights": weights_of(model),
        "norms": norms,
        "steps": optimizer.steps,
        "stepped": stepped,
    }


def clip_nothing(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """A step in which all gradients are zero, as at the minimum of the loss."""
    model = Zoo(seed).to(context.comm.device)
    optimizer = CountedSGD(model.parameters(), lr=LEARNING_RATE)
    before = weights_of(model)
    microbatches = [
        (inputs.to(context.comm.device), targets.to(context.comm.device))
        for inputs, targets in make_microbatches(seed, 0, context.rank, (2, 1))
    ]
    norm = unit.clip(
        context.comm,
        model,
        optimizer,
        lambda outputs, _: 0.0 * outputs.sum(),
        microbatches,
        MAX_NORMS[1],
    )
    same = torch.equal(weights_of(model), before)
    return {"norm": number_of(norm), "same": same}


NOTHING = on_ranks(clip_nothing).when("for gradients of norm 0")


def _judged(world_size: int) -> list[RunSpec]:
    return [on_ranks(clip_steps), *[NOTHING] * (world_size == WORLDS[0])]


@clause("gradient_accumulation.clip", "C1", worlds=WORLDS, runs=_judged)
def clipped_once(runs: Runs) -> str | None:
    """After some steps the weights are those of the single-process baseline."""
    n, seed = runs.world_size, runs.seed
    run = finished(runs, clip_steps)
    _expect_steps(run)
    expect_weights(run, seed)
    expect_messages(run, "the weights are right, but not through comm")
    if n == WORLDS[0]:
        for rank, value in enumerate(runs.finished(NOTHING).values):
            if not value["same"]:
                raise NotYetError(
                    f"for gradients of norm 0, clip changed the weights on rank {rank}"
                    ", expected no change",
                    rule="a gradient of norm 0 isn't longer than max_norm",
                )
    return f"n = {n}: the weights of the baseline after {len(MAX_NORMS)} steps"


def expect_weights(run: Run, seed: int) -> None:
    """The weights at the end, on every rank.

    Raises:
        NotYetError: they are wrong; with the facts of the first step that is wrong.
    """
    weights = [value["weights"] for value in run.values]
    what = f"the weights after {len(MAX_NORMS)} steps"
    expected = right_training(seed, run.world_size)
    try:
        expect_values(weights, expected, what=what, verb="are", tolerance=TOLERANCE)
    except NotYetError as error:
        if error.difference is None:
            raise
        raise _first_wrong_step(run, seed).but(difference=error.difference) from None
    expect_equal_bits(
        weights,
        what=what,
        verb="are",
        rule="every rank must apply the very same gradient",
    )


def _first_wrong_step(run: Run, seed: int) -> NotYetError:
    """What is expected and what was applied."""
    expected = right_steps(seed, run.world_size)
    applied = [value["stepped"] for value in run.values]
    step, rank = next(
        (step, rank)
        for step in range(len(MAX_NORMS))
        for rank in range(run.world_size)
        if step == len(MAX_NORMS) - 1
        or not close(applied[rank][step], expected[step], TOLERANCE)
    )
    wanted = float(expected[step].norm())
    evidence, norms = [], []
    for number, own in enumerate(applied):
        norms.append(float(own[step].norm()))
        alike = nn.functional.cosine_similarity(own[step], expected[step], dim=0)
        is_right = close(own[step], expected[step], TOLERANCE)
        evidence.append(
            Evidence(
                rank=number,
                state="right" if is_right else "wrong",
                text=f"norm: got {norms[-1]:.4g}   expected {wanted:.4g}   "
                f"cosine of the two gradients {float(alike):.4f}",
            )
        )
    call = f"{_in_call(step)}, rank {rank} stepped"
    if abs(norms[rank] - wanted) <= TOLERANCE * max(1.0, wanted):
        said = (
            f"with a gradient of the right norm, {wanted:.3g}, but the wrong direction"
        )
    else:
        what = "the unclipped norm" if wanted < MAX_NORMS[step] else "norm"
        got, right = apart(norms[rank], wanted)
        said = f"with a gradient of norm {got}, expected {what} {right}"
    return NotYetError(f"{call} {said}", evidence=tuple(evidence))


def _in_call(step: int) -> str:
    return f"in call {step + 1}, with max_norm {MAX_NORMS[step]:g}"


def _expect_steps(run: Run) -> None:
    for rank, value in enumerate(run.values):
        steps = value["steps"]
        if steps not in (0, len(MAX_NORMS)):
            is_each = steps == len(MAX_NORMS) * len(LEVEL[rank])
            raise NotYetError(
                f"in {len(MAX_NORMS)} calls of clip, rank {rank} called "
                f"optimizer.step() {steps} times, expected once per call",
                slug="stepped-every-microbatch" if is_each else "",
                rule="one step, after the last microbatch",
            )


HAS_SOME = "when the optimizer has only some of the model's parameters"
PART = on_ranks(clip_steps, part=True).when(
    "with a transposed parameter and an optimizer for some parameters only"
)


def _plays(world_size: int) -> list[RunSpec]:
    return [on_ranks(clip_steps), *[PART] * (world_size == WORLDS[0])]


@clause("gradient_accumulation.clip", "C2", worlds=WORLDS, runs=_plays)
def norm_before_clipping(runs: Runs) -> str | None:
    """The returned float is the norm of the full gradient, on every rank."""
    told = expect_norms(finished(runs, clip_steps), runs.seed, "clip")
    if runs.world_size == WORLDS[0]:
        expect_norms_of_some(runs, PART)
    return told


def expect_norms_of_some(runs: Runs, part: RunSpec) -> None:
    """What was returned where the optimizer has only some of the parameters.

    Raises:
        NotYetError: it isn't what the reference returns; no baseline trains some only.
    """
    what = f"{HAS_SOME}, the list of returned norms"
    freedom = up_to(TOLERANCE)
    expect_like_reference(runs, part, "norms", what=what, freedom=freedom)


def expect_norms(run: Run, seed: int, name: str) -> str:
    """What `name` has returned on every rank, step by step.

    Raises:
        NotYetError: it is not the norm before clipping, or not a float.
    """
    n, norms = run.world_size, [value["norms"] for value in run.values]
    for rank, own in enumerate(norms):
        expect_float(own, f"{name} returned {{}} on rank {rank}")
    # Once the weights are wrong (C1) only the first norm can be compared.
    weights = [value["weights"] for value in run.values]
    count = len(MAX_NORMS) if all_close(weights, right_training(seed, n), 1e-6) else 1
    expected = norms_of(seed, n)[:count]
    try:
        expect_values(
            [torch.tensor(own[:count], dtype=torch.float64) for own in norms],
            same_everywhere(expected, n),
            what="the returned norm",
            tolerance=TOLERANCE,
        )
    except NotYetError as error:
        if error.difference is None:
            raise
        raise error.but(message=_first_wrong_norm(norms, expected)) from None
    if count > 1:
        _expect_all_digits(norms, same_everywhere(expected[:EXACT], n))
    return f"n = {n}: norms {', '.join(f'{x:.3f}' for x in expected.tolist())}"


def _first_wrong_norm(norms: list[list[float]], expected: Tensor) -> str:
    step, rank, wanted = next(
        (step, rank, wanted)
        for step, wanted in enumerate(expected)
        for rank, own in enumerate(norms)
        if not close(torch.tensor(own[step]).double(), wanted, TOLERANCE)
    )
    got, right = apart(norms[rank][step], float(wanted))
    return (
        f"{_in_call(step)}, rank {rank} returned {got}, expected {right}, the "
        "gradient's norm before clipping"
    )


def _expect_all_digits(norms: list[list[float]], expected: list[Tensor]) -> None:
    try:
        expect_values(
            [torch.tensor(own[:EXACT], dtype=torch.float64) for own in norms],
            expected,
            what="the returned norm",
        )
    except NotYetError as error:
        rule = "take the norm in the gradients' dtype; float(tensor) keeps it"
        raise error.but(rule=rule) from error
