"""Checks of task 2.9, `model_parallel.train_step`: stages against one process.

The sizes of the batches differ from step to step, and the widths from cut to cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import COLLECTIVES, Event
from distlab.grading.clause import clause
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.messages import calls_of_each, expect_messages
from distlab.grading.kit.plain_sgd import PlainSGD
from distlab.grading.kit.returned import expect_loss
from distlab.grading.kit.stages import (
    DEEP_CUT,
    LEARNING_RATE,
    NOT_YOURS,
    ROUNDED,
    make_batch,
    make_like,
    make_stages,
    widths,
)
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_values,
)
from distlab.grading.kit.zoo import loss_of
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import SENDS

# Three first: with two there is no stage in the middle.
WORLDS = (3, 2, 4, 5, 1)
SIZES = (4, 4, 3)  # samples in the batch of each step
ODD_WORLD = 5  # where one stage is unlike the others
Backward = Callable[[Tensor, Tensor, Tensor | None], None]
"""`(output, targets, gradient)`: how a stage goes backward; None is the last stage."""


class Turned(nn.Module):
    """Its output is a transposed view of what autograd keeps for backward."""

    def forward(self, x: Tensor) -> Tensor:
        """The tanh of `x` (N, width)."""
        return torch.tanh(x.T.contiguous()).T


def stages_of(seed: int, n: int) -> list[nn.Sequential]:
    """The stages; at ODD_WORLD a weight of the second is frozen, its output a view."""
    stages = make_stages(seed, n)
    if n == ODD_WORLD:
        next(stages[1].parameters()).requires_grad_(False)
        stages[1].append(Turned())
    return stages


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """loss_of; and that of the last batch is infinite, though its gradient is not."""
    return loss_of(outputs, targets) + (torch.inf if len(targets) == SIZES[-1] else 0)


def step_stages(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Some steps of a model of which each rank has its stage."""
    n, rank, device = context.world_size, context.rank, context.comm.device
    stage = stages_of(seed, n)[rank].to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
    losses, runs = [], []
    stage.register_forward_pre_hook(lambda *_: runs.append(1))
    for step, size in enumerate(SIZES):
        inputs, targets = make_batch(seed, step, size)
        if rank:  # not this rank's to read: only its length counts
            inputs = torch.full_like(inputs, NOT_YOURS)
        if rank < n - 1:
            targets = torch.zeros_like(targets)
        loss = unit.train_step(
            context.comm,
            stage,
            optimizer,
            _loss,
            inputs.to(device),
            targets.to(device),
            make_like(n, rank).to(device),
        )
        losses.append(_number(loss))
    return {"weights": weights_of(stage), "losses": losses, "runs": len(runs)}


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def _sgd(model: nn.Module) -> PlainSGD:
    return PlainSGD([{"params": list(model.parameters())}], lr=LEARNING_RATE)


@lru_cache(maxsize=32)
def one_process(
    seed: int, n: int, *, zeroed: bool = True
) -> tuple[list[Tensor], Tensor]:
    """Each stage's weights after the last step, and the loss of each step."""
    stages = stages_of(seed, n)
    model = nn.Sequential(*stages)
    optimizer = _sgd(model)
    losses = []
    for step, size in enumerate(SIZES):
        inputs, targets = make_batch(seed, step, size)
        if zeroed:
            optimizer.zero_grad()
        loss = _loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [weights_of(stage) for stage in stages], torch.stack(losses)


def _misled(seed: int, n: int, backward: Backward) -> list[Tensor]:
    """The weights if the stages before the last one go backward in another way."""
    stages = stages_of(seed, n)
    optimizer = _sgd(nn.Sequential(*stages))
    for step, size in enumerate(SIZES):
        inputs, targets = make_batch(seed, step, size)
        optimizer.zero_grad()
        inside, outputs = [], []
        x = inputs
        for stage in stages:
            x = x.detach().requires_grad_(x.is_floating_point())
            inside.append(x)
            x = stage(x)
            outputs.append(x)
        loss_of(x, targets).backward()
        for place in reversed(range(n - 1)):
            backward(outputs[place], torch.zeros_like(targets), inside[place + 1].grad)
        optimizer.step()
    return [weights_of(stage) for stage in stages]


def _suspects(seed: int, n: int) -> list[Suspect]:
    start = [weights_of(stage) for stage in stages_of(seed, n)]
    taken = loss_of
    found = [
        Suspect(
            slug="",
            values=start,
            sentence=f"after {len(SIZES)} steps, no rank's weights have changed, "
            "expected an update of every stage",
            rule="the order is: zero_grad, forward, backward, step, on every rank",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=one_process(seed, n, zeroed=False)[0],
            sentence="each step also applied the gradients of the steps before it, "
            "expected its own gradients alone",
            rule="optimizer.zero_grad() before backward, on every rank",
        ),
    ]
    if n == 1:
        return found
    if n <= DEEP_CUT:  # of an output with more dimensions no such loss can be taken
        found.append(
            Suspect(
                slug="loss-on-every-stage",
                values=_misled(
                    seed, n, lambda out, targets, _: taken(out, targets).backward()
                ),
                sentence="each stage computed a loss from its own output, expected "
                "that from the last stage only",
                rule="only the last stage has class scores; the others receive a "
                "gradient",
            )
        )
    return [
        Suspect(
            slug="only-last-stage-learns",
            values=_misled(seed, n, lambda output, targets, gradient: None),
            sentence=f"after {len(SIZES)} steps, only the last stage's weights have "
            "changed, expected an update of every stage",
            rule="receive the gradient of your output: output.backward(gradient)",
        ),
        Suspect(
            slug="ones-as-gradient",
            values=_misled(seed, n, lambda output, targets, _: output.sum().backward()),
            sentence="each stage before the last one started its backward from a "
            "gradient of ones, expected the gradient from the next stage",
            rule="output.backward(gradient), with the next stage's gradient",
        ),
        *found,
    ]


