"""Checks of task 2.22, `gradient_accumulation.port`: torch's own, without comm.

The ranks find in their environment what torchrun would have put there, and join a real
gloo group. What is sent is counted where torch is asked to send it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import leave_default_group
from distlab.grading.checks.gradient_accumulation.clip import (
    HAS_SOME,
    expect_norms,
    expect_norms_of_some,
    expect_weights,
)
from distlab.grading.checks.gradient_accumulation.clipped_training import (
    LEARNING_RATE,
    MAX_NORMS,
)
from distlab.grading.checks.gradient_accumulation.microbatches import (
    LEVEL,
    Zoo,
    loss_for,
    make_microbatches,
    weights_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.again import turned
from distlab.grading.kit.plain_sgd import CountedSGD
from distlab.grading.kit.returned import number_of
from distlab.grading.kit.torch_group import PATIENCE_S, finished
from distlab.grading.kit.torchrun_env import keep_wrappers, like_torchrun
from distlab.grading.kit.zoo import with_old_gradients
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 5, 1)
MICROBATCHES = len(LEVEL[0])  # of each rank


def ported_steps(
    context: RankContext, unit: ModuleType, seed: int, part: bool = False
) -> dict[str, Any]:
    """The steps of task 2.3, in a process group of torch's.

    With `part`, the optimizer has only some of the model's parameters.
    """
    like_torchrun(context, PATIENCE_S)
    keep_wrappers()
    dist.init_process_group("gloo")
    sent = [0]
    send = _count_sends(sent)
    model = DistributedDataParallel(Zoo(seed))
    with_old_gradients(model)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads these
        mean = bucket.buffer().div_(context.world_size)
        sent[0] += mean.numel()
        work = send(mean, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    parameters = list(model.parameters())
    optimizer = CountedSGD(parameters[:5] if part else parameters, lr=LEARNING_RATE)
    norms, stepped = [], []
    sizes = turned(LEVEL, seed)[context.rank]
    loss_fn = loss_for(context.rank, context.world_size, sizes)
    for step, max_norm in enumerate(MAX_NORMS):
        batches = make_microbatches(seed, step, context.rank, sizes)
        before = weights_of(model.module)
        norm = unit.with_torch(model, optimizer, loss_fn, batches, max_norm)
        norms.append(number_of(norm))
        stepped.append((before - weights_of(model.module)) / LEARNING_RATE)
    weights = weights_of(model.module)
    leave_default_group()
    return {
        "weights": weights,
        "norms": norms,
        "stepped": stepped,
        "sent": sent[0] / len(MAX_NORMS),
    }


def _count_sends(sent: list[int]) -> Callable[..., Any]:
    """Count what is handed to all_reduce, one number apart; give the real one."""
    real: Callable[..., Any] = dist.all_reduce

    @wraps(real)
    def counted(tensor: Tensor, *args: Any, **named: Any) -> Any:
        sent[0] += tensor.numel() if tensor.numel() > 1 else 0
        return real(tensor, *args, **named)

    dist.all_reduce = counted
    return real


@clause(
    "gradient_accumulation.port", "C1", worlds=WORLDS, runs=[on_ranks(ported_steps)]
)
def weights_of_one_process(runs: Runs) -> str | None:
    """As in task 2.3."""
    n, run = runs.world_size, finished(runs, ported_steps)
    expect_weights(run, runs.seed)
    return f"n = {n}: the weights of the baseline, with torch.distributed alone"


@clause(
    "gradient_accumulation.port", "C2", worlds=(3, 2), runs=[on_ranks(ported_steps)]
)
def sent_once(runs: Runs) -> str | None:
    """How many elements torch was asked to sum over the ranks, in a step."""
    run = finished(runs, ported_steps)
    size = sum(parameter.numel() for parameter in Zoo(0).parameters())
    sent = [value["sent"] for value in run.values]
    if max(sent) > size:
        every = set(sent) == {float(size * MICROBATCHES)}
        raise NotYetError(
            f"in one step with {MICROBATCHES} microbatches, DDP sends {max(sent):g} "
            f"elements, expected each of the {size} gradient elements once",
            slug="synced-every-microbatch" if every else "",
            evidence=tuple(
                Evidence(
                    rank=rank,
                    state="sent",
                    text=f"{number:g} elements per step, the model has {size}",
                )
                for rank, number in enumerate(sent)
            ),
            rule="all but the last forward and backward under model.no_sync()",
        )
    return f"{size} gradient elements, {max(sent):g} elements sent per step"


PART = on_ranks(ported_steps, part=True).when(HAS_SOME)


def _plays(world_size: int) -> list[RunSpec]:
    return [on_ranks(ported_steps), *[PART] * (world_size == WORLDS[0])]


@clause("gradient_accumulation.port", "C3", worlds=WORLDS, runs=_plays)
def norm_before_clipping(runs: Runs) -> str | None:
    """As in task 2.3."""
    expect_norms(finished(runs, ported_steps), runs.seed, "with_torch")
    if runs.world_size == WORLDS[0]:
        finished(runs, PART)
        expect_norms_of_some(runs, PART)
    return None
