"""ZeRO beside torch in one process: the same model, batches and steps, stages 1 to 3.

A case is what is special about a training, an optimizer, a stage and a number of ranks.
Each rank trains with the unit on its own samples, and with torch alone on those of all
ranks, in float64. The result is the largest difference of a weight after any step, and
of a norm that clipping returns.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.curriculum import load
from distlab.runner import Cluster, Limits, RankContext
from tests.corpora.beside_torch.ddp import Case
from tests.corpora.beside_torch.zero_models import WIDTH
from tests.corpora.beside_torch.zero_trainings import EACH, ONCE, Training

UNIT = "sharded_optimizer"
STEPS, ROWS, MAX_NORM = 4, 3, 0.2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
}
Kind = tuple[str, str, int]  # a training, an optimizer, a stage


# ── in the ranks ────────────────────────────────────────────────────────────────────


def make_model(training: Training) -> nn.Module:
    """Its weights are the same on every rank."""
    torch.manual_seed(1)
    return training.model().double()


def batch(rank: int, step: int, part: int) -> Tensor:
    """(ROWS, WIDTH), of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    shape = ROWS, WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def backward(
    model: nn.Module, training: Training, ranks: range, step: int, part: int
) -> float:
    """Add the gradients of these ranks' mean loss."""
    total = 0.0
    for rank in ranks:
        model.branch.is_used = training.usage(rank, step, part)  # type: ignore[union-attr]
        loss = model(batch(rank, step, part)).square().sum(1).mean() / len(ranks)
        loss.backward()
        total += float(loss)
    return total


def train(
    model: nn.Module,
    optimizer: Any,
    training: Training,
    ranks: range,
    resume: Callable[[nn.Module, Any], tuple[nn.Module, Any]] | None,
) -> Iterator[tuple[nn.Module, Any, float]]:
    """After each step: the model, the optimizer, the norm."""
    scheduler = training.schedule(optimizer) if training.schedule else None
    for step in range(STEPS):
        if training.before is not None:
            training.before(model, optimizer, step)
        norm = take_step(model, optimizer, training, ranks, step)
        if scheduler is not None:
            scheduler.step()
        yield model, optimizer, norm
        if resume is not None and step == 1:
            kept = scheduler.state_dict() if scheduler else None
            model, optimizer = resume(model, optimizer)
            if training.schedule and scheduler:
                saved = [group["lr"] for group in optimizer.param_groups]
                scheduler = training.schedule(optimizer)
                scheduler.load_state_dict(kept)
                for group, lr in zip(optimizer.param_groups, saved, strict=True):
                    group["lr"] = lr  # making a scheduler sets it


def take_step(
    model: nn.Module, optimizer: Any, training: Training, ranks: range, step: int
) -> float:
    """One step; the norm of its gradient, if it is clipped."""
    way, norm = training.way, 0.0
    if way == "closure":
        optimizer.step(partial(_closure, model, optimizer, training, ranks, step))
        return norm
    for part in range(training.parts):
        if way == "discard" and part == training.parts - 1:
            model.zero_grad()
        backward(model, training, ranks, step, part)
        if way == "evaluate":
            with torch.no_grad():
                model(batch(0, step, part))
    if way == "raise" and step == 1:
        _expect_error(model, ranks)
    is_ours = hasattr(optimizer, "reduce_gradients")
    if is_ours and way != "step only":
        optimizer.reduce_gradients()
    if training.is_clipped and is_ours:
        norm = optimizer.clip(MAX_NORM)
    elif training.is_clipped:
        norm = clip(model)
    optimizer.step()
    if way == "model.zero_grad":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=way != "zeros")
    return norm


