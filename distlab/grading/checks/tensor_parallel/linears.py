"""Checks of task 2.17: outputs, gradients, memory, and what is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.grading.checks.tensor_parallel.linears_runs import (
    OTHER,
    TOKENS,
    linears_once,
    make_linear,
    with_inf,
)
from distlab.grading.checks.tensor_parallel.shared import (
    DIVIDED,
    WORLDS,
    as_tensor,
    drawn,
    expect_refusal,
)
from distlab.grading.clause import clause
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.kit.when_raised import finished
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

SHARE = "the shard is a copy: chunk(n)[rank].clone()"

# ── one process ─────────────────────────────────────────────────────────────────────


class One:
    """The same in one process; and cut into the ranks' parts."""

    def __init__(self, seed: int, n: int, kind: str, bias: bool) -> None:
        self.n = n
        sizes = (OTHER, 3 * n) if kind == "column" else (3 * n, OTHER)
        whole = make_linear(seed, *sizes, bias)
        streams = (-4, -5) if kind == "column" else (-6, -7)
        self.x = drawn(seed, streams[0], *TOKENS, sizes[0]).requires_grad_()
        self.upstream = drawn(seed, streams[1], *TOKENS, sizes[1])
        out = whole(self.x)
        out.backward(self.upstream)
        cut = 0 if kind == "column" else 1
        self.whole, self.out = whole, out.detach()
        self.weight = list(as_tensor(whole.weight.grad).chunk(n, cut))
        self.shares = list(whole.weight.detach().chunk(n, cut))
        self.bias = as_tensor(whole.bias.grad) if bias else torch.empty(0)

    def columns(self, tensor: Tensor) -> list[Tensor]:
        """Chunk r of the last dimension for rank r."""
        return list(tensor.chunk(self.n, -1))


def _found(run: Run, kind: str, what: str) -> list[Tensor]:
    return [value[kind][what] for value in run.values]


KINDS = (("", True), (" without bias", False))
KINDS_RAISED = {
    "0 elements": "for a batch of 0 samples",
    "view size": "for an input that is a transposed view",
}

# ── C1 by columns ───────────────────────────────────────────────────────────────────


@clause("tensor_parallel.linears", "C1", worlds=WORLDS, runs=[on_ranks(linears_once)])
def by_columns(runs: Runs) -> str | None:
    """Rank r's outputs are chunk r; its parameters are no more than that."""
    run, n = finished(runs, linears_once, KINDS_RAISED), runs.world_size
    for end, bias in KINDS:
        one = One(runs.seed, n, "column", bias)
        expect_values(
            _found(run, "column" + end, "out"),
            one.columns(one.out),
            what=f"the output of ColumnParallelLinear{end}",
        )
        _expect_none(run, "column" + end, f"ColumnParallelLinear{end}", 3)
        _expect_held(run, "column" + end, [3 * OTHER, 3] if bias else [3 * OTHER])
        biases = one.whole.bias.detach().chunk(n) if bias else [torch.empty(0)] * n
        _expect_stored(run, "column" + end, one, list(biases))
    return None


def _expect_none(run: Run, kind: str, name: str, outputs: int) -> None:
    """Of no samples a layer makes no outputs, in the right shape."""
    expect_values(
        _found(run, kind, "none"),
        [torch.empty(0, *TOKENS[1:], outputs)] * run.world_size,
        what=f"for a batch of 0 samples, the output of {name}",
    )


def _expect_held(run: Run, kind: str, expected: list[int]) -> None:
    """Each rank has its share, and the memory of its share."""
    name = "RowParallelLinear" if kind.startswith("row") else "ColumnParallelLinear"
    for rank, value in enumerate(run.values):
        held = value[kind]["held"]
        sizes = [size for size, _ in held]
        if sum(sizes) > sum(expected):
            message = (
                f"rank {rank} has {sum(sizes)} elements of {name}, expected the "
                f"{sum(expected)} of its shard"
            )
            raise NotYetError(
                message, slug="weights-not-cut", evidence=_rooms(run, kind), rule=SHARE
            )
        if sum(room for _, room in held) > sum(expected) and run.world_size > 1:
            raise NotYetError(
                f"{name}'s shard on rank {rank} is a view that keeps the full layer in "
                "memory, expected a copy",
                slug="view-keeps-whole",
                evidence=_rooms(run, kind),
                rule=SHARE,
            )
    _expect_own(run, kind, name)


def _expect_stored(run: Run, kind: str, one: One, biases: list[Tensor]) -> None:
    """A layer has the values that it was given: training goes on from there."""
    name = "RowParallelLinear" if kind.startswith("row") else "ColumnParallelLinear"
    for place, noun, expected in ((0, "weight", one.shares), (1, "bias", biases)):
        expect_values(
            [value[kind]["stored"][place] for value in run.values],
            expected,
            what=f"the outputs are right, but the {noun} that {name} stores",
        )


