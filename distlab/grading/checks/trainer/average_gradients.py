"""Checks of task 1.6, `trainer.average_gradients`: the mean, by the same calls."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import COLLECTIVES
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import listed, some_of, wrong_names
from distlab.grading.kit.flat import flat
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import describe

# Four first: with three a hard-coded 2 could as well be n - 1.
WORLDS = (4, 3, 2, 7, 1)
AGAIN_WORLD = 3  # where the function is called twice as well
AGAIN = "in a second call, with an inf in a gradient and a 0-dimensional parameter"


class Alike(nn.Module):
    """Parameters of unlike shapes, but 12 elements each.

    Reducing two of them in another order on another rank goes through without an
    error, as it does for the equal layers of a real model; only the values tell. With
    `scaled` there is a parameter without dimensions, too.
    """

    def __init__(self, seed: int, *, scaled: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def made(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values * 0.5)

        self.mix, self.bias = made(3, 4), made(12)
        self.gain, self.skew = made(1, 12), made(2, 6)
        self.head, self.tail = made(12, 1), made(4, 3)
        ones = torch.ones((), dtype=torch.float64)
        self.scale = nn.Parameter(ones) if scaled else 1.0
        self.part = nn.Module()
        self.part.tied = self.tail

    def forward(self, inputs: Tensor) -> Tensor:
        """One number per sample, from `inputs` (B, 12)."""
        hidden = torch.tanh(inputs * self.gain + self.bias)
        hidden = hidden + hidden.roll(1, 1) * self.skew.reshape(-1)
        hidden = hidden + (hidden.reshape(-1, 3, 4) * self.mix).reshape(-1, 12)
        return (hidden * self.tail.reshape(-1)) @ self.head * self.scale


def average_once(
    context: RankContext, unit: ModuleType, seed: int, again: bool = False
) -> dict[str, Any]:
    """One backward on this rank's own data, then the averaging under test.

    On rank 0 one gradient is all zeros, as that of a part no sample has used; on the
    last rank one has an infinity in it. Both take part like any other. With `again`
    another model was averaged before.
    """
    if again:
        average_once(context, unit, seed + 1)
    # A set of tensors is ordered by their addresses. Real processes have different
    # ones; forked ranks would not, and a loop over a set would look harmless.
    shifted = [torch.empty(16 * (1 + i)) for i in range(17 * context.rank)]
    model = Alike(seed, scaled=again).to(context.comm.device)
    generator = torch.Generator().manual_seed(seed * 7919 + context.rank)
    inputs = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    inputs = inputs.to(context.comm.device)
    model(inputs * (1.0 + context.rank)).square().mean().backward()
    if context.rank == 0 and model.skew.grad is not None:
        model.skew.grad.zero_()
    if context.rank == context.world_size - 1 and model.mix.grad is not None:
        model.mix.grad[0, 0] = torch.inf
    # Kept, so that no other tensor can get their addresses while the names count.
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = {name: gradient.clone() for name, gradient in given.items()}
    unit.average_gradients(context.comm, model)
    after = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    names = {str(gradient.data_ptr()): name for name, gradient in given.items()}
    return {
        "own": own,
        "after": after,
        "names": names,
        "shifted": len(shifted),
    }


def _again(world_size: int) -> list[RunSpec]:
    again = on_ranks(average_once, again=True).when(AGAIN)
    return [on_ranks(average_once), *[again] * (world_size == AGAIN_WORLD)]


@clause("trainer.average_gradients", "C1", worlds=WORLDS, runs=_again)
def gradients_are_the_mean(runs: Runs) -> str | None:
    """Each gradient is the mean over the ranks."""
    run = runs.finished(average_once)
    n = runs.world_size
    own = [value["own"] for value in run.values]
    after = [value["after"] for value in run.values]
    for rank, state in enumerate(after):
        missing = [name for name in own[rank] if name not in state]
        if missing:
            raise NotYetError(
                f"after average_gradients, .grad of {listed(missing)} is None on rank "
                f"{rank}, expected the mean",
                rule="write the mean into the existing .grad",
            )
    mean = {name: torch.stack([o[name] for o in own]).mean(0) for name in own[0]}
    if wrong_names(mean, after) and _order_difference(run):
        raise NotJudgedError("the calls are in different orders: see C2")
    expect_values(
        [flat(state) for state in after],
        same_everywhere(flat(mean), n),
        what=some_of("the averaged gradient", mean, after),
        parts=[flat(state) for state in own],
    )
    expect_messages(run, "the gradients are right, but not through comm")
    if n == AGAIN_WORLD:
        _expect_again(runs)
    return None


def _expect_again(runs: Runs) -> None:
    run = runs.finished(average_once, again=True)
    own = [flat(value["own"]) for value in run.values]
    expect_values(
        [flat(value["after"]) for value in run.values],
        same_everywhere(torch.stack(own).mean(0), runs.world_size),
        what=f"{AGAIN}, the averaged gradient",
    )


@clause("trainer.average_gradients", "C2", worlds=WORLDS, runs=[on_ranks(average_once)])
def same_calls_same_order(runs: Runs) -> str | None:
    """One sequence of calls on all ranks, and the same bits after it."""
    run = runs.finished(average_once)
    order = _order_difference(run)
    if order:
        raise order
    if any(set(value["after"]) != set(value["own"]) for value in run.values):
        raise NotJudgedError("some gradients are gone: see C1")
    own = [flat(value["own"]) for value in run.values]
    after = [flat(value["after"]) for value in run.values]
    if not all_close(after, [torch.stack(own).mean(0)] * len(own)):
        raise NotJudgedError("the gradients are not the mean: see C1")
    expect_equal_bits(
        [flat(value["after"]) for value in run.values],
        what="the averaged gradient",
        slug="own-order-sum",
        rule="an all_reduce gives every rank the same bits; local sums do not",
    )
    calls = run.ranks[0].calls()
    moved = run.ranks[0].sent_bytes
    return f"n = {runs.world_size}: {len(calls)} calls, {moved:.0f} bytes per rank"


def _order_difference(run: Run) -> NotYetError | None:
    """The first call at which two ranks do not do the same, if there is one.

    A call on a tensor that is no gradient of the model, such as a copy, has no name
    and is told from others by its shape alone.
    """
    sequences = [
        [
            (
                (call["op"], call["root"], call["reduce"], call["shape"]),
                record.value["names"].get(str(call["ptr"]), ""),
            )
            for call in record.calls()
            if call["op"] in COLLECTIVES
        ]
        for record in run.ranks
    ]
    first = sequences[0]
    for rank, other in enumerate(sequences[1:], 1):
        for index, ((act, name), (its_act, its_name)) in enumerate(
            zip(first, other, strict=False)
        ):
            if act != its_act or (name and its_name and name != its_name):
                return _name_the_difference(run, first, other, rank, index)
    return None


def _name_the_difference(
    run: Run, first: list[Any], other: list[Any], rank: int, index: int
) -> NotYetError:
    def what(sequence: list[Any]) -> str:
        (op, _root, reduce, shape), name = sequence[index]
        return f"called {op}{f' ({reduce})' if reduce else ''} on {name or shape}"

    acts = [sorted(map(repr, sequence)) for sequence in (first, other)]
    return NotYetError(
        f"in call {index + 1}, rank 0 {what(first)}, but rank {rank} {what(other)}, "
        "expected the same call on all ranks",
        slug="different-order" if acts[0] == acts[1] else "collective-mismatch",
        evidence=[
            (
                record.rank,
                "calls",
                ", ".join(
                    f"{describe(c)} {record.value['names'].get(str(c['ptr']), '')}"
                    for c in record.calls()[:3]
                ),
            )
            for record in run.ranks
        ],
        rule="go through model.parameters(): it has the same order on every rank",
    )