def clip(model: nn.Module) -> float:
    """Torch's clip_grad_norm_, which divides by norm + 1e-6, without that 1e-6."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    for gradient in gradients:
        gradient *= min(1.0, MAX_NORM / norm)
    return norm


def _closure(
    model: nn.Module, optimizer: Any, training: Training, ranks: range, step: int
) -> float:
    optimizer.zero_grad()
    return backward(model, training, ranks, step, 0)


def _expect_error(model: nn.Module, ranks: range) -> None:
    """A forward that fails within a layer, such as for want of memory."""
    try:
        model(batch(ranks[0], 0, 0)[:, 1:])
    except RuntimeError:
        return
    raise AssertionError("this forward should have failed")


def compare(
    context: RankContext, side: str, folder: str, name: str, optimizer: str, stage: int
) -> float:
    """The largest difference of this rank's weights to those of torch alone."""
    torch.set_num_threads(1)
    training = {**EACH, **ONCE}[name]
    factory, comm = OPTIMIZERS[optimizer], context.comm
    unit = load(UNIT, side)

    def ours(model: nn.Module) -> Any:
        groups = training.groups(model)
        zero = unit.ShardedOptimizer(comm, model, groups, factory)
        return unit.at_stage(stage, zero)

    def resumed(model: nn.Module, zero: Any) -> tuple[nn.Module, Any]:
        weights, states = zero.full_state_dict(), _exchanged(comm, folder, zero)
        other = make_model(training)
        other.load_state_dict(weights)
        zero = ours(other)
        if stage == 3:
            zero.weights.is_prefetching = True
        zero.load_state_dict(states)
        return other, zero

    model, alone = make_model(training), make_model(training)
    groups, everyone = training.groups(alone), range(context.world_size)
    own = range(context.rank, context.rank + 1)
    resume = resumed if training.way == "resume" else None
    worst = 0.0
    for (_, zero, norm), (right, _, right_norm) in zip(
        train(model, ours(model), training, own, resume),
        train(alone, factory(groups), training, everyone, None),
        strict=True,
    ):
        weights = zero.full_state_dict()
        gaps = [
            float((weights[name] - value).abs().max())
            for name, value in right.state_dict().items()
        ]
        worst = max([worst, abs(norm - right_norm), *gaps], key=_nan_is_largest)
    return worst


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _exchanged(comm: Comm, folder: str, zero: Any) -> list[Any]:
    torch.save(zero.state_dict(), Path(folder) / f"{comm.rank}.pt")
    comm.barrier()
    files = [Path(folder) / f"{rank}.pt" for rank in range(comm.world_size)]
    return [torch.load(file, weights_only=True) for file in files]


def compare_all(
    context: RankContext, side: str, folder: str, kinds: list[Kind]
) -> list[float | str]:
    """`compare` for each of them; or what was raised, on all ranks."""
    found: list[float | str] = []
    for kind in kinds:
        try:
            found.append(compare(context, side, folder, *kind))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


# ── in the parent ───────────────────────────────────────────────────────────────────


class Launches:
    """Plays one training on a number of ranks with all of its optimizers and stages."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.found: dict[tuple[str, int], dict[Kind, float | str]] = {}

    def largest(
        self, cluster: Cluster, name: str, optimizer: str, stage: int, num_ranks: int
    ) -> float:
        """The largest difference on any rank.

        Raises:
            AssertionError: the ranks did not finish, or raised an error.
        """
        if (name, num_ranks) not in self.found:
            kinds = kinds_of(name)
            self.found[name, num_ranks] = self.play(cluster, num_ranks, kinds)
        value = self.found[name, num_ranks][name, optimizer, stage]
        assert not isinstance(value, str), value
        return value

    def play(
        self, cluster: Cluster, num_ranks: int, kinds: list[Kind]
    ) -> dict[Kind, float | str]:
        """The largest difference of each on any rank, or what went wrong."""
        with tempfile.TemporaryDirectory() as folder:
            values = (self.side, folder, kinds)
            limits = Limits(seconds=100.0)
            run = cluster.run(
                compare_all, num_ranks, *values, limits=limits, journal=False
            )
        if run.outcome != "finished":
            return dict.fromkeys(kinds, run.explanation or run.outcome)
        by_kind = zip(*run.values, strict=True)
        return {
            kind: max(own, key=_worst) for kind, own in zip(kinds, by_kind, strict=True)
        }


def _worst(value: float | str) -> float:
    return math.inf if isinstance(value, str) else _nan_is_largest(value)


def kinds_of(name: str) -> list[Kind]:
    """All ways in which a training is played."""
    optimizers = [*OPTIMIZERS] if name in EACH else ["AdamW"]
    return [(name, optimizer, stage) for optimizer in optimizers for stage in (1, 2, 3)]


def cases(side: str = "reference") -> list[Case]:
    """All of them, on 2 and on 3 ranks."""
    launches = Launches(side)
    return [
        Case(
            f"stage {stage}, {optimizer}: {name}",
            n,
            partial(
                launches.largest,
                name=name,
                optimizer=optimizer,
                stage=stage,
                num_ranks=n,
            ),
        )
        for name in (*EACH, *ONCE)
        for n in (2, 3)
        for _, optimizer, stage in kinds_of(name)
    ]