@clause("model_parallel.train_step", "C1", worlds=WORLDS, runs=[on_ranks(step_stages)])
def weights_of_one_process(runs: Runs) -> str | None:
    """After some steps each stage is what it is in one process."""
    run = runs.finished(step_stages)
    n, seed = runs.world_size, runs.seed
    weights = [value["weights"] for value in run.values]
    expected = one_process(seed, n)[0]
    expect_values(
        weights,
        expected,
        what=f"after {len(SIZES)} steps, the weights of the stage",
        verb="are",
        tolerance=ROUNDED,
        suspects=partial(_suspects, seed, n),
    )
    expect_messages(run, "the weights are right, but not through comm")
    worst = max(
        float((w - e).abs().max()) for w, e in zip(weights, expected, strict=True)
    )
    return f"n = {n}: weights {worst:.0e} from a single process's"


@clause("model_parallel.train_step", "C2", worlds=WORLDS, runs=[on_ranks(step_stages)])
def loss_on_every_rank(runs: Runs) -> str | None:
    """The last stage's loss, everywhere."""
    run = runs.finished(step_stages)
    weights, losses = one_process(runs.seed, runs.world_size)
    # Once the weights have gone astray (C1) only the first loss can be compared.
    found = [value["weights"] for value in run.values]
    went_right = all_close(found, weights, ROUNDED)
    for step in range(len(SIZES) if went_right else 1):
        expect_loss([value["losses"][step] for value in run.values], losses[step])
    return None


@clause(
    "model_parallel.train_step", "C3", worlds=(3, 2, 4), runs=[on_ranks(step_stages)]
)
def one_message_each_way(runs: Runs) -> str | None:
    """Activations to the next rank, gradients to the one before, and no more."""
    run = runs.finished(step_stages)
    n = runs.world_size
    _expect_one_forward(run)
    sizes = widths(n)
    for record in run.ranks:
        calls = record.calls()
        big = [
            c for c in calls if c["op"] in COLLECTIVES - {"barrier"} and _count(c) > 1
        ]
        if big:
            raise NotYetError(
                f"rank {record.rank} calls {big[0]['op']} on {_count(big[0])} "
                "elements, expected a send to one neighbor: no other rank needs them",
                slug="extra-messages",
                evidence=calls_of_each(run),
                rule="a tensor goes to one neighbor; only the loss goes to every rank",
            )
        sent = [c for c in calls if c["op"] in (*SENDS, "sendrecv") and _count(c) > 1]
        for step in (record.rank + 1, record.rank - 1):
            wanted = 0
            if 0 <= step < n:
                wanted = sum(SIZES) * sizes[max(step, record.rank)]
            given = sum(_count(c) for c in sent if c["dst"] == step)
            what = "its outputs" if step > record.rank else "its inputs' gradients"
            if given < wanted:
                raise NotJudgedError("a message is missing: see C1")
            if given > wanted:
                raise NotYetError(
                    f"in {len(SIZES)} steps, rank {record.rank} sends {given} values "
                    f"to rank {step}, expected the {wanted} of {what}",
                    slug="extra-messages",
                    evidence=calls_of_each(run),
                    rule="forward: the output of the stage; backward: the gradient of "
                    "its input",
                )
        others = {c["dst"] for c in sent} - {record.rank - 1, record.rank + 1}
        if others:
            raise NotYetError(
                f"rank {record.rank} sends a tensor to rank {min(others)}, expected "
                "sends to the stages before and after it only",
                slug="extra-messages",
                evidence=calls_of_each(run),
                rule="a stage sends to the next stage and to the stage before",
            )
    return f"n = {n}: {2 * (n - 1)} messages a step, and one number"


def _expect_one_forward(run: Run) -> None:
    counts = [value["runs"] for value in run.values]
    if max(counts) > len(SIZES):
        rank = counts.index(max(counts))
        raise NotYetError(
            f"in {len(SIZES)} steps, rank {rank} runs its stage {counts[rank]} times, "
            f"expected {len(SIZES)}: one forward per step",
            slug="stage-runs-again",
            evidence=[
                (rank, "runs", f"its stage {count} times")
                for rank, count in enumerate(counts)
            ],
            rule="keep the output of the forward: backward starts at it",
        )


def _count(call: Event) -> int:
    return math.prod(call["shape"] or [])
