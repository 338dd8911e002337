"""Checks of 4.11, `imagenet_trainer.compose`: a step, an epoch, a checkpoint."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.grading.checks.imagenet_trainer import parts
from distlab.grading.checks.imagenet_trainer.parts import (
    LARGE,
    OVERFLOW,
    SCALE,
    STEPS,
    Baseline,
    baseline,
    new_job,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.apart import apart
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.values import SINGLE, Suspect, close, expect_values
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner import Run as Played
from distlab.terminal import enumerated

TASK = "imagenet_trainer.compose"
WORLDS = (3, 2, 1)
PARTS, SMALL = 3, 0.125  # microbatches; a norm that every gradient exceeds


def steps(context: RankContext, unit: ModuleType, seed: int, clip_norm: float) -> Any:
    """STEPS steps of this rank: what there is after each of them."""
    comm = context.comm
    job = new_job(comm, seed, PARTS, clip_norm)
    engine: Any = job.engine
    scaler: Any = job.scaler
    found = []
    for row in parts.batches(seed, comm.world_size):
        engine.sizes, engine.sent, engine.outside, engine.backward_inside = [], 0, 0, 0
        engine.split = 0
        loss = unit.train_step(job, *row[comm.rank])
        found.append(
            {
                "weights": weights_of(job.model),
                "average": job.average.state_dict()["weights"],
                "rate": job.optimizer.param_groups[0]["lr"],
                "loss": loss if isinstance(loss, float) else type(loss).__name__,
                "sizes": engine.sizes,
                "sent": engine.sent,
                "outside": engine.outside,
                "inside": engine.backward_inside,
                "split": engine.split,
                "scale": scaler.loss_scale,
                "updates": scaler.num_updates,
            }
        )
    found[0]["loss dtypes"] = loss_dtypes(comm, unit, seed)
    return found


def loss_dtypes(comm: Comm, unit: ModuleType, seed: int) -> list[str]:
    """In what a step's losses are computed; a float32 model, under torch's autocast."""
    job = new_job(comm, seed, PARTS, 1e9)
    job.model.float()
    job.autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    loss_fn, dtypes = job.loss_fn, list[str]()

    def noted(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(outputs, targets)
        dtypes.append(str(loss.dtype)[6:])
        return loss

    job.loss_fn = noted
    inputs, targets = parts.batches(seed, comm.world_size)[0][comm.rank]
    unit.train_step(job, inputs.float(), targets)
    return dtypes


FREE = on_ranks(steps, clip_norm=1e9)
CLIPPED = on_ranks(steps, clip_norm=SMALL).when(f"with clip_norm={SMALL}")


def _played(runs: Runs, clip_norm: float) -> Played:
    return runs.finished(steps, clip_norm=clip_norm)


def _expect(
    runs: Runs, clip_norm: float, step: int, key: str, what: str, guesses: Any = ()
) -> None:
    """`key` of each rank after `step` is the baseline's; `guesses` name mistakes."""
    run, n, seed = _played(runs, clip_norm), runs.world_size, runs.seed
    where = {"weights": "weights", "average": "averages"}[key]

    def values(wrong: str = "") -> list[Tensor]:
        one = baseline(seed, n, PARTS, clip_norm, wrong)
        row: Tensor = getattr(one, where)[step]
        return [row] * n

    def suspects() -> list[Suspect]:
        return [
            Suspect(slug=slug, values=values(wrong), sentence=sentence, rule=rule)
            for wrong, slug, sentence, rule in guesses
        ]

    expect_values(
        [value[step][key] for value in run.values],
        values(),
        what=f"after step {step + 1}{_skips(step)}, {what}",
        verb="are" if key == "weights" else "is",
        suspects=suspects,
        # clip_grad_norm_ adds 1e-6 to the norm; other ways of clipping do not.
        tolerance=1e-10 if clip_norm > 1 else 1e-4,
    )


def _skips(step: int) -> str:
    return ", which had to be skipped" * (step == OVERFLOW)


