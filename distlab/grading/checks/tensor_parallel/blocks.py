"""Checks of task 2.18: attention and MLP on shares of their weights.

Both are those of `distlab.models.transformer`, with H = 2 n heads of two channels. What
is judged is what they compute, over some steps of training: which rank has which heads
is free. See whole.py for the same in one process.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.tensor_parallel import Operators
from distlab.grading.checks.tensor_parallel.shared import (
    DIVIDED,
    WORLDS,
    CountedComm,
    as_tensor,
    attempt,
    enter,
    expect_calls,
    expect_nothing_done,
    expect_refusal,
    leave,
)
from distlab.grading.checks.tensor_parallel.whole import (
    LEARNING_RATE,
    STEPS,
    Whole,
    expect_frozen,
    freeze,
    heads_of,
    inputs_of,
    learning_of,
    make_block,
    upstream_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.values import all_close, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.models.transformer import Attention, TransformerConfig
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

NAMES = {"attention": "the attention", "mlp": "the MLP"}
ONE_EACH = (
    "first layer column-parallel, second row-parallel: nothing is sent in between; "
    "`operators.before` once before, `operators.after` once after"
)

# ── what runs in the ranks ──────────────────────────────────────────────────────────


def blocks_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Both, trained for some steps, each by itself; then heads that do not fit."""
    n, comm = context.world_size, CountedComm(context.comm)
    uses = {"operators.before": 0, "operators.after": 0}

    def way_in(group: Comm, x: Tensor) -> Tensor:
        uses["operators.before"] += 1
        return enter(group, x)

    def way_out(group: Comm, x: Tensor) -> Tensor:
        uses["operators.after"] += 1
        return leave(group, x)

    block = freeze(make_block(seed, n), n).to(comm.device)
    operators = Operators(before=way_in, after=way_out)
    unit.parallel_attention(comm, block.attention, operators)
    unit.parallel_mlp(comm, block.mlp, operators)
    marks: dict[str, list[int]] = {}
    found: dict[str, Any] = {"marks": marks, "uses": uses}
    for name in NAMES:
        module = getattr(block, name)
        found[name] = _trained(module, seed, n, comm, marks, name)
        found[name]["held"] = sum(p.numel() for p in module.parameters())
    found["learning"] = learning_of(block)
    found["num_heads"] = cast(Attention, block.attention).num_heads
    return {**found, "refused": _refused(comm, unit, n)}


def _trained(
    module: nn.Module,
    seed: int,
    n: int,
    comm: CountedComm,
    marks: dict[str, list[int]],
    name: str,
) -> dict[str, Any]:
    outs, backs = [], []
    for step in range(STEPS):
        x = inputs_of(seed, n, step).to(comm.device).requires_grad_()
        upstream = upstream_of(seed, n, step).to(comm.device)
        begin = comm.count
        y = module(x)
        middle = comm.count
        if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
            y.backward(upstream)
        marks.setdefault(f"{name} forward", [begin, middle])
        marks.setdefault(f"{name} backward", [middle, comm.count])
        outs.append(as_tensor(y))
        backs.append(as_tensor(x.grad))
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-LEARNING_RATE)
                    parameter.grad = None
    return {"outs": outs, "backs": backs}


def _refused(comm: CountedComm, unit: ModuleType, n: int) -> dict[str, Any]:
    """One head too many, of n channels each: all can be cut in n, but not the heads."""
    odd = Attention(TransformerConfig(dim=n * (n + 1), num_heads=n + 1)).double()
    layers, begin = (odd.qkv, odd.proj), comm.count
    before = [layer.weight.detach().clone() for layer in layers]
    raised = attempt(lambda: unit.parallel_attention(comm, odd.to(comm.device)))
    replaced = (odd.qkv, odd.proj) != layers or not all(
        torch.equal(layer.weight.cpu(), weight)
        for layer, weight in zip(layers, before, strict=True)
    )
    return {"raised": raised, "replaced": replaced, "sent": comm.count - begin}


# ── C1 values ───────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.block", "C1", worlds=WORLDS, runs=[on_ranks(blocks_once)])
def as_in_one_process(runs: Runs) -> str | None:
    """Outputs and gradients at each of some steps, so the weights' gradients too."""
    run, n = runs.finished(blocks_once), runs.world_size
    expect_frozen(run, n)
    worst = 0.0
    for name, words in NAMES.items():
        whole = Whole(runs.seed, n, name)
        for step in range(STEPS):
            right, right_back = whole.outs[step], whole.backs[step]
            outs = [value[name]["outs"][step] for value in run.values]
            if not all_close(outs, [right] * n):
                expect_values(
                    outs,
                    same_everywhere(right, n),
                    what=f"the output of {words}{_with(runs, name)}" + _after(step),
                )
            backs = [value[name]["backs"][step] for value in run.values]
            if not all_close(backs, [right_back] * n):
                expect_values(
                    backs,
                    same_everywhere(right_back, n),
                    what=f"the input gradient of {words}"
                    + _with(runs, name)
                    + _after(step),
                )
            worst = max(worst, *(float((out - right).abs().max()) for out in outs))
    _expect_num_heads([value["num_heads"] for value in run.values], runs)
    return f"n = {n}: after {STEPS} steps {worst:.0e} from the baseline"


