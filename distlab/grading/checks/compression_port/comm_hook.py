"""Checks of task 4.18, `compression_port.comm_hook`: top-k in torch's DDP.

The parent works out from the buckets that DDP gave to the hook what every rank sends
and keeps, step by step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distlab.grading.checks.compression_port.expected import (
    Way,
    end_to_end,
    expect_infinite,
    without,
)
from distlab.grading.checks.compression_port.recorded import (
    ALL,
    BUCKET,
    RATIO,
    SMALL_RATIO,
    STEPS,
    steps_of_two_models,
    steps_with_hook,
)
from distlab.grading.clause import clause
from distlab.grading.kit.torch_group import finished
from distlab.grading.kit.values import (
    SINGLE,
    Suspect,
    close,
    expect_equal_bits,
    expect_values,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

TASK = "compression_port.comm_hook"
WORLDS = (3, 2)
ONE, SEVERAL = ALL, BUCKET
"""Elements of a bucket. With one bucket for all, a residual that is kept by the
bucket's index has the right size in every step."""
WHICH = "first", "second"
TOLERANCES = 1e-10, SINGLE  # of the first model and of the second, which is float32
OTHER_MODEL = "state-of-another-model"
RETURN = "return the futures' callback, futures.then(…): call with async_op=True"
COLLECT = "torch.futures.collect_all(futures).then(…): it begins when all are there"
TENSOR = "futures.then(f): f returns a tensor like bucket.buffer()"
OWN_STATE = "a TopKState(ratio) for each call of compressed(), residuals in it"

ONE_BUCKET = on_ranks(steps_with_hook, elements=ONE)
SEVERAL_BUCKETS = on_ranks(steps_with_hook, elements=SEVERAL).when(
    "with several buckets"
)
TWO_MODELS = on_ranks(steps_of_two_models).when("when two models train in turns")


def _played(runs: Runs, elements: int) -> Run:
    """The run of one model, or of two with `elements` 0; the hooks returned tensors.

    Raises:
        NotYetError: no hook was called, or it returned what DDP cannot use.
    """
    if elements:
        run = finished(runs, steps_with_hook, elements=elements)
    else:
        run = finished(runs, steps_of_two_models)
    for record in run.ranks:
        for steps in record.value:
            _expect_hooks(record.rank, steps)
    return run


def _expect_hooks(rank: int, steps: list[dict[str, Any]]) -> None:
    counts = [
        len(s["calls"]) for s in steps if s["calls"] or s["gradients"] is not None
    ]
    if 0 in counts:
        raise NotYetError(
            f"in step {counts.index(0) + 1}, DDP called no hook on rank {rank}, "
            "expected top_k_hook for each bucket",
            slug="hook-not-registered" if not any(counts) else "",
            rule="model.register_comm_hook(TopKState(ratio), top_k_hook)"
            if not any(counts)
            else "",
        )
    for call in (call for step in steps for call in step["calls"]):
        if call["returned"]:
            raise NotYetError(
                f"on rank {rank}, the hook returned a {call['returned']}, expected a "
                "Future of a tensor",
                slug="no-future",
                rule=RETURN,
            )
        if call["value"]:
            raise NotYetError(
                f"on rank {rank}, the hook's future gives a {call['value']}, expected "
                "a tensor",
                slug="no-future",
                rule=TENSOR,
            )


def _whole(runs: Runs, elements: int) -> Run:
    """A run in which every step has gradients.

    Raises:
        NotJudgedError: a callback that waited, or bytes that differ, have ended it.
        NotYetError: as `_played`.
    """
    run = _played(runs, elements)
    last = [steps[-1] for value in run.values for steps in value if steps]
    if any(step["gradients"] is None for step in last):
        raise NotJudgedError("see C3 and C4")
    return run


def _expect_step(run: Run, model: int, step: int, suspects: Any) -> None:
    n = len(run.values)
    actual = [value[model][step]["gradients"] for value in run.values]
    what = f"after step {step + 1}, .grad"
    if len(run.values[0]) > 1:
        what = f"with two models, the {WHICH[model]} one's .grad after step {step + 1}"
    expected = Way().gradients(run)[model][step]
    if infinite := expected.isinf().any():
        expect_infinite(actual, what)
        actual = [without(own) for own in actual]
    expect_values(
        actual,
        [without(expected) if infinite else expected] * n,
        what=what,
        suspects=suspects,
        tolerance=TOLERANCES[model],
    )
    expect_equal_bits(actual, what=what, slug="own-order-sum")


@clause(TASK, "C1", worlds=WORLDS, runs=[ONE_BUCKET, TWO_MODELS])
def mean_of_what_was_sent(runs: Runs) -> str | None:
    """.grad after the first step, where nothing is left from before."""
    run = _whole(runs, ONE)
    _expect_step(run, 0, 0, partial(_first_suspects, run))
    both = _whole(runs, 0)
    _expect_step(both, 0, 0, partial(_small_suspects, both, 0))
    shared = Way(by_number=True).gradients(both)[1][0]
    others = [value[1][0]["gradients"] for value in both.values]
    if not all(close(own, shared, TOLERANCES[1]) for own in others):
        _expect_step(both, 1, 0, partial(_small_suspects, both, 1))  # else: see C2
    k = int(RATIO * ALL)
    return f"n = {runs.world_size}: one bucket, its {k} largest of {ALL} elements"


