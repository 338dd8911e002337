"""DistributedDataParallel beside torch's: the same models, batches and steps in both.

Each rank trains a model twice, wrapped by the unit and wrapped by torch, on gloo and in
float64, with momentum and weight decay, so that a gradient of zeros is not the same as
none. A case's result is the largest difference of losses, gradients, parameters and
rank 0's buffers; inf if a gradient is None in one of them only. A case of REFUSED must
end with an error in both: then its result is 0, else inf.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.runner import Cluster, Limits, RankContext
from tests.corpora.beside_torch import ddp_models as models
from tests.corpora.both_ways import leave, meet

BUCKET_MIB = 0.0005  # several buckets, also for the smallest model
STEPS = 4
LIMITS = Limits(seconds=60.0)

Values = list[Tensor | None]
"""What is compared after a step."""


class Case(NamedTuple):
    """One line of the table: `largest(cluster)` is the largest difference to torch."""

    name: str
    num_ranks: int
    largest: Callable[[Cluster], float]


@dataclass(frozen=True)
class Training:
    """What each rank does twice: STEPS steps of a model, wrapped in one class."""

    model: type[nn.Module]
    backward: models.Backward = models.once
    options: tuple[tuple[str, Any], ...] = ()
    is_copied: bool = False  # a deepcopy of the wrapped model is trained

    def run(self, wrap: Callable[..., Any], rank: int) -> tuple[list[Values], str]:
        """The values after each step until an error ends it, and the error."""
        torch.manual_seed(rank)  # rank 0's weights become every rank's
        done: list[Values] = []
        try:
            ddp = wrap(self.model().double(), **dict(self.options))
            for values in self.trained(copy.deepcopy(ddp) if self.is_copied else ddp):
                done.append(values)
        except (RuntimeError, TypeError, ValueError) as error:
            return done, f"{type(error).__name__}: {error}"
        return done, ""

    def trained(self, ddp: Any) -> Iterator[Values]:
        """After each step its loss, gradients and parameters, and rank 0's buffers."""
        rank, module = dist.get_rank(), ddp.module
        optimizer = torch.optim.SGD(
            ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self.backward(ddp, rank, step)
            optimizer.step()
            kept = [loss, *module.parameters(), *(() if rank else module.buffers())]
            gradients = [parameter.grad for parameter in module.parameters()]
            yield [None if t is None else t.detach().clone() for t in kept + gradients]


def gap(ours: Values, torchs: Values) -> float:
    """The largest difference; inf if a gradient is None on one side only."""
    largest = 0.0
    for own, other in zip(ours, torchs, strict=True):
        if own is None or other is None:
            largest = max(largest, 0.0 if own is other else math.inf)
        elif own.numel():
            difference = float((own - other).abs().max())
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def play_case(context: RankContext, folder: str, name: str) -> tuple[float, str]:
    """On each rank: the largest difference in this case; if it is inf, why."""
    comm = meet(context, folder)
    unit = load("distributed_data_parallel", "reference")
    # A group for each: an error may leave messages in it that never meet. But torch
    # copies a wrapped model on the default group only.
    group, torchs_group = comm.new_group(range(comm.world_size)), dist.new_group()
    wrap = partial(unit.DistributedDataParallel, comm=group, bucket_size_mib=BUCKET_MIB)
    torchs_wrap = partial(
        nn.parallel.DistributedDataParallel,
        process_group=torchs_group if name in REFUSED else None,
        bucket_cap_mb=BUCKET_MIB,
    )
    training = {**EQUAL, **REFUSED}[name]
    ours, error = training.run(wrap, context.rank)
    torchs, torchs_error = training.run(torchs_wrap, context.rank)
    leave()
    if bool(error) != bool(torchs_error) or bool(error) != (name in REFUSED):
        return math.inf, f"ours: {error or 'no error'}, torch: {torchs_error[:60]}"
    return max((gap(*pair) for pair in zip(ours, torchs, strict=False)), default=0), ""


def largest(cluster: Cluster, name: str, num_ranks: int) -> float:
    """The largest difference on all ranks.

    Raises:
        AssertionError: ours ends with an error where torch does not, or vice versa.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = cluster.run(
            play_case, num_ranks, folder, name, limits=LIMITS, journal=False
        )
    assert run.outcome == "finished", run.explanation
    for _, why in run.values:
        assert not why, why
    return max(float(value) for value, _ in run.values)


def cases() -> list[Case]:
    """All of them, on 2 and on 3 ranks."""
    return [
        Case(name, n, partial(largest, name=name, num_ranks=n))
        for name in (*EQUAL, *REFUSED)
        for n in (2, 3)
    ]


UNUSED = (("find_unused_parameters", True),)
OWN_BUFFERS = (("broadcast_buffers", False),)
EQUAL = {
    "plain": Training(models.Plain),
    "tied weights": Training(models.Tied),
    "frozen layer": Training(models.Frozen),
    "batch norm": Training(models.Normed),
    "batch norm, own buffers": Training(models.Normed, options=OWN_BUFFERS),
    "parameters on the model": Training(models.Direct),
    "channels_last": Training(models.Convolved),
    "transposed weight": Training(models.Transposed),
    "branching": Training(models.Branching, options=UNUSED),
    "branching, accumulated": Training(models.Branching, models.accumulated, UNUSED),
    "branching, a forward alone": Training(
        models.Branching, models.after_a_forward, UNUSED
    ),
    "dataclass output": Training(models.InDataclass, options=UNUSED),
    "checkpoint of 2.5": Training(models.ByTheCourse),
    "reentrant checkpoint": Training(models.Reentrant),
    "other checkpoint": Training(models.NotReentrant),
    "no_sync": Training(models.Normed, models.accumulated),
    "two forwards": Training(models.Plain, models.two_forwards),
    "gradient penalty": Training(models.Plain, models.input_gradient_first),
    "error before the gradients": Training(models.Plain, models.after_an_early_error),
    "deepcopy": Training(models.Tied, is_copied=True),
}
REFUSED = {
    "branching, two forwards": Training(models.Branching, models.two_forwards, UNUSED),
    "loss beside the output": Training(
        models.LossBeside, models.with_loss_beside, UNUSED
    ),
    "output without a loss": Training(models.InDataclass, models.first_only, UNUSED),
    "unused in a checkpoint": Training(models.Reentrant, options=UNUSED),
    "a layer checkpointed twice": Training(models.TwiceReentrant),
    "error in backward": Training(models.Plain, models.after_an_error),
}
