"""Checks of task 3.10, `distributed_data_parallel.hooks`: when the buckets leave.

O, the oracle of order: one list per rank of the gradients that become ready and of the
calls on comm, in the order in which they happen. No clock is needed for it.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.distributed_data_parallel.broken_off import (
    flaw_of,
    is_raised_in,
    twice_in,
    unsent_in,
    watch_marks,
)
from distlab.grading.checks.distributed_data_parallel.departures import (
    departures,
    lane,
    lanes,
    untimely,
)
from distlab.grading.checks.distributed_data_parallel.halves import (
    expect_half,
    in_float16,
)
from distlab.grading.checks.distributed_data_parallel.watch import (
    LAYER_BYTES,
    MIB,
    WIDTH,
    WORLDS,
    Branches,
    Chain,
    EventComm,
    Happened,
    branch_gradients,
    chain_gradients,
    doubled,
    doubling,
    loss_of,
    make_inputs,
    mean_of,
    order_of,
    watch_gradients,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.by_name import of_parameter
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import (
    Suspect,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

LAYERS_MIB = 2.5 * LAYER_BYTES / MIB  # two layers in a bucket
SECOND = "in a second backward(), "
OTHER_ORDER = "which uses its layers in an order of its own, "
BRANCH_MIB = 1.5 * 8 * WIDTH * WIDTH / MIB  # one branch in a bucket


def step_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One step of the chain, and one in which each rank uses layers in its order."""
    inputs = make_inputs(seed, 0, context.rank)
    chain = _step(context, unit, Chain(seed), LAYERS_MIB, inputs)
    if "flaw" in chain:
        return {"chain": chain}
    given: list[str] = []
    order, hook = order_of(context.rank), doubling(unit, given)
    branches = _step(context, unit, Branches(seed), BRANCH_MIB, inputs, order, via=hook)
    if "flaw" in branches:
        return {"branches": branches}
    zeros = _zeros_on_rank_0(context, unit)
    zeros["half"] = in_float16(context.comm, unit)
    return {"chain": chain, "branches": {**branches, "given": given}, "zeros": zeros}


def _zeros_on_rank_0(context: RankContext, unit: ModuleType) -> dict[str, Any]:
    """A step of one weight: rank 0's gradient is 0, the others' are 1."""
    comm = context.comm
    model = nn.Linear(1, 1, bias=False).double().to(comm.device)
    ddp = unit.DistributedDataParallel(model, comm)
    x = torch.full((1, 1), float(comm.rank > 0), dtype=torch.float64)
    ddp(x.to(comm.device)).sum().backward()
    gradient = model.weight.grad
    return {"gradient": torch.empty(0) if gradient is None else gradient.cpu()}


