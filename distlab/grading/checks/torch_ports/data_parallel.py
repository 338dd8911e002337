"""Checks of task 3.26, `torch_ports.data_parallel`: torch's DDP, a hook, no_sync.

In the last step the last rank goes backward only after rank 0 has sent two buckets:
rank 0 can, unless its hook waits for the first one to arrive. There rank 0 also has an
infinite gradient of one element. In the step before, the last rank's are all zero.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat
from distlab.grading.kit.torch_group import finished, join
from distlab.grading.kit.torch_wire import Wire, elements_of
from distlab.grading.kit.torchrun_env import keep_wrappers
from distlab.grading.kit.values import (
    SINGLE,
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.kit.zoo import Zoo, all_gradients, loss_of, where
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import enumerated

LossFn = Callable[[Tensor, Tensor], Tensor]

WORLDS = (3, 2)
SAMPLES = ((2, 1, 3, 1), (4,), (1, 2))  # of each microbatch, by step
IDLE = 1  # the step where the last rank's gradients are zeros
BUCKET_MIB = 200 / 2**20  # bytes: the model has several buckets
LEARNING_RATE = 0.1
WAIT_S = 4.0  # how long the last rank waits for rank 0's second bucket
COARSE = 0.05  # what bfloat16 leaves
OVERFLOW = torch.tensor([torch.inf, 0.0, 0.0], dtype=torch.float64)
DIVIDE = "a hook replaces DDP's division: divide the bucket by dist.get_world_size()"
NO_SYNC = "forward and backward of all but the last microbatch under model.no_sync()"
RETURN = "return work.get_future().then(…): do not wait, and call with async_op=True"


def microbatches(seed: int, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs (samples, 6) and class numbers (samples,), other ones on each rank."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in SAMPLES[step]
    ]


def loss_at(step: int, is_last: bool) -> LossFn:
    """The loss of a rank: it counts nothing on the last one in step IDLE."""
    factor = float((step, is_last) != (IDLE, True))
    return lambda outputs, targets: factor * loss_of(outputs, targets)


def flat_gradients(model: nn.Module) -> Tensor:
    """One copy of all; zeros where there is none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in _of(model)]
    return flat(gradient.double() for gradient in found)


def _of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def hooked_steps(
    context: RankContext, unit: ModuleType, seed: int, wire: str
) -> list[dict[str, Any]]:
    """A few steps of a model that begins with other weights on each rank."""
    join(context)
    keep_wrappers()
    module = Zoo(seed + context.rank)
    model = unit.data_parallel(module, BUCKET_MIB, getattr(torch, wire))
    steps = []
    for step in range(len(SAMPLES)):
        for parameter in module.parameters():
            parameter.grad = None
        turn = _Turn(context) if step == len(SAMPLES) - 1 else None
        batches = microbatches(seed, step, context.rank)
        seen = Wire(turn.sent if turn else None)
        is_last = context.rank == context.world_size - 1
        loss_fn = turn.after_two_buckets if turn else loss_at(step, is_last)
        if turn and context.rank == 0:
            module.last.bias.register_hook(lambda grad: grad + OVERFLOW)
        with seen:
            unit.accumulate(model, loss_fn, batches)
        steps.append(
            {
                "gradients": flat_gradients(module),
                "dtypes": sorted(
                    {str(p.grad.dtype) for p in _of(module) if p.grad is not None}
                ),
                "sent": seen.records,
                "waited_in_vain": turn.in_vain if turn else False,
            }
        )
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
    leave_default_group()
    return steps


