"""Checks of task 3.23, `distributed_data_parallel.unused`: who has no gradient to give.

Ranks that use other parts of the model than others, and ranks without a batch.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.distributed_data_parallel.hooks import (
    BRANCH_MIB,
    LAYERS_MIB,
)
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    Branches,
    Chain,
    end_to_end,
    gradients,
    loss_of,
    make_inputs,
    own_gradients,
)
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.values import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

LEARNING_RATE = 0.5
BATCHES = (1, 2, 3, 4)  # of each rank: the first one is out of them first
FORKS = 40  # who goes every way back goes 2 to the 40 ways
Found = dict[str, Tensor | None]


def used(rank: int, step: int) -> str:
    """The layers that a rank uses in a step; nobody ever uses c."""
    return ("ad", "bd")[(rank + step) % 2]


def take_branches(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, list[Found] | Found]:
    """Two steps with other layers on other ranks; a step of two microbatches."""
    device = context.comm.device
    model = Branches(seed, FORKS).to(device)
    ddp = unit.DistributedDataParallel(
        model, context.comm, bucket_size_mib=BRANCH_MIB, find_unused_parameters=True
    )

    def backward(step: int, names: str) -> None:
        loss_of(ddp(make_inputs(seed, step, context.rank).to(device), names)).backward()

    steps = []
    for step in range(2):
        model.zero_grad()
        backward(step, used(context.rank, step))
        steps.append(gradients(model))
    model.zero_grad()
    with ddp.no_sync():
        backward(0, "ad")
    backward(1, "bd")
    return {"steps": steps, "microbatches": gradients(model)}


def run_out(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """As many steps as this rank has batches, then join(); and one more by all."""
    device = context.comm.device
    model = Chain(seed).to(device)
    ddp = unit.DistributedDataParallel(
        model, context.comm, bucket_size_mib=LAYERS_MIB, find_unused_parameters=True
    )
    parameters = [p for p in model.parameters() if p.requires_grad]

    def update() -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data -= LEARNING_RATE * parameter.grad

    def step(number: int) -> None:
        model.zero_grad()
        loss_of(ddp(make_inputs(seed, number, context.rank).to(device))).backward()
        update()

    for number in range(BATCHES[context.rank % 4]):
        step(number)
    num_joined = 0
    for _ in ddp.join():
        update()
        num_joined += 1
    joined = _weights(model)
    step(max(BATCHES))
    return {"num_joined": num_joined, "joined": joined, "after": _weights(model)}


def _weights(model: Chain) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


# ── in one process ──────────────────────────────────────────────────────────────────


def _branch_means(seed: int, n: int, step: int) -> tuple[dict[str, Tensor], set[str]]:
    """The mean gradients, zero where a rank has none; and the layers with any."""
    model = Branches(seed)
    parts = [
        own_gradients(model, make_inputs(seed, step, rank), used(rank, step))
        for rank in range(n)
    ]
    mean = {k: torch.stack([part[k] for part in parts]).mean(0) for k in parts[0]}
    names = {name for rank in range(n) for name in used(rank, step)}
    return mean, {f"layers.{name}.weight" for name in names}


@lru_cache(maxsize=32)
def _runs_out(seed: int, n: int, over_all: bool = False) -> tuple[Tensor, Tensor]:
    """The weights when all have joined, and after one more step of all.

    With `over_all` the division is by all ranks: a mistake.
    """
    model = Chain(seed)
    batches = [BATCHES[rank % 4] for rank in range(n)]
    found = []
    for number in (*range(max(batches)), max(BATCHES)):
        is_extra = number == max(BATCHES)
        if is_extra:
            found.append(_weights(model))
        ranks = [r for r in range(n) if is_extra or number < batches[r]]
        parts = [own_gradients(model, make_inputs(seed, number, r)) for r in ranks]
        by = n if over_all else len(ranks)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                total = torch.stack([part[name] for part in parts]).sum(0)
                parameter.data -= LEARNING_RATE * total / by
    return found[0], _weights(model)


# ── the clauses ─────────────────────────────────────────────────────────────────────


def _filled(found: Found, like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(like[name]) if gradient is None else gradient
        for name, gradient in found.items()
    }


@clause(
    "distributed_data_parallel.unused",
    "C1",
    worlds=FEWER,
    runs=[on_ranks(take_branches)],
)
def unused_counts_as_zero(runs: Runs) -> str | None:
    """V: the mean over all ranks, with zeros; with what no_sync() held back."""
    run = runs.finished(take_branches)
    n, seed = runs.world_size, runs.seed
    for step in range(2):
        mean, _ = _branch_means(seed, n, step)
        found = [value["steps"][step] for value in run.values]
        _expect_somebodys(found, n, step)
        actual = [end_to_end(_filled(each, mean)) for each in found]
        expect_values(
            actual,
            same_everywhere(end_to_end(mean), n),
            what=f"step {step + 1}: the gradient",
            rule="a rank that has no gradient adds zero to the sum",
        )
    model = Branches(seed)
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
        [end_to_end(_filled(value["microbatches"], both)) for value in run.values],
        same_everywhere(end_to_end(both), n),
        what="after a microbatch under no_sync() and one outside the gradient",
        suspects=[
            Suspect(
                slug="held-back-lost",
                values=same_everywhere(end_to_end(lost), n),
                sentence="the gradient of a microbatch under no_sync() is lost if the "
                "microbatch outside does not use the layer",
                rule="write zeros only if .grad is None",
            )
        ],
    )
    return f"n = {n}: each rank uses 2 of 4 layers"


def _expect_somebodys(found: list[Found], n: int, step: int) -> None:
    """Whoever has no gradient gets the mean of those that have one."""
    for rank, each in enumerate(found):
        for name in {name for r in range(n) for name in used(r, step)}:
            if each[f"layers.{name}.weight"] is None:
                raise NotYetError(
                    f"step {step + 1}: on rank {rank} .grad of layer {name} is None, "
                    "but another rank has used it",
                    rule="all ranks take the same step: create a .grad for the mean",
                )


@clause(
    "distributed_data_parallel.unused",
    "C2",
    worlds=FEWER,
    runs=[on_ranks(take_branches)],
)
def nobodys_stays_none(runs: Runs) -> str | None:
    """V: a .grad of zeros would still move a weight: by momentum, by weight decay."""
    run = runs.finished(take_branches)
    for step in range(2):
        _, names = _branch_means(runs.seed, runs.world_size, step)
        for record in run.ranks:
            for name, gradient in record.value["steps"][step].items():
                if name not in names and gradient is not None:
                    raise NotYetError(
                        f"step {step + 1}: no rank has used {name}, and on rank "
                        f"{record.rank} its .grad is a tensor",
                        rule="find_unused returns all parameters that backward() "
                        "cannot reach",
                    )
    return None


@clause(
    "distributed_data_parallel.unused", "C3", worlds=FEWER, runs=[on_ranks(run_out)]
)
def who_is_out_takes_part(runs: Runs) -> str | None:
    """V: the weights of one process that has, in each step, what is there."""
    with judged_after(unused_counts_as_zero, runs, "C1"):
        return _joined(runs.finished(run_out), runs.seed)


def _joined(run: Run, seed: int) -> str:
    n = run.world_size
    batches = [BATCHES[rank % 4] for rank in range(n)]
    missed = [max(batches) - own for own in batches]
    told = [value["num_joined"] for value in run.values]
    if told != missed:
        raise NotYetError(
            "join() does not yield once for each step of the other ranks",
            evidence=tuple(
                Evidence(
                    rank=rank,
                    state="right" if told[rank] == missed[rank] else "wrong",
                    text=f"{own} batches; join() yielded {told[rank]} times, "
                    f"expected {missed[rank]}",
                )
                for rank, own in enumerate(batches)
            ),
            rule="yield after each step in which some rank has a batch",
        )
    wrong = _runs_out(seed, n, over_all=True)
    for place, part, what in (
        (0, "joined", "after join() the weights"),
        (1, "after", "one step of all ranks later the weights"),
    ):
        actual = [value[part] for value in run.values]
        expect_values(
            actual,
            same_everywhere(_runs_out(seed, n)[place], n),
            what=what,
            verb="are",
            suspects=[
                Suspect(
                    slug="mean-over-absent",
                    values=same_everywhere(wrong[place], n),
                    sentence=f"{what} are means over all {n} ranks, although some "
                    "had no batch",
                    rule="finalize_backward() divides by len(self.active)",
                )
            ],
            rule="a rank without a batch adds zeros and is not counted",
        )
    counts = ", ".join(map(str, batches))
    return f"n = {n}: {counts} batches, one training"
