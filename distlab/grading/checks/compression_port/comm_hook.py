"""Checks of task 4.18, `compression_port.comm_hook`: top-k in torch's DDP.

The parent works out from the buckets that DDP gave to the hook what every rank sends
and keeps, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.compression_port.recorded import (
    LAYERS,
    RATIO,
    STEPS,
    WIDTH,
    steps_with_hook,
)
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.torch_group import finished
from distlab.grading.kit.values import Suspect, expect_equal_bits, expect_values
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

TASK = "compression_port.comm_hook"
WORLDS = (3, 2)
BUCKETS = {3: LAYERS, 2: 2}
"""Layers of a bucket by world size. With one bucket for all, a residual that is kept by
the bucket's index has the right size in every step."""
SIZE = WIDTH * WIDTH  # elements of a parameter
RETURN = "return the futures' callback, futures.then(…): call with async_op=True"

Keeps = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From corrected, sent (zeros elsewhere) and the ranks' mean of it: the residual."""


def right(corrected: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
    """What was not sent."""
    return corrected - sent


def expected(
    run: Run,
    keeps: Keeps = right,
    *,
    by_index: bool = False,
    overwrites: bool = False,
    ratio: float = RATIO,
) -> list[Tensor]:
    """By step: .grad of all parameters end to end, from the buckets of each rank."""
    held: list[dict[int, Tensor]] = [{} for _ in run.values]
    steps = []
    for step in range(STEPS):
        found = torch.zeros(LAYERS, SIZE, dtype=torch.float64)
        for calls in zip(*(own[step]["calls"] for own in run.values), strict=True):
            places = [c["index"] * LAYERS for c in calls] if by_index else None
            keys = _keys(calls[0], places[0] if places else None)
            parts = [
                c["gradients"] + torch.cat([h.get(k, _zeros()) for k in keys])
                for c, h in zip(calls, held, strict=True)
            ]
            sent = [_only(part, ratio) for part in parts]
            mean = torch.stack(sent).mean(0)
            if overwrites:
                mean = _overwritten(sent) / len(sent)
            for own, part, mine in zip(held, parts, sent, strict=True):
                kept = keeps(part, mine, mean).split(SIZE)
                own.update(zip(keys, kept, strict=True))
            found[calls[0]["parameters"]] = mean.view(-1, SIZE)
        steps.append(found.flatten())
    return steps


def _keys(call: dict[str, Any], first: int | None) -> list[int]:
    numbers: list[int] = call["parameters"]
    return numbers if first is None else list(range(first, first + len(numbers)))


def _zeros() -> Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)


def _only(values: Tensor, ratio: float) -> Tensor:
    kept = torch.zeros_like(values)
    at = values.abs().topk(max(1, int(ratio * len(values)))).indices
    kept[at] = values[at]
    return kept


def _overwritten(sent: list[Tensor]) -> Tensor:
    total = torch.zeros_like(sent[0])
    for one in sent:
        total = torch.where(one != 0, one, total)
    return total


def _plan(world_size: int) -> list[RunSpec]:
    return [on_ranks(steps_with_hook, layers=BUCKETS[world_size])]


def _played(runs: Runs) -> Run:
    """The run; all ranks had the hook called with the same buckets.

    Raises:
        NotYetError: no hook was called.
    """
    run = finished(runs, steps_with_hook, layers=BUCKETS[runs.world_size])
    for record in run.ranks:
        counts = [len(step["calls"]) for step in record.value]
        if min(counts) == 0:
            raise NotYetError(
                f"rank {record.rank}: no hook was called in step "
                f"{counts.index(0) + 1}: DDP sends all gradients",
                slug="hook-not-registered" if not any(counts) else "",
                rule="model.register_comm_hook(TopKState(ratio), top_k_hook)"
                if not any(counts)
                else "",
            )
    return run


def _expect_step(run: Run, step: int, suspects: Any) -> None:
    n = len(run.values)
    actual = [value[step]["gradients"] for value in run.values]
    what = f"step {step + 1}: .grad"
    expect_values(actual, [expected(run)[step]] * n, what=what, suspects=suspects)
    expect_equal_bits(actual, what=what, slug="own-order-sum")


@clause(TASK, "C1", worlds=WORLDS, runs=_plan)
def mean_of_what_was_sent(runs: Runs) -> str | None:
    """V: .grad after the first step, where nothing is left from before."""
    run = _played(runs)
    _expect_step(run, 0, partial(_first_suspects, run))
    sizes = sorted({len(call["gradients"]) for call in run.values[0][-1]["calls"]})
    return f"n = {runs.world_size}: buckets of {' and '.join(map(str, sizes))} elements"


