"""Checks of task 3.11, `distributed_data_parallel.finish`: C1 and C2, step by step.

The weights stay as they are, so that a gradient depends on its batch only. Each step
meets another state: gradients that were zeroed, are None, or are still there; a frozen
parameter with an old gradient; ranks without a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from distlab.grading.checks.distributed_data_parallel.halves import expect_half
from distlab.grading.checks.distributed_data_parallel.steps import (
    STEPS,
    Tracked,
    active_in,
    copied,
    take_steps,
)
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    Chain,
    Happened,
    chain_gradients,
    like,
    make_inputs,
    mean_of,
    tolerance,
)
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import of_parameter
from distlab.grading.kit.flat import flat
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    close,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import Run

WITH_NONE = "with .grad set to None and a comm_hook that works in wait()"


def _other_zero(world_size: int) -> list[RunSpec]:
    to_none = on_ranks(take_steps, to_none=True)
    return [on_ranks(take_steps), to_none.when(WITH_NONE)]


@clause("distributed_data_parallel.finish", "C1", worlds=FEWER, runs=_other_zero)
def mean_in_each_step(runs: Runs) -> str | None:
    """Every step's gradients; zeroed in place, set to None, or as they were."""
    for how, hook, to_none in (
        ("zeroed in place", "", False),
        ("set to None", " and a comm_hook that works in wait(), too", True),
    ):
        values = {"to_none": True} if to_none else {}
        run = runs.ended(take_steps, **values)
        _expect_all_started(run)
        _judge_steps(runs.finished(take_steps, **values), runs.seed, how, hook)
    return f"n = {runs.world_size}: {STEPS} steps, and {STEPS} with .grad = None"


def _expect_all_started(run: Run) -> None:
    """No step broke off because buckets that the first step sent were not sent."""
    for record in run.ranks:
        steps = record.value or []
        if steps and "unsent" in steps[-1]:
            started, every = steps[-1]["unsent"]
            raise NotYetError(
                f"in step {len(steps)}, backward() on rank {record.rank} started "
                f"{started} of {every} buckets, expected all of them as in step 1",
                slug="never-reset",
                rule="reset all counters at the end of the step",
            )


def _judge_steps(run: Run, seed: int, zeroed: str, hook: str = "") -> None:
    n = run.world_size
    before: dict[str, Tensor] = {}
    for step in range(STEPS + 2):
        told = [value[step] for value in run.values]
        if step == 0:
            expect_sent_in_backward(run)
        _expect_untouched(told, step)
        own = chain_gradients(seed, step, n)
        how = f", with .grad {zeroed} before it{hook},"
        if step == 0 and not hook:  # .grad is None before it, whatever zeroes it
            how = ","
        if step == STEPS:  # what was there is the same on every rank
            own = [{k: part[k] + before[k] for k in part} for part in own]
            how = ", without zero_grad() before it,"
        active = active_in(step, n)
        share = len(active) / n
        mean = {name: value / share for name, value in mean_of(own).items()}
        if len(active) < n:
            how = f", with self.active = {active},"
        actual = all_there([each["gradients"] for each in told])
        if 0 < step < STEPS:
            _expect_reset(actual, own, flat(before), step, zeroed)
        flats = [flat(each) for each in own]
        expect_values(
            actual,
            same_everywhere(flat(mean), n),
            what=partial(
                of_parameter,
                f"in step {step + 1}{how} the gradient",
                partial(Chain, seed),
                actual,
                flat(mean),
                tolerance(n),
            ),
            tolerance=tolerance(n),
            suspects=_suspects(flats, flat(mean), len(active)),
            parts=flats,
        )
        before = mean
    expect_half(
        [value[0]["half"] for value in run.values],
        "divide bucket.flat, and unpack it then",
    )
    expect_messages(run, "the gradients are right, but comm was not used")


def _expect_untouched(told: list[dict[str, Any]], step: int) -> None:
    """No bucket while it is under way, and no gradient of a frozen parameter."""
    for rank, each in enumerate(told):
        if any(event[0] == "written" for event in each["events"]):
            raise NotYetError(
                f"in step {step + 1}, rank {rank} wrote to a bucket between its "
                "all_reduce and the end of wait(), expected no change",
                slug="touched-in-flight",
            )
        if not each["stale"]:
            raise NotYetError(
                f"in step {step + 1}, rank {rank} changed the old .grad of a frozen "
                "parameter, expected no change"
            )


def calls_in(events: list[Happened]) -> list[str]:
    """What was called, apart from what a broadcast of buffers needs."""
    called = [event[1] for event in events if event[0] == "call"]
    return [op for op in called if op not in ("broadcast", "barrier")]


def expect_sent_in_backward(run: Run) -> None:
    """With more than one rank backward() sends something: else no hook was called."""
    if run.world_size > 1 and not any(
        calls_in(value[0]["events"]) for value in run.values
    ):
        raise NotYetError(
            "backward() started no message, so no gradient left its rank, expected a "
            "message for each bucket",
            slug="no-messages",
        )


