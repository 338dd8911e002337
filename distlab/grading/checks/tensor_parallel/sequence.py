"""Checks of task 2.20: tokens gathered and scattered, and a block on tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.tensor_parallel.shared import (
    DIVIDED,
    WORLDS,
    CountedComm,
    as_tensor,
    drawn,
    expect_calls,
    flat,
)
from distlab.grading.checks.tensor_parallel.whole import freeze, make_block
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import State, some_of
from distlab.grading.kit.values import all_close, expect_values, same_everywhere
from distlab.grading.kit.when_raised import finished
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

SEQUENCES, EACH, CHANNELS = 3, 2, 2  # EACH tokens per rank
WHOLE = (
    "norm1.weight",
    "norm1.bias",
    "attention.proj.bias",
    "norm2.weight",
    "norm2.bias",
    "mlp.down.bias",
)
PAIR = ["all_gather", "reduce_scatter"]
KINDS = {"0 elements": "for a batch of 0 sequences"}

# ── what runs in the ranks ──────────────────────────────────────────────────────────


def sequence_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Both moves by themselves, both ways there and back, and a block of one head."""
    n, rank, device = context.world_size, context.rank, context.comm.device
    comm = CountedComm(context.comm)
    few = _turned(drawn(seed, rank, SEQUENCES, EACH, CHANNELS).to(device))
    many = _turned(drawn(seed + 1, rank, SEQUENCES, EACH * n, CHANNELS).to(device))
    scattered = unit.reduce_scatter_tokens(comm, many)
    found = {
        "gathered": as_tensor(unit.all_gather_tokens(comm, few)),
        "scattered": as_tensor(scattered),
        "none": as_tensor(unit.all_gather_tokens(comm, few[:0])),
        "none scattered": as_tensor(unit.reduce_scatter_tokens(comm, many[:0])),
        "gather back": _back(unit.all_gather_from_sequence, comm, few, many),
        "scatter back": _back(unit.reduce_scatter_to_sequence, comm, many, few),
    }
    return {**found, **_block(context, unit, seed, comm), "kept": as_tensor(scattered)}


def _turned(x: Tensor) -> Tensor:
    """The same numbers; in memory the tokens come first."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _back(way: Any, comm: CountedComm, given: Tensor, upstream: Tensor) -> Tensor:
    x = given.clone().requires_grad_()
    y = way(comm, x)
    if not isinstance(y, Tensor) or not y.requires_grad or y.shape != upstream.shape:
        return torch.empty(0)
    y.backward(upstream)
    return as_tensor(x.grad)


def _block(
    context: RankContext, unit: ModuleType, seed: int, comm: CountedComm
) -> dict[str, Any]:
    n, rank = context.world_size, context.rank
    whole_in, whole_up = _block_batch(seed, n)
    block = freeze(make_block(seed, n, heads=1), n).to(comm.device)
    unit.parallel_attention(comm, block.attention, unit.SEQUENCE)
    unit.parallel_mlp(comm, block.mlp, unit.SEQUENCE)
    x = whole_in.chunk(n, 1)[rank].to(comm.device).requires_grad_()
    upstream = whole_up.chunk(n, 1)[rank].to(comm.device)
    begin = comm.count
    y = block(x)
    middle = comm.count
    if isinstance(y, Tensor) and y.shape == upstream.shape:
        y.backward(upstream)
    end = comm.count
    unit.all_reduce_replicated_grads(comm, block)
    return {
        "out": as_tensor(y),
        "back": as_tensor(x.grad),
        "whole": _whole_gradients(block),
        "shares": _square_of_shares(block),
        "marks": {"forward": [begin, middle], "backward": [middle, end]},
    }


def sum_without_biases(context: RankContext, unit: ModuleType, seed: int) -> Tensor:
    """The gradients of the norms, which are 1 on rank 0, 2 on rank 1, …, when added up.

    The last layers have no bias.
    """
    comm = context.comm
    block = make_block(seed, context.world_size, heads=1).to(comm.device)
    for layer in (block.attention.proj, block.mlp.down):
        layer.register_parameter("bias", None)
    unit.parallel_attention(comm, block.attention, unit.SEQUENCE)
    unit.parallel_mlp(comm, block.mlp, unit.SEQUENCE)
    norms = [*block.norm1.parameters(), *block.norm2.parameters()]
    for parameter in norms:
        parameter.grad = torch.full_like(parameter, context.rank + 1)
    unit.all_reduce_replicated_grads(comm, block)
    return flat([as_tensor(parameter.grad) for parameter in norms])


BARE = on_ranks(sum_without_biases).when("for a block whose last layers have no bias")


def _whole_gradients(block: torch.nn.Module) -> State:
    parameters = dict(block.named_parameters())
    found = {name: parameters.get(name) for name in WHOLE}
    return {n: as_tensor(None if p is None else p.grad) for n, p in found.items()}


def _square_of_shares(block: torch.nn.Module) -> Tensor:
    """The sum of squares of the gradients of all that is shared out."""
    named = block.named_parameters()
    grads = [p.grad for name, p in named if name not in WHOLE]
    return flat(grads).square().sum()


def _block_batch(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Inputs and the gradients of the outputs; on four ranks, rank 1 gets zeros."""
    shape = (SEQUENCES, EACH * n, 2 * n)
    upstream = drawn(seed, -13, *shape)
    if n == 4:
        upstream.chunk(n, 1)[1].zero_()
    return drawn(seed, -12, *shape), upstream