def _first_suspects(run: Run) -> list[Suspect]:
    n, mean = len(run.values), expected(run)[0]
    full = torch.stack([_end_to_end(value[0]["calls"]) for value in run.values])
    guesses = [
        (
            "sum-not-mean",
            [mean * n] * n,
            f"the gradients are the sum over the {n} ranks, never divided",
            "a hook replaces DDP's division: divide by dist.get_world_size()",
        ),
        (
            "divided-twice",
            [mean / n] * n,
            f"the gradients are 1/{n} of the mean over the ranks: divided twice",
            "divide once",
        ),
        (
            "same-index-overwritten",
            [expected(run, overwrites=True)[0]] * n,
            "where several ranks sent the same index, only the last rank's value is "
            "there",
            "flat[indices] = values writes once: index_add_ adds",
        ),
        (
            "added-to-own-gradient",
            [own + mean for own in full],
            "the mean was added to this rank's own gradients, which were still in the "
            "buffer",
            "zero the buffer first",
        ),
    ]
    return [
        Suspect(slug=slug, values=values, sentence=sentence, rule=rule)
        for slug, values, sentence, rule in guesses
    ]


def _end_to_end(calls: list[dict[str, Any]]) -> Tensor:
    found = torch.zeros(LAYERS, SIZE, dtype=torch.float64)
    for call in calls:
        found[call["parameters"]] = call["gradients"].view(-1, SIZE)
    return found.flatten()


@clause(TASK, "C2", worlds=WORLDS, runs=_plan)
def nothing_is_lost(runs: Runs) -> str | None:
    """V: all steps, against guesses of what was kept, and under which key."""
    run = _played(runs)
    with judged_after(mean_of_what_was_sent, runs, "C1"):
        for step in range(STEPS):
            _expect_step(run, step, partial(_later, run, step))
    return f"n = {runs.world_size}: {STEPS} steps"


def _later(run: Run, step: int) -> list[Suspect]:
    n = len(run.values)
    by_index = partial(expected, run, by_index=True)
    guesses: list[tuple[str, str, list[Tensor], str]] = [
        (
            "no-error-feedback",
            "what the steps before did not send is lost",
            expected(run, lambda corrected, sent, mean: torch.zeros_like(corrected)),
            "",
        ),
        (
            "residual-by-bucket-index",
            "the residual of a bucket was added to the bucket of the same index, which "
            "has other parameters now",
            by_index(),
            "keep residuals by parameter: bucket.parameters()",
        ),
        (
            "residual-of-the-mean",
            "the residual is the corrected gradient minus the ranks' mean, not minus "
            "what this rank sent",
            expected(run, lambda corrected, sent, mean: corrected - mean),
            "each rank keeps what it did not send itself",
        ),
        (
            "sent-and-kept",
            "what was sent is kept as well, and is sent again",
            expected(run, lambda corrected, sent, mean: corrected),
            "",
        ),
    ]
    return [
        Suspect(
            slug=slug,
            values=[values[step]] * n,
            sentence=f"step {step + 1}: {sentence}",
            rule=rule,
        )
        for slug, sentence, values, rule in guesses
    ]


@clause(TASK, "C3", worlds=WORLDS, runs=_plan)
def bytes_are_saved(runs: Runs) -> str | None:
    """B: what each call of the hook asks torch to send, by the byte meter's cost."""
    n = runs.world_size
    run = _played(runs)
    for record in run.ranks:
        for step in record.value:
            for call in step["calls"]:
                _expect_bytes(record.rank, call, n)
    return f"n = {n}: 12 bytes for each of the k elements, {n - 1} times"


def _expect_bytes(rank: int, call: dict[str, Any], n: int) -> None:
    size = len(call["gradients"])
    k = max(1, int(RATIO * size))
    limit, sent = (n - 1) * k * (4 + 8), sum(count for _, count in call["sent"])
    if sent <= limit:
        return
    dense, wide = (n - 1) * size * 8 // n, (n - 1) * k * (8 + 8)
    slug, rule = "", ""
    if any(count >= dense for _, count in call["sent"]):
        slug, rule = "sent-dense", "send the k values and their indices"
    elif sent == wide and any("int64" in name for name, _ in call["sent"]):
        slug, rule = "wide-indices", "indices.to(torch.int32)"
    raise NotYetError(
        f"rank {rank} sends {sent} bytes for a bucket, expected at most {limit}: "
        f"{n - 1} times {k} indices and values",
        slug=slug,
        evidence=tuple(
            Evidence(rank=rank, state="sent", text=f"{name}: {count} bytes")
            for name, count in call["sent"][:4]
        ),
        rule=rule,
    )


@clause(TASK, "C4", worlds=(2,), runs=_plan)
def no_hook_waits(runs: Runs) -> str | None:
    """O: rank 0's hook is called again before the last rank has sent any gradient."""
    run = _played(runs)
    last, n = STEPS - 1, runs.world_size
    counts = [len(value[last]["calls"]) for value in run.values]
    told = tuple(
        Evidence(rank=rank, state="calls", text=f"{count} calls of the hook")
        for rank, count in enumerate(counts)
    )
    if max(counts) < 2:
        raise NotYetError(
            f"one bucket has all gradients: expected buckets of {8 * 2 * SIZE} bytes",
            slug="one-giant-bucket",
            evidence=told,
            rule="bucket_cap_mb=bucket_mib",
        )
    if any(value[last]["waited_in_vain"] for value in run.values):
        raise NotYetError(
            f"the hook was not called for rank 0's second bucket until rank {n - 1} "
            "had sent its first: it waited for a message",
            slug="waits-in-backward",
            evidence=told,
            rule=RETURN,
        )
    return f"n = {n}: {min(counts)} buckets, no hook waits for another rank"