def all_there(found: list[Tensor | None]) -> list[Tensor]:
    """All gradients of each rank.

    Raises:
        NotYetError: some are None.
    """
    there = [gradient for gradient in found if gradient is not None]
    if len(there) < len(found):
        raise NotYetError(
            "after backward(), some .grad are None, expected the mean gradient",
            slug="gradients-wiped",
            rule="write the mean into the .grad that exists",
        )
    return there


def _suspects(own: list[Tensor], mean: Tensor, num_active: int) -> list[Suspect]:
    n, among = len(own), f"the {num_active} ranks of self.active"
    return [
        Suspect(
            slug="mean-over-absent",
            values=same_everywhere(mean * num_active / n, n),
            sentence=f"the gradient is a mean over all {n} ranks, expected a mean over "
            f"{among}",
            rule="divide by len(self.active)",
        ),
        Suspect(
            slug="not-copied-back",
            values=own,
            sentence="after backward(), every rank still has its own "
            "gradient in .grad, "
            "expected the mean",
            rule="bucket.flat is a copy: unpack it into the .grad of its parameters",
        ),
        Suspect(
            slug="sum-not-mean",
            values=same_everywhere(mean * num_active, n),
            sentence=f"after backward(), .grad holds the sum over {num_active} ranks, "
            "expected their mean",
            rule="divide by the number of ranks that took part, once",
        ),
        Suspect(
            slug="divided-twice",
            values=same_everywhere(mean / num_active, n),
            sentence=f"after backward(), .grad is 1/{num_active} of the mean, as if "
            "divided twice: expected the mean",
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
    whole = flat(mean)
    if all_close(actual, same_everywhere(whole, n)):
        return
    shares = {"that of step": before, f"1/{n} of that of step": before / n}
    found = next(
        (
            f"{what} {step}"
            for what, guess in shares.items()
            if like(actual, [guess] * n)
        ),
        "",
    )
    pieces = actual[0].split([part.numel() for part in mean.values()])
    right = [
        close(piece, part.reshape(-1))
        for piece, part in zip(pieces, mean.values(), strict=True)
    ]
    is_empty = [not piece.any() for piece in pieces]
    if not found and all(map(any, zip(right, is_empty, strict=True))):
        found = "zero except for the parameters that were ready first"
    if found:
        raise NotYetError(
            f"in step {step + 1}, with .grad {zeroed} before it, the gradient is "
            f"{found}, expected the mean as in step 1",
            slug="never-reset",
            rule="reset all counters at the end of the step",
        )


# ── buffers, and no_sync ────────────────────────────────────────────────────────────


@clause(
    "distributed_data_parallel.finish", "C2", worlds=FEWER, runs=[on_ranks(take_steps)]
)
def buffers_are_rank_0s(runs: Runs) -> str | None:
    """What rank 0's forward left in its buffers is on every rank."""
    run = runs.finished(take_steps)
    n = runs.world_size
    try:
        _expect_all_started(run)
        expect_sent_in_backward(run)
    except NotYetError as error:
        raise NotJudgedError("backward() does not send all: see C1") from error
    own: list[Tracked] = [Tracked(runs.seed) for _ in range(n)]
    for step in range(STEPS + 2):
        active = active_in(step, n)
        first = own[active[0]]
        for rank, model in enumerate(own):
            model(make_inputs(runs.seed, step, rank))
        held = [value[step]["buffers"] for value in run.values]
        kept = [[copied(buffer) for buffer in model.buffers()] for model in own]
        is_any_shared = not all(
            map(all_close, zip(*held, strict=True), zip(*kept, strict=True))
        )
        for place, (name, buffer) in enumerate(first.named_buffers()):
            each = [buffers[place] for buffers in kept]
            late = f"after step {step + 1}"
            forgotten = f"{late}, every rank has its own values in the buffer {name}"
            # One that isn't in one piece in memory is shared as a copy, written back.
            is_view = is_any_shared and not buffer.is_contiguous()
            forgotten += ", which is not contiguous" * is_view
            zeros = (
                f"{late}, the buffer {name} has rank 0's values, although self.active "
                f"is {active}"
            )
            expect_values(
                [buffers[place] for buffers in held],
                same_everywhere(copied(buffer), n),
                what=f"after step {step + 1}, the buffer {name}",
                suspects=[
                    Suspect(
                        slug="" if is_view else "buffers-forgotten",
                        values=each,
                        sentence=forgotten,
                        rule="shared_buffers() writes a copy back when it is asked for "
                        "the next buffer"
                        if is_view
                        else "module.buffers() are part of the model: broadcast them",
                    ),
                    Suspect(slug="", values=[each[0]] * n, sentence=zeros),
                ],
                rule="every buffer becomes that of the first rank in self.active",
            )
        for model in own:
            model.load_state_dict(first.state_dict())
    return None