def _expect_num_heads(found: list[object], runs: Runs) -> None:
    n = runs.world_size
    right = heads_of(runs.seed) * n
    if found != [right] * n:
        rank = next(rank for rank, number in enumerate(found) if number != right)
        raise NotYetError(
            f"after parallel_attention, attention.num_heads is {found[rank]} on rank "
            f"{rank}, expected {right} as before",
            rule="leave num_heads: the layer works out its own heads from qkv",
        )


def _with(runs: Runs, name: str) -> str:
    """Say how many heads there are, which attention may depend on."""
    heads = heads_of(runs.seed)
    return f" with {heads} heads per rank" if name == "attention" else ""


def _after(step: int) -> str:
    return f" after {step} step{'s' if step > 1 else ''} of training" if step else ""


# ── C2 memory ───────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.block", "C2", worlds=DIVIDED, runs=[on_ranks(blocks_once)])
def a_share_of_the_weights(runs: Runs) -> str | None:
    """How many numbers each rank's parameters are."""
    run, n = runs.finished(blocks_once), runs.world_size
    block = make_block(runs.seed, n)
    total = held = 0
    for name, words in NAMES.items():
        module, constant = getattr(block, name), block.attention.proj.bias.numel()
        size = sum(parameter.numel() for parameter in module.parameters())
        share = (size - constant) // n + constant
        found = [value[name]["held"] for value in run.values]
        total, held = total + size, held + max(found)
        if max(found) > share:
            raise NotYetError(
                f"rank {found.index(max(found))} has {max(found)} elements of {words}, "
                f"expected {share}, 1/{n} of the weights plus the whole last bias",
                slug="weights-not-cut",
                evidence=[
                    (rank, "holds", f"{count} of {size}")
                    for rank, count in enumerate(found)
                ],
                rule="shard both layers: ColumnParallelLinear, then RowParallelLinear",
            )
    return f"n = {n}: each rank stores {held} of {total} elements"


# ── C3 messages ─────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.block", "C3", worlds=WORLDS, runs=[on_ranks(blocks_once)])
def one_each_way(runs: Runs) -> str | None:
    """One all_reduce forward, one backward; by the operators that were passed."""
    run = runs.finished(blocks_once)
    expect_calls(
        run,
        [
            (f"{words}'s {direction} pass", f"{name} {direction}", ["all_reduce"])
            for name, words in NAMES.items()
            for direction in ("forward", "backward")
        ],
        slug="more-messages-than-needed",
        rule=ONE_EACH,
    )
    for way in ("operators.before", "operators.after"):
        uses = [value["uses"][way] for value in run.values]
        if uses != [2 * STEPS] * len(uses):
            raise NotYetError(
                f"in {STEPS} steps of the attention and the MLP, `{way}` was used "
                f"{uses[0]} times, expected {2 * STEPS}: once per step in each",
                evidence=_uses(run),
                rule=ONE_EACH,
            )
    return None


def _uses(run: Run) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            rank,
            "used",
            ", ".join(f"{way} {count}" for way, count in value["uses"].items()),
        )
        for rank, value in enumerate(run.values)
    )


# ── C4 what does not fit ────────────────────────────────────────────────────────────


@clause("tensor_parallel.block", "C4", worlds=DIVIDED, runs=[on_ranks(blocks_once)])
def whole_heads_only(runs: Runs) -> str | None:
    """A block of n + 1 heads is refused, before anything was sent or replaced."""
    run, n = runs.finished(blocks_once), runs.world_size
    tried = [value["refused"] for value in run.values]
    what = f"parallel_attention with {n + 1} heads on {n} ranks"
    rule = "the rows can be split, a head cannot: check attention.num_heads first"
    raised = [one["raised"] for one in tried]
    expect_refusal(run, raised, what, rule)
    for key, word in (("replaced", "replaced a layer"), ("sent", "sent something")):
        happened = f"refused {n + 1} heads on {n} ranks only after it had {word}"
        done = [one[key] for one in tried]
        expect_nothing_done(happened, done, raised, "an attention")
    return None