def _first_suspects(run: Run) -> list[Suspect]:
    n, mean = len(run.values), Way().gradients(run)[0][0]
    full = [end_to_end(value[0][0]["calls"]) for value in run.values]
    guesses = [
        (
            "sum-not-mean",
            [mean * n] * n,
            f"the gradients are the sum over the {n} ranks, expected their mean",
            "a hook replaces DDP's division: divide by dist.get_world_size()",
        ),
        (
            "divided-twice",
            [mean / n] * n,
            f"the gradients are 1/{n} of the ranks' mean, expected the mean: they "
            "were divided twice",
            "divide once",
        ),
        (
            "same-index-overwritten",
            [Way(overwrites=True).gradients(run)[0][0]] * n,
            "where ranks sent the same index, only the last rank's value is kept, "
            "expected the values added",
            "flat[indices] = values writes once: index_add_ adds",
        ),
        (
            "added-to-own-gradient",
            [own + mean for own in full],
            "each rank added the mean to its own gradients in the buffer, expected "
            "the mean alone",
            "zero the buffer first",
        ),
    ]
    return [
        Suspect(slug=slug, values=values, sentence=sentence, rule=rule)
        for slug, values, sentence, rule in guesses
    ]


def _small_suspects(run: Run, model: int) -> list[Suspect]:
    n = len(run.values)
    other = (RATIO, SMALL_RATIO)[1 - model]
    guesses = [
        (
            "nothing-sent",
            Way(least=0),
            f"with ratio {SMALL_RATIO} and {ALL} elements or fewer, the hook sent "
            "nothing, expected at least one element",
            "k = max(1, int(ratio * elements))",
        ),
        (
            OTHER_MODEL,
            Way(ratios=(other, other)),
            f"with two models, the {WHICH[model]} one's hook uses the other's ratio, "
            f"{other}, expected {(RATIO, SMALL_RATIO)[model]}",
            OWN_STATE,
        ),
    ]
    return [
        Suspect(
            slug=slug,
            values=[way.gradients(run)[model][0]] * n,
            sentence=sentence,
            rule=rule,
        )
        for slug, way, sentence, rule in guesses
    ]


@clause(
    TASK,
    "C2",
    worlds=WORLDS,
    runs=[ONE_BUCKET, SEVERAL_BUCKETS, TWO_MODELS],
    after=("C1",),
)
def nothing_is_lost(runs: Runs) -> str | None:
    """All steps, against guesses of what was kept, and under which key."""
    for elements in (ONE, SEVERAL, 0):
        run = _whole(runs, elements)
        for step in range(STEPS):
            for model in range(len(run.values[0])):
                _expect_step(run, model, step, partial(_later, run, model, step))
    return f"n = {runs.world_size}: {STEPS} steps, with one bucket and with several"


def _later(run: Run, model: int, step: int) -> list[Suspect]:
    n = len(run.values)
    guesses: list[tuple[str, str, Way, str]] = [
        (
            "no-error-feedback",
            "what earlier steps did not send is lost, expected it added to the "
            "gradients",
            Way(keeps=lambda corrected, sent, mean: torch.zeros_like(corrected)),
            "",
        ),
        (
            "residual-by-bucket-index",
            "a bucket got the residual of the earlier bucket with the same index, "
            "expected that of its own parameters",
            Way(by_index=True),
            "keep residuals by parameter: bucket.parameters()",
        ),
        (
            OTHER_MODEL,
            "the other model's residuals were added, expected each model to keep its "
            "own",
            Way(by_number=True),
            OWN_STATE,
        ),
        (
            "residual-of-the-mean",
            "each rank's residual lacks the mean of all ranks, expected it to lack "
            "what this rank sent",
            Way(keeps=lambda corrected, sent, mean: corrected - mean),
            "each rank keeps what it did not send itself",
        ),
        (
            "residual-in-the-buffer",
            "the residual is a view of the buffer and holds the mean written there "
            "later, expected a tensor of its own",
            Way(keeps=lambda corrected, sent, mean: mean),
            "gradients + residual is a new tensor; += writes into the buffer",
        ),
        (
            "sent-and-kept",
            "each rank sent the same elements again, expected the residual without "
            "what was sent",
            Way(keeps=lambda corrected, sent, mean: corrected),
            "",
        ),
        (
            "",
            "a rank sent the first k elements that reach the k-th magnitude, expected "
            "the k largest: ties came before larger ones",
            Way(threshold=True),
            "topk itself has the k largest: take its indices",
        ),
    ]
    return [
        Suspect(
            slug=slug,
            values=[way.gradients(run)[model][step]] * n,
            sentence=f"in step {step + 1}, {sentence}",
            rule=rule,
        )
        for slug, sentence, way, rule in guesses
        if slug != OTHER_MODEL or len(run.values[0]) > 1
    ]


