"""What can be special about a training: the cases of `zero.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.corpora.beside_torch import zero_models as models

Groups = list[dict[str, Any]]
Usage = Callable[[int, int, int], bool]
"""Whether a rank uses the model's branch, in a part of a step."""


def one_group(model: nn.Module) -> Groups:
    """All parameters, with decay."""
    return [{"params": [*model.parameters()], "weight_decay": 0.3}]


def two_groups(model: nn.Module) -> Groups:
    """Weights decay; all else has a learning rate of its own."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": weights, "weight_decay": 0.3},
        {"params": others, "lr": 0.03, "weight_decay": 0.0},
    ]


def always(_rank: int, _step: int, _part: int) -> bool:
    """Every rank uses the branch."""
    return True


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train: the same for the unit and for torch."""

    model: Callable[[], nn.Module] = models.Plain
    groups: Callable[[nn.Module], Groups] = one_group
    parts: int = 1  # backward() in a step
    usage: Usage = always
    is_clipped: bool = False
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    before: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    way: str = ""  # of a step: see `take_step`


def warm_then_decay(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedulers, one after the other."""
    first = lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
    then = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [2])


def edit(_model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """After two steps the settings are edited by hand."""
    if step == 2:
        optimizer.param_groups[0]["lr"] = 0.002
        optimizer.param_groups[0]["weight_decay"] = 0.9


def add(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """After two steps a layer is trained that was frozen."""
    if step == 2:
        added = [*model.get_submodule("branch").parameters()]
        for p in added:
            p.requires_grad_(True)
        optimizer.add_param_group({"params": added, "lr": 0.004})


def without_branch(model: nn.Module) -> Groups:
    """The branch is frozen, and in no group."""
    own = set(model.get_submodule("branch").parameters())
    for p in own:
        p.requires_grad_(False)
    return [{"params": [p for p in model.parameters() if p not in own]}]


EACH: dict[str, Training] = {  # with every optimizer
    "groups": Training(groups=two_groups),
    "decay": Training(),
    "scheduler": Training(groups=two_groups, schedule=warm_then_decay),
    "accumulation": Training(parts=3),
    "clipping": Training(is_clipped=True, groups=two_groups),
    "all of it": Training(
        groups=two_groups, schedule=warm_then_decay, parts=2, is_clipped=True
    ),
    "unused at times": Training(usage=lambda _rank, step, _part: step % 2 == 1),
    "resumed": Training(groups=two_groups, schedule=warm_then_decay, way="resume"),
}
ONCE: dict[str, Training] = {  # with AdamW
    "unused": Training(usage=lambda *_: False),
    "unused, accumulation": Training(usage=lambda *_: False, parts=3),
    "unused on rank 0": Training(usage=lambda rank, *_: rank > 0),
    "unused on rank 0, accumulation": Training(
        usage=lambda rank, *_: rank > 0, parts=3
    ),
    "used by one microbatch of one rank": Training(
        usage=lambda rank, step, part: (rank, part) == (1, step % 2), parts=2
    ),
    "unused at times, resumed": Training(
        usage=lambda _rank, step, _part: step == 1, way="resume"
    ),
    "a layer is left out": Training(
        model=models.LeftOut, usage=lambda _rank, step, _part: step % 2 == 1
    ),
    "param_groups edited": Training(before=edit),
    "add_param_group": Training(before=add, groups=without_branch),
    "reduce_gradients() is forgotten": Training(way="step only"),
    "model.zero_grad()": Training(way="model.zero_grad"),
    "model.zero_grad() before the last backward": Training(way="discard", parts=2),
    "zero_grad(set_to_none=False)": Training(
        way="zeros", usage=lambda _rank, step, _part: step in (1, 2)
    ),
    "closure": Training(way="closure"),
    "tied weights": Training(model=models.Tied),
    "parameters on the model": Training(model=models.Direct),
    "a ModuleList": Training(model=models.Listed, parts=2),
    "tuple outputs": Training(model=models.Tuples),
    "dict outputs": Training(model=models.Dicts),
    "a view of weights as output": Training(model=models.Views),
    "torch's checkpoint of a layer": Training(model=models.Checkpointed),
    "its reentrant form": Training(model=models.Reentrant, parts=2),
    "two forwards, one backward": Training(model=models.Twice),
    "a forward that raised": Training(way="raise"),
    "an evaluation in between": Training(way="evaluate"),
}
