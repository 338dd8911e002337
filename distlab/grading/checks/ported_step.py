"""Checks of task 2.22, `gradient_accumulation.port`: torch's own, without comm.

The ranks find in their environment what torchrun would have put there, and join a real
gloo group. What is sent is counted where torch is asked to send it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import leave_default_group
from distlab.grading.checks.clip import TOLERANCE, Counted, expect_norms
from distlab.grading.checks.clip_mistakes import (
    LEARNING_RATE,
    MAX_NORMS,
    clipped,
    right_training,
    train,
    wrong_trainings,
)
from distlab.grading.checks.main_surroundings import keep_wrappers, like_torchrun
from distlab.grading.checks.microbatches import (
    LEVEL,
    Means,
    make_microbatches,
    make_model,
    weights_of,
)
from distlab.grading.checks.ported import PATIENCE_S, finished
from distlab.grading.checks.train_step import number_of
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 5, 1)
MICROBATCHES = len(LEVEL[0])  # of each rank


def ported_steps(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The steps of task 2.3, in a process group of torch's."""
    like_torchrun(context, PATIENCE_S)
    keep_wrappers()
    dist.init_process_group("gloo")
    sent = [0]
    send = _count_sends(sent)
    model = DistributedDataParallel(make_model(seed))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads these
        mean = bucket.buffer().div_(context.world_size)
        sent[0] += mean.numel()
        work = send(mean, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    optimizer, norms = Counted(model.parameters(), lr=LEARNING_RATE), []
    for step, max_norm in enumerate(MAX_NORMS):
        batches = make_microbatches(seed, step, context.rank, LEVEL[context.rank])
        loss_fn = nn.functional.cross_entropy
        norm = unit.port(model, optimizer, loss_fn, batches, max_norm)
        norms.append(number_of(norm))
    weights = weights_of(model.module)
    leave_default_group()
    return {"weights": weights, "norms": norms, "sent": sent[0] / len(MAX_NORMS)}


def _count_sends(sent: list[int]) -> Callable[..., Any]:
    """Count what is handed to all_reduce, one number apart; give the real one."""
    real: Callable[..., Any] = dist.all_reduce

    @wraps(real)
    def counted(tensor: Tensor, *args: Any, **named: Any) -> Any:
        sent[0] += tensor.numel() if tensor.numel() > 1 else 0
        return real(tensor, *args, **named)

    dist.all_reduce = counted
    return real


@clause("gradient_accumulation.port", "C1", worlds=WORLDS)
def weights_of_one_process(impl: Implementation, harness: RankHarness) -> str | None:
    """V: as in task 2.3."""
    n, seed = harness.world_size, harness.seed
    run = finished(impl, harness, ported_steps)
    weights = [value["weights"] for value in run.values]
    expected = right_training(seed, n)
    expect_values(
        weights,
        expected,
        what=f"the weights after {len(MAX_NORMS)} steps",
        verb="are",
        tolerance=TOLERANCE,
        suspects=[]
        if all_close(weights, expected, TOLERANCE)
        else [*_wrong_weights(seed, n), *wrong_trainings(seed, n)],
        rule="DistributedDataParallel divides by the ranks: what is asked for is the "
        "mean over all samples",
    )
    expect_equal_bits(
        weights,
        what=f"the weights after {len(MAX_NORMS)} steps",
        rule="every rank must apply the very same gradient",
    )
    return f"n = {n}: the weights of one process, by torch.distributed alone"


@clause("gradient_accumulation.port", "C2", worlds=(3, 2))
def sent_once(impl: Implementation, harness: RankHarness) -> str | None:
    """J: how many numbers torch was asked to add up over the ranks, in a step."""
    run = finished(impl, harness, ported_steps)
    size = sum(parameter.numel() for parameter in make_model(0).parameters())
    sent = [value["sent"] for value in run.values]
    if max(sent) > size:
        every = set(sent) == {float(size * MICROBATCHES)}
        raise NotYetError(
            f"in a step {max(sent):g} numbers are sent for {size} gradients",
            slug="synced-every-microbatch" if every else "",
            evidence=tuple(
                Evidence(rank=rank, state="sent", text=f"{count:g} of {size} a step")
                for rank, count in enumerate(sent)
            ),
            rule="all but the last forward and backward under model.no_sync()",
        )
    return f"{size} gradients, {max(sent):g} numbers a step"


@clause("gradient_accumulation.port", "C3", worlds=WORLDS)
def norm_before_clipping(impl: Implementation, harness: RankHarness) -> str | None:
    """V: as in task 2.3."""
    expect_norms(finished(impl, harness, ported_steps), harness.seed, "port")
    return None


def _wrong_weights(seed: int, n: int) -> list[Suspect]:
    """What comes of DistributedDataParallel's mean over the ranks, taken wrongly."""
    held: list[Tensor] = []

    def never_zeroed(means: Means, limit: float) -> Tensor:
        held[:] = [clipped(means.mean() + sum(held), limit)]
        return held[0]

    def counted_alike(means: Means, limit: float) -> Tensor:
        parts = means.summed(lambda rank, _: 1 / len(means.sizes[rank]))
        return clipped(torch.stack(parts).mean(0), limit)

    guesses: list[tuple[str, str, Callable[[Means, float], Tensor]]] = [
        (
            "divided-twice",
            f"the gradients are 1/{n} of the mean over the samples: divided by all "
            "samples, and by the ranks once more",
            lambda means, limit: clipped(means.mean() / n, limit),
        ),
        (
            "mean-of-microbatches",
            "every microbatch of every rank counts alike, however many samples it has",
            counted_alike,
        ),
        (
            "gradients-not-zeroed",
            "the gradients of the step before are still in .grad",
            never_zeroed,
        ),
    ]
    return [
        Suspect(slug=slug, values=_trained(seed, n, rule), sentence=sentence)
        for slug, sentence, rule in guesses
    ]


def _trained(seed: int, n: int, rule: Callable[[Means, float], Tensor]) -> list[Tensor]:
    return train(seed, n, lambda means, limit: same_everywhere(rule(means, limit), n))[
        0
    ]