@clause(TASK, "C3", worlds=WORLDS, runs=[SEVERAL_BUCKETS, TWO_MODELS])
def bytes_are_saved(runs: Runs) -> str | None:
    """What each call of the hook asks torch to send, by the byte meter's cost."""
    n = runs.world_size
    for elements in (SEVERAL, 0):
        _expect_as_many(_played(runs, elements))
        for record in _whole(runs, elements).ranks:
            for model, steps in enumerate(record.value):
                for call in (call for step in steps for call in step["calls"]):
                    _expect_bytes(record.rank, call, n, (RATIO, SMALL_RATIO)[model])
    return f"n = {n}: 12 bytes in float64 for each of the k elements, {n - 1} times"


def _expect_as_many(run: Run) -> None:
    """All ranks send as many bytes for a bucket, as all_gather needs."""
    for of_model in zip(*run.values, strict=True):
        for of_step in zip(*of_model, strict=False):  # an error may have ended a rank
            for calls in zip(*(found["calls"] for found in of_step), strict=False):
                counts = [sum(count for _, count in call["sent"]) for call in calls]
                if len(set(counts)) > 1:
                    raise NotYetError(
                        "the ranks send different numbers of elements of the same "
                        "bucket, expected k on each, even among zeros",
                        slug="collective-mismatch",
                        evidence=_told(counts, "bytes for the same bucket"),
                    )


def _expect_bytes(rank: int, call: dict[str, Any], n: int, ratio: float) -> None:
    size = len(call["gradients"])
    k = max(1, int(ratio * size))
    width = call["gradients"].element_size()
    limit, sent = (n - 1) * k * (4 + width), sum(count for _, count in call["sent"])
    if sent <= limit:
        return
    dense, wide = (n - 1) * size * width // n, (n - 1) * k * (8 + width)
    slug, rule = "", ""
    if any(count >= dense for _, count in call["sent"]) and size > 2 * k:
        slug, rule = "sent-dense", "send the k values and their indices"
    elif sent == wide and any("int64" in name for name, _ in call["sent"]):
        slug, rule = "wide-indices", "indices.to(torch.int32)"
    raise NotYetError(
        f"rank {rank} sends {sent} bytes for a bucket of {size} elements, expected at "
        f"most {limit}: {k} indices and values to each of {n - 1} other ranks",
        slug=slug,
        evidence=[
            (rank, "sent", f"{name}: {count} bytes") for name, count in call["sent"][:4]
        ],
        rule=rule,
    )


@clause(TASK, "C4", worlds=WORLDS, runs=[SEVERAL_BUCKETS])
def no_hook_waits(runs: Runs) -> str | None:
    """Rank 0's hooks return before the last rank sends; callbacks do not wait."""
    run = _played(runs, SEVERAL)
    n, steps = runs.world_size, [value[0] for value in run.values]
    for rank, of_rank in enumerate(steps):
        if any(call["waits"] for step in of_rank for call in step["calls"]):
            raise NotYetError(
                f"on rank {rank}, a future's callback waits for another message, on a "
                "thread that gloo needs, expected no wait there",
                slug="waits-in-callback",
                rule=COLLECT,
            )
    for rank, of_rank in enumerate(steps):
        calls = [call for step in of_rank for call in step["calls"]]
        if of_rank[-1]["gradients"] is None and any(c["sends_later"] for c in calls):
            raise NotYetError(
                f"on rank {rank}, a future's callback starts another collective and "
                "torch fails, expected all in the hook: callbacks have no order",
                slug="collective-mismatch",
                rule="start all collectives in the hook",
            )
    for number in range(len(steps[0])):
        _expect_no_wait([of_rank[number] for of_rank in steps], number)
    counts = [len(of_rank[-1]["calls"]) for of_rank in steps]
    if max(counts) < 2:
        raise NotYetError(
            "DDP put all gradients into one bucket, expected buckets of "
            f"{8 * BUCKET} bytes, as bucket_mib says",
            slug="one-giant-bucket",
            evidence=_told(counts),
            rule="bucket_cap_mb=bucket_mib",
        )
    return f"n = {n}: {min(counts)} buckets, no hook waits for another rank"


def _expect_no_wait(step: list[dict[str, Any]], number: int) -> None:
    if not any(found["waited_in_vain"] for found in step):
        return
    raise NotYetError(
        f"in step {number + 1}, rank 0's hook did not return before rank "
        f"{len(step) - 1} had sent something, expected it to return a Future at once",
        slug="waits-in-backward",
        evidence=_told([len(found["calls"]) for found in step]),
        rule=RETURN,
    )


def _told(counts: list[int], what: str = "calls of the hook") -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, "has", f"{count} {what}") for rank, count in enumerate(counts)
    )
