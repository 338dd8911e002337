"""Run the elastic epoch of phase 4's lab; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.data.digits import load_digits_split
from distlab.grading.checks.elastic.scripts import ByHand, play_agents
from distlab.grading.checks.elastic.world import Settings
from distlab.models.mlp import make_mlp
from distlab.runner import RankContext

LEARNING_RATE, MOMENTUM = 0.1, 0.9


def decide(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    events: tuple[str, ...],
    global_batch_size: int,
    microbatch_size: int,
) -> list[dict[str, Any]]:
    """Return the generations that the learner's Membership forms at these events."""
    script = ByHand(
        events,
        Settings(
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            grace_s=1.0,
        ),
    )
    actions = [action for row in play_agents(script, unit) for action in row.reply]
    return [
        {"members": [name for _, name in pairs], "source": source, "accum": steps}
        for kind, *rest in actions
        if kind == "form"
        for _, pairs, source, steps in [rest]
    ]


def train_part(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    history: tuple[tuple[int, ...], ...],
    num_steps: int,
    global_batch_size: int,
    microbatch_size: int,
    accum: int,
    state: str,
    ahead: int = -1,
) -> dict[str, Any]:
    """Run some steps of one epoch from `state`; return samples, losses and a new state.

    With `ahead`, only that rank completes the last step, as if a peer had died in it.
    """
    comm, data, model = context.comm, load_digits_split(), make_mlp(seed=seed)
    parameters = list(model.parameters())
    momentum = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    _load(parameters, momentum, state)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train_inputs), generator=generator).tolist()
    earlier = [list(steps) for steps in history]
    plan = unit.resplit(order, global_batch_size, earlier, comm.world_size)[comm.rank]
    samples, losses, num_completed = [], [], 0
    for step, own in enumerate(plan[:num_steps]):
        sums = torch.zeros(len(momentum) + 2, dtype=torch.float64)
        for number in range(accum):
            start = number * microbatch_size
            ids = own[start : start + microbatch_size]
            model.zero_grad()
            outputs, targets = model(data.train_inputs[ids]), data.train_targets[ids]
            loss = cross_entropy(outputs, targets, reduction="sum")
            loss.backward()
            flat = torch.cat(
                [p.grad.flatten() for p in parameters if p.grad is not None]
            )
            sums += torch.cat([flat, loss.detach()[None], torch.tensor([len(ids)])])
        comm.all_reduce(sums)
        mean = sums[:-1] / sums[-1]
        samples.append(list(own))
        losses.append(float(mean[-1]))
        if step == num_steps - 1 and ahead not in (-1, comm.rank):
            break
        momentum.mul_(MOMENTUM).add_(mean[:-1])
        _move(parameters, momentum)
        num_completed += 1
    return {
        "samples": samples,
        "losses": losses,
        "completed": num_completed,
        "state": json.dumps([_flat(parameters).tolist(), momentum.tolist()]),
    }


def _flat(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def _load(parameters: list[torch.nn.Parameter], momentum: Tensor, state: str) -> None:
    if not state:
        return
    weights, kept = json.loads(state)
    momentum.copy_(torch.tensor(kept, dtype=torch.float64))
    values = torch.tensor(weights, dtype=torch.float64)
    with torch.no_grad():
        sizes = [p.numel() for p in parameters]
        for p, own in zip(parameters, values.split(sizes), strict=True):
            p.copy_(own.view_as(p))


@torch.no_grad()
def _move(parameters: list[torch.nn.Parameter], momentum: Tensor) -> None:
    sizes = [p.numel() for p in parameters]
    for p, own in zip(parameters, momentum.split(sizes), strict=True):
        p.sub_(LEARNING_RATE * own.view_as(p))