class _Turn:
    """The last rank computes no gradient of its last microbatch before it may."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._n = context.rank, context.world_size
        self._store = c10d._get_default_store()
        self._calls = 0
        self.in_vain = False

    def sent(self, count: int) -> None:
        """Rank 0 has started so many collectives in this step."""
        if self._rank == 0 and count == 2:
            self._store.set("two buckets", "sent")

    def after_two_buckets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        self._calls += 1
        if 0 < self._rank == self._n - 1 and self._calls == len(SAMPLES[-1]):
            try:
                self._store.wait(["two buckets"], timedelta(seconds=WAIT_S))
            except dist.DistStoreError:
                self.in_vain = True
        return loss_of(outputs, targets)


# ── what is right ───────────────────────────────────────────────────────────────────


@lru_cache(maxsize=8)
def one_process(seed: int, n: int) -> list[list[Tensor]]:
    """By step: the gradients of each rank, a row for each microbatch."""
    model, steps = Zoo(seed), []
    for step in range(len(SAMPLES)):
        ranks = []
        for rank in range(n):
            loss_fn = loss_at(step, rank == n - 1)
            found = [
                flat(all_gradients(loss_fn(model(x), y), model))
                for x, y in microbatches(seed, step, rank)
            ]
            ranks.append(torch.stack(found))
        steps.append(ranks)
        mean = torch.stack([rank.sum(0) for rank in ranks]).mean(0)
        with torch.no_grad():
            sizes = [parameter.numel() for parameter in model.parameters()]
            for parameter, own in zip(
                model.parameters(), mean.split(sizes), strict=True
            ):
                parameter.sub_(LEARNING_RATE * own.view_as(parameter))
    return steps


def _suspects(ranks: list[Tensor]) -> list[Suspect]:
    n, count = len(ranks), len(ranks[0])
    sums = torch.stack([rank.sum(0) for rank in ranks])
    mean = sums.mean(0)

    def everywhere(value: Tensor) -> list[Tensor]:
        return same_everywhere(value, n)

    guesses: list[tuple[str, list[Tensor], str, str]] = [
        (
            "sum-not-mean",
            everywhere(mean * n),
            f"after accumulate, .grad is the sum over the {n} ranks, expected the mean",
            DIVIDE,
        ),
        (
            "divided-twice",
            everywhere(mean / n),
            f"after accumulate, .grad is divided by the {n} ranks twice, expected once",
            "divide the bucket once, before or after the all_reduce",
        ),
        (
            "own-gradient-only",
            list(sums),
            "after accumulate, each rank has its own gradients, expected the mean "
            "over ranks",
            "the last microbatch is not under no_sync(), and the hook sends the bucket",
        ),
        (
            "last-microbatch-only",
            everywhere(torch.stack([rank[-1] for rank in ranks]).mean(0)),
            "after accumulate, .grad has the last microbatch only, expected the sum "
            "of all",
            "backward() adds to .grad: do not set it to None in between",
        ),
        (
            "mean-of-microbatches",
            everywhere(mean / count),
            f"after accumulate, .grad is the mean of {count} microbatches, expected "
            "the sum",
            "accumulate() divides nothing: the sum over the microbatches",
        ),
    ]
    return [
        Suspect(slug=slug, values=values, sentence=sentence, rule=rule)
        for slug, values, sentence, rule in guesses
    ]


# ── the clauses ─────────────────────────────────────────────────────────────────────


def _plan(world_size: int) -> list[RunSpec]:
    return [on_ranks(hooked_steps, wire=wire) for wire in _wires(world_size)]


def _wires(world_size: int) -> tuple[str, ...]:
    return ("float32", "bfloat16") if world_size == WORLDS[-1] else ("float32",)


def _step(run: Run, step: int, key: str) -> list[Any]:
    return [value[step][key] for value in run.values]


@clause("torch_ports.data_parallel", "C1", worlds=WORLDS, runs=_plan)
def mean_of_the_sums(runs: Runs) -> str | None:
    """.grad after each step, as far as the dtype of the messages allows."""
    n, seed = runs.world_size, runs.seed
    for wire in _wires(n):
        run = finished(runs, hooked_steps, wire=wire)
        for step, ranks in enumerate(one_process(seed, n)):
            mean = torch.stack([rank.sum(0) for rank in ranks]).mean(0)
            found = _step(run, step, "gradients")
            if step == len(SAMPLES) - 1:
                found = _expect_infinite(found, mean, wire)
            expect_values(
                found,
                same_everywhere(mean, n),
                what=f"after call {step + 1} of accumulate with wire {wire}, .grad",
                suspects=_suspects(ranks) if step == 0 else [],
                tolerance=COARSE if wire == "bfloat16" else SINGLE,
            )
    return f"n = {n}: the mean over the ranks, in {len(SAMPLES)} steps"


def _expect_infinite(found: list[Tensor], mean: Tensor, wire: str) -> list[Tensor]:
    """What was infinite on rank 0 is so everywhere; the rest, with `mean` there."""
    is_bias = where(Zoo(0), lambda name, _: name == "last.bias")
    at = int(is_bias.argmax())
    told = [float(own[at]) for own in found]
    if any(own != torch.inf for own in told):
        raise NotYetError(
            f"with wire {wire} and an inf in rank 0's gradient, .grad is "
            f"{enumerated(f'{own:.3g}' for own in told)} there on the ranks, expected "
            "inf everywhere",
            evidence=[
                (rank, "has", f"{own:g}   expected inf")
                for rank, own in enumerate(told)
            ],
        )
    return [own.index_copy(0, torch.tensor([at]), mean[[at]]) for own in found]


@clause("torch_ports.data_parallel", "C2", worlds=WORLDS, runs=_plan)
def sent_once(runs: Runs) -> str | None:
    """Elements and dtype of what torch was asked to send."""
    n = runs.world_size
    size = sum(parameter.numel() for parameter in Zoo(0).parameters())
    for wire in _wires(n):
        run = finished(runs, hooked_steps, wire=wire)
        for step, sizes in enumerate(SAMPLES):
            sent = _step(run, step, "sent")
            _expect_elements([elements_of(own) for own in sent], size, len(sizes))
            _expect_dtype(sent, f"torch.{wire}")
    return f"{size} gradient elements, each sent once, whatever K is"


def _expect_elements(sent: list[float], size: int, count: int) -> None:
    off = [number for number in sent if not size <= number <= 1.25 * size]
    if not off:
        return
    every = count > 1 and set(sent) == {float(size * count)}
    raise NotYetError(
        f"in a step of {count} microbatch{'es' * (count > 1)}, rank "
        f"{sent.index(off[0])} sends {off[0]:g} elements, expected each of the {size} "
        "gradient elements once",
        slug="synced-every-microbatch" if every else "",
        evidence=_told([f"{number:g} elements" for number in sent]),
        rule=NO_SYNC if every else "",
    )


def _expect_dtype(sent: list[list[dict[str, Any]]], wire: str) -> None:
    dtypes = [sorted({record["dtype"] for record in own}) for own in sent]
    if all(own == [wire] for own in dtypes):
        return
    unchanged = dtypes[0] == ["torch.float64"]
    rank = next(rank for rank, own in enumerate(dtypes) if own != [wire])
    raise NotYetError(
        f"with wire={wire}, rank {rank} sends gradients as {enumerated(dtypes[rank])}, "
        f"expected {wire}"
        if dtypes[rank]
        else f"with wire={wire}, rank {rank} sends no gradients",
        slug="wire-dtype-ignored" if unchanged else "",
        evidence=_told([", ".join(own) for own in dtypes]),
        rule="the hook converts the bucket to `wire` before the all_reduce",
    )


def _told(texts: list[str]) -> tuple[Evidence, ...]:
    return tuple(Evidence(rank, "sent", text) for rank, text in enumerate(texts))


@clause("torch_ports.data_parallel", "C3", worlds=WORLDS, runs=_plan)
def no_hook_waits(runs: Runs) -> str | None:
    """Rank 0 sends its second bucket before the last rank has sent any."""
    for wire in _wires(runs.world_size):
        run = finished(runs, hooked_steps, wire=wire)
        counts = [len(own) for own in _step(run, len(SAMPLES) - 1, "sent")]
        if max(counts) < 2:
            raise NotYetError(
                f"with bucket_mib for {BUCKET_MIB * 2**20:.0f} bytes, all gradients "
                "are "
                f"sent in {max(counts)} message, expected several buckets",
                slug="one-giant-bucket",
                evidence=_told([f"{count} messages" for count in counts]),
                rule="bucket_cap_mb=bucket_mib",
            )
        if any(_step(run, len(SAMPLES) - 1, "waited_in_vain")):
            last = runs.world_size - 1
            raise NotYetError(
                f"while rank {last} was late, rank 0 waited for its first bucket's "
                "sum, expected it to send the second bucket without waiting",
                slug="waits-in-backward",
                evidence=_told([f"{count} messages" for count in counts]),
                rule=RETURN,
            )
    return f"n = {runs.world_size}: {min(counts)} buckets, none waits for another"