FIRST = (
    (
        "mean of microbatches",
        "mean-of-microbatches",
        "the gradient is the mean of the microbatches' means, expected the mean over "
        "all samples: microbatches have different sizes",
        "each sample has the same weight: len(part) over the global batch",
    ),
    (
        "mean of ranks",
        "mean-of-means",
        "the gradient is the mean of the ranks' means, expected the mean over all "
        "samples: ranks have different numbers of them",
        "each sample has the same weight: len(part) over the global batch",
    ),
    (
        "divided by n",
        "",
        "the gradient is n times too small, expected the mean over all samples: the "
        "engine divides by n itself",
        "loss * n, or a weight with n in it: then the engine's mean is the sum",
    ),
    (
        "not zeroed",
        "gradients-not-zeroed",
        "the gradient of an earlier step was still in .grad, expected it to be zeroed",
        "zero_grad() before the first backward() of a step",
    ),
)


@clause(TASK, "C1", worlds=WORLDS, runs=[FREE])
def as_one_process(runs: Runs) -> str | None:
    """The weights and the loss of the first step, without clipping."""
    run = _played(runs, 1e9)
    with judged_after(sent_once, runs, "C2"):
        _expect(runs, 1e9, 0, "weights", "the weights", FIRST)
    _expect_large(run, baseline(runs.seed, runs.world_size, PARTS, 1e9))
    expected = baseline(runs.seed, runs.world_size, PARTS, 1e9).losses[0]
    for rank, value in enumerate(run.values):
        loss = value[0]["loss"]
        if not isinstance(loss, float):
            raise NotYetError(
                f"on rank {rank}, train_step returned a {loss}, expected the loss as a "
                "float"
            )
        wide = torch.tensor([expected], dtype=torch.float64)
        if close(torch.tensor([loss], dtype=torch.float64), wide, SINGLE):
            _expect_loss(run, wide)
        else:
            got, wanted = apart(loss, expected)
            raise NotYetError(
                f"in step 1, train_step on rank {rank} returned a loss of {got}, "
                f"expected {wanted}, the mean over the samples of all ranks"
            )
    for rank, value in enumerate(run.values):
        if "bfloat16" in value[0]["loss dtypes"]:
            raise NotYetError(
                f"for a float32 model under torch.autocast, rank {rank} computed its "
                "loss in bfloat16, expected float32",
                rule="call job.loss_fn inside job.autocast() as well",
            )
    return f"n = {runs.world_size}, ranks with 5, 6, … samples in {PARTS} microbatches"


def _expect_large(run: Played, right: Baseline) -> None:
    """The loss of the last step, whose global batch has more than 256 samples."""
    expected = right.losses[-1]
    for rank, value in enumerate(run.values):
        if not close(value[-2]["weights"], right.weights[-2]):
            continue  # an earlier step is wrong: that is another clause's
        loss = value[-1]["loss"]
        is_near = isinstance(loss, float) and abs(loss - expected) <= 1e-3 * expected
        if isinstance(loss, float) and not is_near:
            raise NotYetError(
                f"with more than {LARGE} samples on each rank, the loss on rank {rank} "
                f"is {loss:.3g}, expected {expected:.3g}",
                rule="count the samples in int64: a narrow dtype wraps or rounds",
            )


def _expect_loss(run: Played, expected: Tensor) -> None:
    """To the last digits: two numbers that print alike may differ."""
    losses = [value[0]["loss"] for value in run.values]
    expect_values(
        [torch.tensor([loss], dtype=torch.float64) for loss in losses],
        [expected] * len(losses),
        what="the loss of step 1",
    )


