"""Checks of task 3.11, `distributed_data_parallel.finish`: several steps, one by one.

The weights stay as they are, so that the gradient of a step depends on nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.distributed_data_parallel.hooks import LAYERS_MIB
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    Chain,
    Happened,
    Watched,
    chain_gradients,
    end_to_end,
    gradients,
    like,
    loss_of,
    make_inputs,
    mean_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    close,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

STEPS = 3
HELD_BACK = 2  # microbatches under no_sync(), before the one that is sent


class Tracked(nn.Module):
    """A chain with buffers that each forward changes, on each rank otherwise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chain = Chain(seed)
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """The chain's outputs."""
        self.mean += x.detach().mean() + torch.arange(3, device=x.device)
        self.count += int(x.detach().abs().sum())
        return self.chain(x)  # type: ignore[no-any-return]


class _Steps:
    """A wrapped model on one rank, and a step after another."""

    def __init__(self, context: RankContext, unit: ModuleType, seed: int) -> None:
        self.context, self.seed, self.events = context, seed, list[Happened]()
        self.model = Tracked(seed).to(context.comm.device)
        comm = Watched(context.comm, self.events)
        self.ddp = unit.DistributedDataParallel(
            self.model, comm, bucket_size_mib=LAYERS_MIB
        )

    def backward(self, step: int) -> None:
        inputs = make_inputs(self.seed, step, self.context.rank)
        loss_of(self.ddp(inputs.to(self.context.comm.device))).backward()

    def gradients(self) -> Tensor | None:
        found = gradients(self.model.chain)
        if any(gradient is None for gradient in found.values()):
            return None
        return end_to_end(found)  # type: ignore[arg-type]

    def buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.model.buffers()]


def take_steps(
    context: RankContext, unit: ModuleType, seed: int, to_none: bool = False
) -> list[dict[str, Any]]:
    """What .grad and the buffers are after each backward()."""
    steps = _Steps(context, unit, seed)
    found = []
    for step in range(STEPS):
        steps.model.zero_grad(set_to_none=to_none)
        steps.backward(step)
        found.append({"gradients": steps.gradients(), "buffers": steps.buffers()})
    return found


