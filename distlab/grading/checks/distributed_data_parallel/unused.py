"""Checks of task 3.23, `distributed_data_parallel.unused`: C1 and C2.

Ranks that use other parts of the model than others.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.distributed_data_parallel.finish import calls_in
from distlab.grading.checks.distributed_data_parallel.hooks import BRANCH_MIB
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    Branches,
    EventComm,
    Happened,
    gradients,
    loss_of,
    make_inputs,
    own_gradients,
)
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import of_parameter
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

FORKS = 40  # who goes every way back goes 2 to the 40 ways
DEEP = 2000  # operations, one after another
Found = dict[str, Tensor | None]


class Outputs(Branches):
    """Branches whose outputs are several: one of them is a parameter itself.

    A layer that nobody uses has two names, and another one is frozen.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, FORKS)
        self.tied = self.layers["c"]
        self.frozen = nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((3,), 0.7, dtype=torch.float64))
        self.depth = 0

    def forward(self, x: Tensor, names: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """`x` through the layers, `depth` operations deep; and the scale."""
        x = super().forward(x, names)
        for _ in range(self.depth):
            x = x + 0.0
        return x, self.scale


def used(rank: int, step: int) -> str:
    """The layers that a rank uses in a step; nobody ever uses c."""
    return ("ad", "bd")[(rank + step) % 2]


def full(names: str) -> set[str]:
    """The parameters behind the names of layers."""
    return {f"layers.{name}.weight" for name in names}


class UnusedMissedError(Exception):
    """What find_unused returned, if it is wrong, or how much was not sent: `told`."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.told = told


def take_branches(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Two steps with other layers on other ranks; a step of two microbatches."""
    try:
        return _take_branches(context, unit, seed)
    except UnusedMissedError as missed:
        return missed.told


def _take_branches(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    device, events = context.comm.device, list[Happened]()
    model = Outputs(seed).to(device)
    ddp = unit.DistributedDataParallel(
        model,
        EventComm(context.comm, events),
        bucket_size_mib=BRANCH_MIB,
        find_unused_parameters=True,
    )

    def backward(step: int, names: str) -> None:
        outputs = ddp(make_inputs(seed, step, context.rank).to(device), names)
        if ddp.syncs:
            _expect_unused(ddp, model, names)
        try:
            loss_of(*outputs).backward()
        except (AssertionError, AttributeError):  # as of a work that is None
            num_sent = len(calls_in(events)) - 1  # one call counts who uses what
            if num_sent >= len(ddp.buckets):
                raise
            unsent = num_sent, len(ddp.buckets)
            raise UnusedMissedError({"unsent": unsent}) from None
        except RuntimeError:  # as at the end of a backward() with parameters absent
            forgotten = [p for p in ddp.unused if p not in ddp.arrived]
            if not forgotten or len(calls_in(events)) - 1 < len(ddp.buckets):
                raise
            named = {p: name for name, p in model.named_parameters()}
            told = [named[p] for p in forgotten]
            raise UnusedMissedError({"forgotten": told}) from None

    steps, sent = [], list[int]()
    for step in range(2):
        model.zero_grad()
        events.clear()
        backward(step, used(context.rank, step))
        sent.append(len(calls_in(events)))
        steps.append(gradients(model))
    model.zero_grad()
    with ddp.no_sync():
        backward(0, "ad")
    model.depth = DEEP
    backward(1, "bd")
    return {"steps": steps, "microbatches": gradients(model), "sent": sent}


def _expect_unused(ddp: Any, model: nn.Module, names: str) -> None:
    """Before backward(), which may break off where find_unused was wrong."""
    named = {p: name for name, p in model.named_parameters()}
    if not isinstance(ddp.unused, list | tuple | set | frozenset):
        raise UnusedMissedError({"unused": repr(ddp.unused)[:40]})
    found = {named.get(p, "another tensor") for p in ddp.unused}
    trainable = {name for p, name in named.items() if p.requires_grad}
    right = trainable - full(names) - {"scale"}
    if found != right or len(ddp.unused) > len(right):
        told = [named.get(p, "another tensor") for p in ddp.unused]
        raise UnusedMissedError({"unused": sorted(told), "right": sorted(right)})


# ── in one process ──────────────────────────────────────────────────────────────────


def _branch_means(seed: int, n: int, step: int) -> tuple[dict[str, Tensor], set[str]]:
    """The mean gradients, zero where a rank has none; and the parameters with any."""
    model = Outputs(seed)
    parts = [
        own_gradients(model, make_inputs(seed, step, rank), used(rank, step))
        for rank in range(n)
    ]
    mean = {k: torch.stack([part[k] for part in parts]).mean(0) for k in parts[0]}
    return mean, {"scale"}.union(*(full(used(rank, step)) for rank in range(n)))


# ── the clauses ─────────────────────────────────────────────────────────────────────


def _filled(found: Found, like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(like[name]) if gradient is None else gradient
        for name, gradient in found.items()
    }


def _played(runs: Runs) -> Run:
    """The run; what was returned and sent is looked at before how it ended."""
    run = runs.ended(take_branches)
    for record in run.ranks:
        told = record.value
        if told and "unsent" in told:
            num_sent, every = told["unsent"]
            raise NotYetError(
                "when backward() doesn't reach every parameter, rank "
                f"{record.rank} sent {num_sent} of {every} buckets, expected all of "
                "them",
                rule="each rank sends every bucket, also where it uses none of it",
            )
        if told and "forgotten" in told:
            raise NotYetError(
                f"on rank {record.rank}, without_gradient was called for "
                f"{told['forgotten'][0]} but did not add it to self.arrived",
                rule="without_gradient adds its parameter to self.arrived",
            )
        if told is None or "unused" not in told:
            continue
        if "right" not in told:
            raise NotYetError(f"find_unused returned {told['unused']}, expected a list")
        raise NotYetError(f"on rank {record.rank}, {_not_found(**told)}")
    return runs.finished(take_branches)


def _not_found(unused: list[str], right: list[str]) -> str:
    """Say in what the answer of find_unused differs from the right one."""
    if extra := sorted({*unused} - {*right}):
        return (
            f"find_unused returns {extra[0]}, expected only parameters that require a "
            "gradient and that backward() cannot reach"
        )
    if missing := sorted({*right} - {*unused}):
        return f"find_unused misses {missing[0]}, which backward() can't reach"
    twice = next(name for name in unused if unused.count(name) > 1)
    return f"find_unused returned {twice} more than once, expected each parameter once"


BRANCHES = on_ranks(take_branches).when("when ranks use different layers")


@clause(
    "distributed_data_parallel.unused",
    "C1",
    worlds=FEWER,
    runs=[BRANCHES],
)
def unused_counts_as_zero(runs: Runs) -> str | None:
    """The mean over all ranks, with zeros; with what no_sync() held back."""
    run = _played(runs)
    n, seed = runs.world_size, runs.seed
    if n > 1 and not any(sum(value["sent"]) for value in run.values):
        raise NotYetError(
            "backward() started no message, expected one for each bucket",
            slug="no-messages",
        )
    for step in range(2):
        mean, _ = _branch_means(seed, n, step)
        found = [value["steps"][step] for value in run.values]
        _expect_somebodys(found, n, step)
        actual = [flat(_filled(each, mean)) for each in found]
        expect_values(
            actual,
            same_everywhere(flat(mean), n),
            what=partial(
                of_parameter,
                f"in step {step + 1}, with other layers on each rank, the gradient",
                partial(Outputs, seed),
                actual,
                flat(mean),
            ),
        )
    _expect_held_back(run, seed)
    return f"n = {n}: each rank uses 2 of 4 layers"


def _expect_held_back(run: Run, seed: int) -> None:
    n, model = run.world_size, Outputs(seed)
    pairs = [
        (
            own_gradients(model, make_inputs(seed, 0, rank), "ad"),
            own_gradients(model, make_inputs(seed, 1, rank), "bd"),
        )
        for rank in range(n)
    ]
    last = {k: torch.stack([b[k] for _, b in pairs]).mean(0) for k in pairs[0][1]}
    both = {k: torch.stack([a[k] + b[k] for a, b in pairs]).mean(0) for k in last}
    lost = {k: last[k] if k == "layers.a.weight" else both[k] for k in last}
    expect_values(
        [flat(_filled(value["microbatches"], both)) for value in run.values],
        same_everywhere(flat(both), n),
        what="after a microbatch under no_sync() and one outside, the gradient",
        suspects=[
            Suspect(
                slug="held-back-lost",
                values=same_everywhere(flat(lost), n),
                sentence="a layer's gradient from a microbatch under no_sync() is lost "
                "when the next one doesn't use the layer, expected it to stay",
                rule="write zeros only if .grad is None",
            )
        ],
    )


def _expect_somebodys(found: list[Found], n: int, step: int) -> None:
    """Whoever has no gradient gets the mean of those that have one."""
    for rank, each in enumerate(found):
        for name in {name for r in range(n) for name in used(r, step)}:
            if each[f"layers.{name}.weight"] is None:
                raise NotYetError(
                    f"in step {step + 1}, rank {rank}'s .grad of layer {name} is "
                    "None although another rank used it, expected the mean gradient",
                    rule="all ranks take the same step: create a .grad for the mean",
                )


@clause(
    "distributed_data_parallel.unused",
    "C2",
    worlds=FEWER,
    runs=[BRANCHES],
)
def nobodys_stays_none(runs: Runs) -> str | None:
    """A .grad of zeros would still move a weight: by momentum, by weight decay."""
    try:
        run = _played(runs)
    except NotYetError as error:
        raise NotJudgedError("see C1") from error
    if runs.world_size > 1 and not any(sum(value["sent"]) for value in run.values):
        raise NotJudgedError("nothing was sent: see C1")
    for step in range(2):
        _, names = _branch_means(runs.seed, runs.world_size, step)
        for record in run.ranks:
            for name, gradient in record.value["steps"][step].items():
                if name not in names and gradient is not None:
                    raise NotYetError(
                        f"in step {step + 1}, no rank has used {name}, but its .grad "
                        f"on rank {record.rank} is a tensor, expected None"
                    )
    return None