@clause(TASK, "C2", worlds=WORLDS, runs=[FREE])
def sent_once(runs: Runs) -> str | None:
    """The sizes of what goes through the engine, and how often it sends."""
    num = len(parts.trained(parts.new_model(0)))
    for rank, value in enumerate(_played(runs, 1e9).values):
        sizes = value[0]["sizes"]
        if len(sizes) != PARTS or max(sizes) - min(sizes) > 1:
            raise NotYetError(
                f"rank {rank} sent its samples through the engine in batches of "
                f"{enumerated(sizes or ['none'])}, expected {PARTS} microbatches of "
                "about the same size"
            )
        if sum(sizes) != 5 + rank:
            raise NotYetError(
                f"rank {rank} sent {sum(sizes)} samples through the engine, expected "
                f"all of its {5 + rank}"
            )
        if (sent := value[0]["sent"]) != num:
            each = sent == num * PARTS
            raise NotYetError(
                f"in step 1, rank {rank}'s engine sent {sent} gradients, expected "
                f"{num}, one for each parameter"
                + ": every microbatch sent its own"
                * each,
                slug="synced-every-microbatch" if each else "",
                rule="job.engine.no_sync() around all microbatches but the last one"
                if each
                else "",
            )
        if value[0]["split"]:
            raise NotYetError(
                f"on rank {rank}, no_sync() is around only one of forward and "
                "backward(), expected it around both",
                slug="forward-outside-no-sync",
                rule="the forward and backward() of a microbatch in one block: torch's "
                "DDP decides in the forward what backward() sends",
            )
        if value[0]["outside"]:
            raise NotYetError(
                f"on rank {rank}, a forward ran outside job.autocast(), expected every "
                "forward to run inside"
            )
        if value[0]["inside"]:
            raise NotYetError(
                f"on rank {rank}, backward() ran inside job.autocast(), expected every "
                "backward() to run outside"
            )
    return f"n = {runs.world_size}: {num} gradients, {PARTS} microbatches"


CLIPS = (
    (
        "clipped with the scale",
        "clipped-with-scale",
        f"the gradient was clipped with the loss scale of {SCALE:.0f} still in it, "
        "expected unscale_ before clipping",
        "unscale_, then clip, then step",
    ),
)


@clause(TASK, "C3", worlds=WORLDS, runs=[FREE, CLIPPED], after=("C1", "C2"))
def clipped_once(runs: Runs) -> str | None:
    """The weights of the first step with a small clip_norm."""
    _expect(runs, SMALL, 0, "weights", f"the weights with clip_norm={SMALL}", CLIPS)
    return f"n = {runs.world_size}: norm {SMALL}"


@clause(TASK, "C4", worlds=WORLDS, runs=[FREE, CLIPPED], after=("C1", "C3"))
def skipped(runs: Runs) -> str | None:
    """Learning rate, average, scale and weights over all steps; one overflows."""
    for clip_norm in (1e9, SMALL):
        _expect_all_steps(runs, clip_norm)
    return f"n = {runs.world_size}: {STEPS} steps, step {OVERFLOW + 1} is skipped"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _expect_all_steps(runs: Runs, clip_norm: float) -> None:
    run = _played(runs, clip_norm)
    right = baseline(runs.seed, runs.world_size, PARTS, clip_norm)
    for step in range(STEPS):
        for rank, value in enumerate(run.values):
            record, when = value[step], f"after step {step + 1}"
            if record["updates"] != step + 1:
                raise NotYetError(
                    f"{when}{_skips(step)}, rank {rank} had called scaler.update() "
                    f"{_times(record['updates'])}, expected {_times(step + 1)}"
                )
            if abs(record["rate"] - right.rates[step]) > 1e-12:
                stayed = close(record["weights"], right.weights[step], SINGLE)
                is_skip = step == OVERFLOW and stayed
                stay = "it to stay at " * (step == OVERFLOW)
                raise NotYetError(
                    f"{when}{_skips(step)}, rank {rank}'s learning rate is "
                    f"{record['rate']:.3g}, expected {stay}{right.rates[step]:.3g}",
                    slug="moved-in-skipped-step" if is_skip else "",
                )
        _expect(runs, clip_norm, step, "weights", "the weights")
        _expect(
            runs,
            clip_norm,
            step,
            "average",
            "the average",
            (
                (
                    "average moves",
                    "moved-in-skipped-step",
                    f"the average moved in step {OVERFLOW + 1}, which was skipped, "
                    "expected no change",
                    "the average is one of the steps that were taken",
                ),
            ),
        )