def _expect_own(run: Run, kind: str, name: str) -> None:
    """The share is a copy, and nothing else of the whole layer is kept."""
    for rank, value in enumerate(run.values):
        if value[kind]["shared"]:
            raise NotYetError(
                f"{name}'s {value[kind]['shared'][0]} on rank {rank} shares memory "
                "with the full layer, expected a copy: an optimizer step changes both",
                rule="copy the shard, and the bias too, even if it is all of them",
            )
        if value[kind]["kept"]:
            raise NotYetError(
                f"{name} on rank {rank} still holds the full weight besides its shard, "
                "expected the shard alone",
                slug="weights-not-cut",
                evidence=_rooms(run, kind),
                rule="keep no reference to `full` after __init__ returns",
            )


def _rooms(run: Run, kind: str) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            rank,
            "holds",
            ", ".join(f"{s} of {room}" for s, room in value[kind]["held"])
            + " elements in memory"
            + (", and the full weight" if value[kind]["kept"] else ""),
        )
        for rank, value in enumerate(run.values)
    )


# ── C2 by rows ──────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.linears", "C2", worlds=WORLDS, runs=[on_ranks(linears_once)])
def by_rows(runs: Runs) -> str | None:
    """The whole outputs everywhere, the bias in them once."""
    run, n = finished(runs, linears_once, KINDS_RAISED), runs.world_size
    for end, bias in KINDS:
        one = One(runs.seed, n, "row", bias)
        constant = one.whole.bias.detach() if bias else torch.zeros(OTHER).double()
        expect_values(
            _found(run, "row" + end, "out"),
            same_everywhere(one.out, n),
            what=f"the output of RowParallelLinear{end}",
            suspects=[
                Suspect(
                    slug="",
                    values=same_everywhere(one.out - constant, n),
                    sentence="the bias is missing from RowParallelLinear's output, "
                    "expected it once",
                    rule="add the bias after the sum",
                ),
            ],
        )
        _expect_none(run, "row" + end, f"RowParallelLinear{end}", OTHER)
        expect_values(
            _found(run, "row" + end, "inf"),
            same_everywhere(one.whole(with_inf(n)).detach(), n),
            what=f"for an inf in rank 0's input, the output of RowParallelLinear{end}",
        )
        _expect_held(run, "row" + end, [3 * OTHER, OTHER] if bias else [3 * OTHER])
        own = one.whole.bias.detach() if bias else torch.empty(0)
        _expect_stored(run, "row" + end, one, same_everywhere(own, n))
    return None


# ── C3 gradients ────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.linears", "C3", worlds=WORLDS, runs=[on_ranks(linears_once)])
def gradients_of_one_process(runs: Runs) -> str | None:
    """Inputs, weights, biases, for both cuts."""
    run, n = finished(runs, linears_once, KINDS_RAISED), runs.world_size
    for end, bias in KINDS:
        one = One(runs.seed, n, "column", bias)
        name = f"ColumnParallelLinear{end}"
        _expect(run, "column" + end, "weight", one.weight, name)
        biases = list(one.bias.chunk(n)) if bias else same_everywhere(one.bias, n)
        _expect(run, "column" + end, "bias", biases, name)
        own = same_everywhere(as_tensor(one.x.grad), n)
        _expect(run, "column" + end, "x", own, name)
        one = One(runs.seed, n, "row", bias)
        name = f"RowParallelLinear{end}"
        _expect(run, "row" + end, "weight", one.weight, name)
        _expect(run, "row" + end, "bias", same_everywhere(one.bias, n), name)
        _expect(run, "row" + end, "x", one.columns(as_tensor(one.x.grad)), name)
    return None


def _expect(run: Run, kind: str, what: str, expected: list[Tensor], name: str) -> None:
    noun = "inputs" if what == "x" else what
    expect_values(
        _found(run, kind, what),
        expected,
        what=f"the gradient of {name}'s {noun}",
    )


# ── C4 what does not fit ────────────────────────────────────────────────────────────


@clause("tensor_parallel.linears", "C4", worlds=DIVIDED, runs=[on_ranks(linears_once)])
def what_does_not_fit_is_refused(runs: Runs) -> str | None:
    """A ValueError for outputs, and for inputs, that n does not divide."""
    run, n = finished(runs, linears_once, KINDS_RAISED), runs.world_size
    for index, what in enumerate(
        ("ColumnParallelLinear with {} outputs", "RowParallelLinear with {} inputs")
    ):
        expect_refusal(
            run,
            [value["refused"][index] for value in run.values],
            f"{what.format(3 * n + 1)} on {n} ranks",
            "chunk(n) does not check: raise ValueError if a remainder is left",
        )
    return None