# ── C1 forward ──────────────────────────────────────────────────────────────────────


def _tokens(seed: int, n: int) -> tuple[list[Tensor], list[Tensor]]:
    few = [drawn(seed, rank, SEQUENCES, EACH, CHANNELS) for rank in range(n)]
    many = [drawn(seed + 1, rank, SEQUENCES, EACH * n, CHANNELS) for rank in range(n)]
    return few, many


@clause("tensor_parallel.sequence", "C1", worlds=WORLDS, runs=[on_ranks(sequence_once)])
def along_the_tokens(runs: Runs) -> str | None:
    """All tokens in their order; and each rank's tokens of the sum."""
    run, n = finished(runs, sequence_once, KINDS), runs.world_size
    few, many = _tokens(runs.seed, n)
    expect_values(
        _all(run, "gathered"),
        same_everywhere(torch.cat(few, 1), n),
        what="the output of all_gather_tokens",
    )
    total = torch.stack(many).sum(0)
    expect_values(
        _all(run, "scattered"),
        list(total.chunk(n, 1)),
        what="the output of reduce_scatter_tokens",
        parts=[one.chunk(n, 1)[0] for one in many],
    )
    expect_values(
        _all(run, "none"),
        [torch.empty(0, EACH * n, CHANNELS)] * n,
        what="for a batch of 0 sequences, the output of all_gather_tokens",
    )
    expect_values(
        _all(run, "none scattered"),
        [torch.empty(0, EACH, CHANNELS)] * n,
        what="for a batch of 0 sequences, the output of reduce_scatter_tokens",
    )
    if not all_close(_all(run, "kept"), list(total.chunk(n, 1))):
        raise NotYetError(
            "a later call changed the tensor that reduce_scatter_tokens returned, "
            "expected a new tensor each time",
            rule="the sum in a new tensor, each time",
        )
    return None


def _all(run: Run, key: str) -> list[Tensor]:
    return [value[key] for value in run.values]


# ── C2 backward ─────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.sequence", "C2", worlds=WORLDS, runs=[on_ranks(sequence_once)])
def each_is_the_others_way_back(runs: Runs) -> str | None:
    """The gradient of each operator's x."""
    run, n = finished(runs, sequence_once, KINDS), runs.world_size
    few, many = _tokens(runs.seed, n)
    expect_values(
        _all(run, "gather back"),
        list(torch.stack(many).sum(0).chunk(n, 1)),
        what="the gradient of all_gather_from_sequence's x",
        parts=[one.chunk(n, 1)[0] for one in many],
    )
    expect_values(
        _all(run, "scatter back"),
        same_everywhere(torch.cat(few, 1), n),
        what="the gradient of reduce_scatter_to_sequence's x",
    )
    return None


# ── C3 a block ──────────────────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.sequence",
    "C3",
    worlds=WORLDS,
    runs=[on_ranks(sequence_once), BARE],
)
def gradients_of_a_block(runs: Runs) -> str | None:
    """The block's tokens, their gradients, and those of what is whole everywhere."""
    run, n = finished(runs, sequence_once, KINDS), runs.world_size
    inputs, upstream = _block_batch(runs.seed, n)
    block, x = freeze(make_block(runs.seed, n, heads=1), n), inputs.requires_grad_()
    out = block(x)
    out.backward(upstream)
    for key, right in (("out", out), ("back", x.grad)):
        expected = list(as_tensor(right).chunk(n, 1))
        if not all_close(_all(run, key), expected):
            few, _ = _tokens(runs.seed, n)
            if not all_close(_all(run, "scatter back"), [torch.cat(few, 1)] * n):
                raise NotJudgedError("the two operators are wrong: see C1, C2")
            what = "the block's output" if key == "out" else "the input gradient"
            expect_values(_all(run, key), expected, what=f"{what} in sequence parallel")
    expected_whole = _whole_gradients(block)
    found: list[State] = [value["whole"] for value in run.values]
    expect_values(
        [flat(list(one.values())) for one in found],
        same_everywhere(flat(list(expected_whole.values())), n),
        what=some_of("the gradients of norms and last biases", expected_whole, found),
        verb="are",
    )
    bare, total = runs.finished(BARE).values, float(n * (n + 1) // 2)
    expect_values(
        bare,
        [torch.full_like(one, total) for one in bare],
        what=f"{BARE.situation}, the gradient of the norms",
    )
    got, right = torch.stack(_all(run, "shares")).sum(0), _square_of_shares(block)
    try:
        what = "the sum of squares of the block's sharded gradients"
        expect_values([got], [right], what=what)
    except NotYetError as error:
        message = f"{what} is {float(got):.3g}, expected {float(right):.3g}"
        raise error.but(message=f"over all ranks, {message}") from None
    return None


# ── C4 what is sent ─────────────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.sequence", "C4", worlds=DIVIDED, runs=[on_ranks(sequence_once)]
)
def a_pair_each(runs: Runs) -> str | None:
    """In a block, two of each forward and two of each backward."""
    run = finished(runs, sequence_once, KINDS)
    expect_calls(
        run,
        [
            ("the block's forward pass", "forward", 2 * PAIR),
            ("the block's backward pass", "backward", 2 * PAIR),
        ],
        slug="more-messages-than-needed",
        rule="forward: one all_gather before, one reduce_scatter after; backward: "
        "the other of the two in each place",
    )
    return f"n = {runs.world_size}: four pairs in a block, in place of four all_reduces"