def _step(
    context: RankContext,
    unit: ModuleType,
    model: nn.Module,
    bucket_size_mib: float,
    *arguments: Any,
    via: Any = None,
) -> dict[str, Any]:
    events: list[Happened] = []
    model.to(context.comm.device)
    watch_gradients(model, events)
    comm = EventComm(context.comm, events)
    ddp = unit.DistributedDataParallel(
        model, comm, bucket_size_mib=bucket_size_mib, comm_hook=via
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = [[names[p] for p in bucket.parameters] for bucket in ddp.buckets]
    moved = [a.to(comm.device) if isinstance(a, Tensor) else a for a in arguments]
    marked = watch_marks(ddp, model)
    for turn in range(2 if via else 1):  # the second is like the first
        model.zero_grad()
        loss = loss_of(ddp(*moved))
        events.clear()
        marked.clear()
        try:
            loss.backward()
        except (AssertionError, AttributeError, RuntimeError) as error:
            twice, own = twice_in(error, model), is_raised_in(error, "mark_ready")
            if flaw := flaw_of(events, buckets, marked, twice, own):
                unsent = bool(via and flaw == unsent_in(events, buckets))
                aside = SECOND if turn else OTHER_ORDER * unsent
                return {"events": events, "flaw": aside + flaw}
            raise
        if via and (flaw := unsent_in(events, buckets)):
            return {"events": events, "flaw": (SECOND if turn else OTHER_ORDER) + flaw}
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
    flat = torch.cat([gradient.reshape(-1) for gradient in found])
    return {"events": events, "buckets": buckets, "gradients": flat}


@clause(
    "distributed_data_parallel.hooks", "C1", worlds=WORLDS, runs=[on_ranks(step_once)]
)
def leaves_with_its_last_gradient(runs: Runs) -> str | None:
    """Between a bucket's last gradient and the next one its all_reduce begins."""
    run = _without_flaw(runs)
    for record in run.ranks:
        told = record.value["chain"]
        flaw, slug = untimely(told["events"], told["buckets"])
        if flaw:
            raise NotYetError(
                f"on rank {record.rank}, {flaw}",
                slug=slug,
                evidence=lanes(run, "chain"),
                rule="after each gradient, check which buckets are complete and which "
                "is next",
            )
    events = run.values[0]["chain"]["events"]
    place = departures(events)[0]
    count = sum(event[0] == "gradient" for event in events)
    early = sum(event[0] == "gradient" for event in events[:place])
    return f"the first bucket is sent after gradient {early} of {count}"


def _without_flaw(runs: Runs) -> Run:
    """The run, if it came to its end.

    Raises:
        NotYetError: it did not; with what led to it, if that is known.
    """
    run = runs.ended(step_once)
    for record in run.ranks:
        for told in (record.value or {}).values():
            if "flaw" in told:
                found = Evidence(record.rank, "order", lane(told["events"]))
                raise NotYetError(
                    f"on rank {record.rank}, {told['flaw']}", evidence=(found,)
                )
    return runs.finished(step_once)


@clause(
    "distributed_data_parallel.hooks",
    "C2",
    worlds=WORLDS,
    runs=[on_ranks(step_once)],
    after=("C1",),
    own="launched-by-readiness",
)
def same_order_everywhere(runs: Runs) -> str | None:
    """The sums are those of the right layers, where ranks differ in order."""
    run = _without_flaw(runs)
    _expect_buckets(run)
    _expect_means(run, runs.seed)
    return f"n = {runs.world_size}: each rank's layers are ready in a different order"


def _expect_buckets(run: Run) -> None:
    for record in run.ranks:
        if given := record.value["branches"]["given"]:
            raise NotYetError(
                f"on rank {record.rank}, comm_hook is called with a {given[0]}, "
                "expected a Bucket",
                rule="self.comm_hook(self.comm, bucket) starts the message",
            )


def _expect_means(run: Run, seed: int) -> None:
    n = run.world_size
    for part, own, make_model in (
        ("branches", doubled(branch_gradients(seed, n)), partial(Branches, seed)),
        ("chain", chain_gradients(seed, 0, n), partial(Chain, seed)),
    ):
        actual = [value[part]["gradients"] for value in run.values]
        mean = flat(mean_of(own))
        expect_values(
            actual,
            same_everywhere(mean, n),
            what=partial(
                of_parameter,
                "after backward(), the gradient",
                make_model,
                actual,
                mean,
            ),
            suspects=_suspects(part, own),
        )
        expect_equal_bits(
            actual,
            what="the gradient",
            slug="own-order-sum",
            rule="a collective gives every rank the same bits; separate sums do not",
        )
    share = torch.full((1, 1), (n - 1) / n, dtype=torch.float64)
    expect_values(
        [value["zeros"]["gradient"] for value in run.values],
        same_everywhere(share, n),
        what="where rank 0's gradient is zero, the gradient after backward()",
    )
    expect_half(
        [value["zeros"]["half"] for value in run.values],
        "pack the gradients into bucket.flat, which is float32",
    )


def _suspects(part: str, own: list[dict[str, Tensor]]) -> list[Suspect]:
    n, flats = len(own), [flat(each) for each in own]
    found = [
        Suspect(
            slug="own-gradient-only",
            values=flats,
            sentence="after backward(), every rank still has its own "
            "gradient, expected "
            "the mean",
            rule="pack the gradients into bucket.flat, and all-reduce bucket.flat",
        )
    ]
    if part == "branches":
        halves = flat(mean_of(own)) / 2
        found.append(
            Suspect(
                slug="",
                values=same_everywhere(halves, n),
                sentence="a comm_hook that doubles each sum has no effect, "
                "expected doubled "
                "gradients",
                rule="self.comm_hook(self.comm, bucket) starts the message",
            )
        )
    if part == "branches" and n > 1:
        ready = [
            [f"layers.{name}.weight" for name in order_of(r)[::-1]] for r in range(n)
        ]
        swapped = []
        for rank in range(n):
            sums = {
                ready[rank][k]: torch.stack([own[r][ready[r][k]] for r in range(n)])
                for k in range(4)
            }
            swapped.append(flat({name: sums[name].mean(0) for name in own[0]}))
        found.append(
            Suspect(
                slug="launched-by-readiness",
                values=swapped,
                sentence="each rank sends its buckets in its own order of "
                "readiness, so "
                "different layers are added up, expected the same order on all ranks",
                rule="self.buckets has one order on all ranks: send in this order",
            )
        )
    return found


@clause(
    "distributed_data_parallel.hooks", "C3", worlds=WORLDS, runs=[on_ranks(step_once)]
)
def nobody_waits_in_backward(runs: Runs) -> str | None:
    """Until the last gradient is ready no call and no wait holds a rank up."""
    with judged_after(leaves_with_its_last_gradient, runs, "C1"):
        run = _without_flaw(runs)
    for record in run.ranks:
        events = record.value["chain"]["events"]
        last = max(p for p, event in enumerate(events) if event[0] == "gradient")
        if not departures(events):
            raise NotJudgedError("no bucket is sent: see C1")
        for event in events[:last]:
            if event[0] == "wait" or (event[0] == "call" and event[3]):
                act = "wait()" if event[0] == "wait" else f"comm.{event[1]}"
                raise NotYetError(
                    f"rank {record.rank} waits in {act} while backward() still "
                    "computes gradients, expected the hooks to start messages without "
                    "waiting",
                    slug="waits-in-backward",
                    evidence=lanes(run, "chain"),
                    rule="start it with async_op=True, and wait in finalize_backward()",
                )
    return None