def hold_back(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Microbatches under no_sync(), one outside; and again after an error in it."""
    steps = _Steps(context, unit, seed)
    steps.events.clear()
    with steps.ddp.no_sync():
        with steps.ddp.no_sync():
            steps.backward(0)
        for step in range(1, HELD_BACK):
            steps.backward(step)
    events = list(steps.events)
    steps.backward(HELD_BACK)
    after = steps.gradients()
    with suppress(ZeroDivisionError), steps.ddp.no_sync():
        raise ZeroDivisionError
    steps.model.zero_grad()
    steps.backward(0)
    return {
        "events": events,
        "after": after,
        "anew": steps.gradients(),
    }


def _other_zero(world_size: int) -> list[RunSpec]:
    return [on_ranks(take_steps), on_ranks(take_steps, to_none=True)]


@clause("distributed_data_parallel.finish", "C1", worlds=FEWER, runs=_other_zero)
def mean_in_each_step(runs: Runs) -> str | None:
    """V: every step's gradients; zeroed in place, and set to None."""
    _judge_steps(runs.finished(take_steps), runs.seed, "zeroed in place")
    run = runs.finished(take_steps, to_none=True)
    _judge_steps(run, runs.seed, "set to None")
    return f"n = {runs.world_size}: {STEPS} steps, and {STEPS} with .grad = None"


def _judge_steps(run: Run, seed: int, zeroed: str) -> None:
    n = run.world_size
    before: Tensor | None = None
    for step in range(STEPS):
        own = chain_gradients(seed, step, n)
        mean = end_to_end(mean_of(own))
        actual = _all_there([value[step]["gradients"] for value in run.values])
        what = f"step {step + 1} of {STEPS}, .grad {zeroed} before it: the gradient"
        if before is not None:
            _expect_reset(actual, own, before, step, zeroed)
        expect_values(
            actual,
            same_everywhere(mean, n),
            what=what,
            suspects=_suspects([end_to_end(each) for each in own], mean),
            rule="wait for the bucket, divide by the ranks, unpack it into .grad",
        )
        before = mean
    expect_messages(run, "the gradients are right, but comm was not used")


def _all_there(found: list[Tensor | None]) -> list[Tensor]:
    there = [gradient for gradient in found if gradient is not None]
    if len(there) < len(found):
        raise NotYetError(
            "after backward() some .grad are None",
            slug="gradients-wiped",
            rule="write the mean into the .grad that exists",
        )
    return there


def _suspects(own: list[Tensor], mean: Tensor) -> list[Suspect]:
    n = len(own)
    return [
        Suspect(
            slug="not-copied-back",
            values=own,
            sentence="every rank still has its own gradient: the sum stayed in the "
            "buckets",
            rule="bucket.flat is a copy: unpack it into the .grad of its parameters",
        ),
        Suspect(
            slug="sum-not-mean",
            values=same_everywhere(mean * n, n),
            sentence=f"the gradient is {n} × the mean: summed and never divided",
            rule="divide by the number of ranks that took part, once",
        ),
        Suspect(
            slug="divided-twice",
            values=same_everywhere(mean / n, n),
            sentence=f"the gradient is 1/{n} of the mean: divided twice",
            rule="divide by the number of ranks that took part, once",
        ),
    ]


def _expect_reset(
    actual: list[Tensor],
    own: list[dict[str, Tensor]],
    before: Tensor,
    step: int,
    zeroed: str,
) -> None:
    """The first step was right: is this one as if the buckets were still in it?"""
    n, mean = len(own), mean_of(own)
    flat = end_to_end(mean)
    if all_close(actual, same_everywhere(flat, n)):
        return
    shares = {"the last step's": before, f"1/{n} of the last step's": before / n}
    found = next(
        (what for what, guess in shares.items() if like(actual, [guess] * n)), ""
    )
    pieces = actual[0].split([part.numel() for part in mean.values()])
    right = [
        close(piece, part.reshape(-1))
        for piece, part in zip(pieces, mean.values(), strict=True)
    ]
    is_empty = [not piece.any() for piece in pieces]
    if not found and all(map(any, zip(right, is_empty, strict=True))):
        found = "zero, except for the gradients that were ready first"
    if found:
        raise NotYetError(
            f"step {step + 1}, .grad {zeroed} before it: the first step was right, "
            f"now the gradient is {found}",
            slug="never-reset",
            rule="reset all counters at the end of the step",
        )


# ── buffers, and no_sync ────────────────────────────────────────────────────────────


@clause(
    "distributed_data_parallel.finish", "C2", worlds=FEWER, runs=[on_ranks(take_steps)]
)
def buffers_are_rank_0s(runs: Runs) -> str | None:
    """V: what rank 0's forward left in its buffers is on every rank."""
    run = runs.finished(take_steps)
    n = runs.world_size
    own: list[Tracked] = [Tracked(runs.seed) for _ in range(n)]
    for step in range(STEPS):
        for rank, model in enumerate(own):
            model(make_inputs(runs.seed, step, rank))
        held = [value[step]["buffers"] for value in run.values]
        for place, (name, buffer) in enumerate(own[0].named_buffers()):
            expect_values(
                [buffers[place] for buffers in held],
                same_everywhere(buffer.clone(), n),
                what=f"step {step + 1}: the buffer {name}",
                suspects=[
                    Suspect(
                        slug="buffers-forgotten",
                        values=[list(model.buffers())[place].clone() for model in own],
                        sentence=f"step {step + 1}: every rank has its own {name}: the "
                        "buffers differ",
                        rule="module.buffers() are part of the model: broadcast them",
                    )
                ],
                rule="every buffer becomes that of the first rank in self.active",
            )
        for model in own[1:]:
            model.load_state_dict(own[0].state_dict())
    return None


@clause(
    "distributed_data_parallel.finish", "C3", worlds=FEWER, runs=[on_ranks(hold_back)]
)
def no_sync_keeps_quiet(runs: Runs) -> str | None:
    """J and V: no call under no_sync(); then the mean of what has come together."""
    with judged_after(mean_in_each_step, runs, "C1"):
        run = runs.finished(hold_back)
    for record in run.ranks:
        sent = [e for e in record.value["events"] if e[0] == "call"]
        if sent:
            raise NotYetError(
                f"under no_sync() rank {record.rank} calls comm.{sent[0][1]}, and "
                f"{len(sent)} calls in all",
                slug="synced-every-microbatch",
                rule="on_gradient reads self.syncs: set it to False in the block",
            )
    with judged_after(mean_in_each_step, runs, "C1"):
        _expect_held_back(run, runs.seed)
    return f"{HELD_BACK} microbatches without a message, then one step's"


def _expect_held_back(run: Run, seed: int) -> None:
    """The mean of all microbatches; and after an error, that of the next one."""
    n = run.world_size
    parts = [
        [end_to_end(each) for each in chain_gradients(seed, step, n)]
        for step in range(HELD_BACK + 1)
    ]
    by_rank = [torch.stack([part[rank] for part in parts]) for rank in range(n)]
    last = torch.stack(parts[HELD_BACK]).mean(0)
    sums = [own.sum(0) for own in by_rank]
    mean = torch.stack(sums).mean(0)
    actual = _all_there([value["after"] for value in run.values])
    expect_values(
        actual,
        same_everywhere(mean, n),
        what=f"after {HELD_BACK} microbatches under no_sync() and one outside .grad",
        suspects=[
            Suspect(
                slug="last-microbatch-only",
                values=same_everywhere(last, n),
                sentence="the gradient is that of the last microbatch only",
            ),
            Suspect(
                slug="never-synced",
                values=sums,
                sentence="after the block nothing is sent any more: every rank has its "
                "own sum",
                rule="at its end, no_sync() must restore self.syncs",
            ),
        ],
        rule="pack all of .grad",
    )
    first = torch.stack(parts[0])
    expect_values(
        _all_there([value["anew"] for value in run.values]),
        same_everywhere(first.mean(0), n),
        what="after an error under no_sync(), in the next step .grad",
        suspects=[
            Suspect(
                slug="never-synced",
                values=list(first),
                sentence="after an error under no_sync() nothing is sent any more",
                rule="restore self.syncs in a finally",
            )
        ],
    )
