"""Checks of task 4.10, `gradient_compression.top_k`: C2 to C5, steps of two buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.grading.checks.gradient_compression.hooked import (
    NUM_BUCKETS,
    STEPS,
    WORLDS,
    Gradients,
    bytes_over,
    expect_kept_in_residuals,
    expect_no_wait_in_call,
    expect_work,
    heard_lines,
    sums_of,
    take_steps,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    SINGLE,
    Suspect,
    expect_equal_bits,
    expect_values,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "gradient_compression.top_k"
SIZE, RATIO = 40, 0.1  # four of forty
OVERFLOW = 1
NARROW = 2  # with so many ranks bucket 1 is float32
NEAR = {torch.float64: 1e-10, torch.float32: SINGLE}


@lru_cache(maxsize=32)
def gradients(seed: int, n: int) -> Gradients:
    """Ranks have their largest elements partly in common; large ones are negative.

    All is float64, but see NARROW. In step OVERFLOW an element of the last rank is inf.
    """
    found: Gradients = []
    for step in range(STEPS):
        found.append([])
        for bucket in range(NUM_BUCKETS):
            generator = torch.Generator().manual_seed(seed * 101 + 7 * step + bucket)
            shape, more = (SIZE,), {"generator": generator, "dtype": torch.float64}
            common = torch.randn(shape, **more)  # type: ignore[call-overload]
            common = -3.0 * common.abs() ** 2
            ranks = [
                common + torch.randn(shape, **more)  # type: ignore[call-overload]
                for _ in range(n)
            ]
            if not step and not bucket:
                for rank, own in enumerate(ranks):
                    own[rank] = 30.0 + rank  # no two ranks choose the same elements
            if bucket and n == NARROW:
                ranks = [rank.float() for rank in ranks]
            if step == OVERFLOW and not bucket:
                ranks[-1][5] = torch.inf
            found[-1].append(ranks)
    return found


def compress(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Steps with the class TopK as the hook."""
    hook = unit.TopK(RATIO)
    return take_steps(context, hook, gradients(seed, context.world_size))


class Moment(NamedTuple):
    """What a rank has when it keeps its residual; `sent` has zeros elsewhere."""

    gradient: Tensor
    corrected: Tensor
    sent: Tensor
    total: Tensor  # of what all ranks have sent
    num_ranks: int


Keeps = Callable[[Moment], Tensor]
Sends = Callable[[Tensor, Tensor], Tensor]
"""From the gradient and the corrected one: what is sent, with zeros elsewhere."""


def right(now: Moment) -> Tensor:
    """What was not sent."""
    return now.corrected.where(now.sent == 0, 0.0)


def _largest(gradient: Tensor, corrected: Tensor) -> Tensor:
    return _only(corrected, corrected)


def expected(
    seed: int,
    n: int,
    keeps: Keeps = right,
    add: bool = True,
    share: bool = False,
    sends: Sends = _largest,
) -> list[list[Tensor]]:
    """By step and bucket the sum; `share`: one residual for both buckets."""
    return _played(seed, n, keeps, add, share, sends)[0]


def _played(
    seed: int,
    n: int,
    keeps: Keeps = right,
    add: bool = True,
    share: bool = False,
    sends: Sends = _largest,
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The sums, and by bucket and rank what is left after the last step."""
    held = [[torch.zeros(SIZE, dtype=torch.float64)] * n for _ in range(NUM_BUCKETS)]
    sums = list[list[Tensor]]()
    for of_buckets in gradients(seed, n):
        sums.append([])
        for number, ranks in enumerate(of_buckets):
            place = 0 if share else number
            parts = [g + h for g, h in zip(ranks, held[place], strict=True)]
            sent = [sends(g, part) for g, part in zip(ranks, parts, strict=True)]
            total = torch.stack(sent).sum(0)
            if not add:  # the last rank's value where several sent one
                for one in sent:
                    total = torch.where(one != 0, one, total)
            every = torch.stack(sent).sum(0)
            held[place] = [
                keeps(Moment(g, p, s, every, n))
                for g, p, s in zip(ranks, parts, sent, strict=True)
            ]
            sums[-1].append(total)
    return sums, held


def _only(values: Tensor, by: Tensor) -> Tensor:
    """The values where `by` is largest, zeros elsewhere."""
    kept = torch.zeros_like(values)
    at = by.abs().topk(max(1, int(RATIO * SIZE))).indices
    kept[at] = values[at]
    return kept


def _in_single(gradient: Tensor, corrected: Tensor) -> Tensor:
    return _only(corrected, corrected).float().double()


@clause(TASK, "C2", worlds=WORLDS, runs=[on_ranks(compress)])
def sum_of_what_was_sent(runs: Runs) -> str | None:
    """The first bucket of the first step, where nothing is left from before."""
    n, seed = runs.world_size, runs.seed
    run = runs.finished(compress)
    expect_work(run)
    _expect_sum(runs, 0, 0, _first_suspects(seed, n))
    expect_messages(run, "bucket.flat is right, but comm was not used")
    return f"n = {n}: 4 of {SIZE} elements of each rank"


def _expect_sum(runs: Runs, step: int, bucket: int, suspects: Any) -> None:
    n = runs.world_size
    actual = sums_of(runs.finished(compress), step, bucket)
    infinite = ""
    if step >= OVERFLOW and not bucket:
        infinite = f", after an inf in step {OVERFLOW + 1}"
    if step == OVERFLOW and not bucket:
        infinite = ", with an inf gradient"
    dtype = gradients(runs.seed, n)[step][bucket][0].dtype
    single = " (float32)" * (dtype == torch.float32)
    both = ", with two buckets in flight" * bool(bucket)
    what = f"in step {step + 1}{infinite}{both}, bucket {bucket}{single}"
    expect_values(
        actual,
        [expected(runs.seed, n)[step][bucket]] * n,
        what=what,
        suspects=suspects,
        tolerance=NEAR[dtype],
    )
    expect_equal_bits(actual, what=what, slug="own-order-sum")


def _first_suspects(seed: int, n: int) -> list[Suspect]:
    own, sums = gradients(seed, n)[0][0], expected(seed, n)[0][0]
    overwritten = "where ranks sent the same index, only the last rank's value is kept"
    adds = "flat[indices] = values writes once, += too: index_add_ adds"
    wide = "take the dtype from what you send: values.new_empty(…)"
    return [
        Suspect(
            slug="same-index-overwritten",
            values=[expected(seed, n, add=False)[0][0]] * n,
            sentence=f"{overwritten}, expected the sum",
            rule=adds,
        ),
        Suspect(
            slug="wrong-dtype",
            values=[expected(seed, n, sends=_in_single)[0][0]] * n,
            sentence="the gathered values are float32, expected the bucket's float64",
            rule=wide,
        ),
        Suspect(
            slug="same-index-overwritten",
            values=[expected(seed, n, add=False, sends=_in_single)[0][0]] * n,
            sentence=f"{overwritten} as float32, expected the sum in float64",
            rule=f"{adds}; {wide}",
        ),
        Suspect(
            slug="added-to-own-gradient",
            values=[g + sums for g in own],
            sentence="each rank added the sum to its own gradient in bucket.flat, "
            "expected the sum alone",
            rule="zero bucket.flat first",
        ),
        Suspect(
            slug="divided-twice",
            values=[sums / n] * n,
            sentence="bucket.flat holds the ranks' mean, expected their sum, which DDP "
            "divides itself",
            rule="leave the sum in bucket.flat: DDP divides it",
        ),
        Suspect(
            slug="own-gradient-only",
            values=[_only(g, g) for g in own],
            sentence="every rank has only what it sent itself, expected the sum of "
            "what all ranks sent",
        ),
    ]


@clause(TASK, "C3", worlds=WORLDS, runs=[on_ranks(compress)], after=("C2",))
def nothing_is_lost(runs: Runs) -> str | None:
    """All steps and buckets, against guesses of what was kept."""
    for step, bucket in product(range(STEPS), reversed(range(NUM_BUCKETS))):
        _expect_sum(runs, step, bucket, partial(_later, runs, step, bucket))
    run, left = runs.finished(compress), _played(runs.seed, runs.world_size)[1]
    expect_kept_in_residuals(run, left, SINGLE)
    return f"n = {runs.world_size}: {STEPS} steps of {NUM_BUCKETS} buckets"


class _Guess(NamedTuple):
    """A known mistake with the residual."""

    slug: str
    sentence: str
    keeps: Keeps = right
    rule: str = ""
    share: bool = False
    sends: Sends = _largest


_OWN = "each rank keeps what it did not send itself"
GUESSES = (
    _Guess(
        "no-error-feedback",
        "the residual of earlier steps is lost, expected each rank to add it to its "
        "gradient",
        lambda now: torch.zeros_like(now.corrected),
    ),
    _Guess(
        "residual-of-the-mean",
        "each rank subtracted the mean over all ranks to get its residual, expected it "
        "to subtract only what it sent itself",
        lambda now: now.corrected - now.total / now.num_ranks,
        _OWN,
    ),
    _Guess(
        "residual-of-the-sum",
        "each rank subtracted the sum over all ranks to get its residual, expected it "
        "to subtract only what it sent itself",
        lambda now: now.corrected - now.total,
        _OWN,
    ),
    _Guess(
        "sent-and-kept",
        "each rank left the elements that it sent in its residual, expected it to "
        "remove them",
        lambda now: now.corrected,
    ),
    _Guess(
        "residual-shared",
        "all buckets use the same residual, expected one for each bucket",
        share=True,
    ),
    _Guess(
        "old-residual-lost",
        "each rank kept the unsent elements of its gradient alone, expected the unsent "
        "elements of gradient + residual",
        lambda now: now.gradient.where(now.sent == 0, 0.0),
        "keep what is left of gradient + residual",
    ),
    _Guess(
        "old-residual-lost",
        "the residual is the gradient minus what was sent, expected gradient + "
        "residual minus what was sent",
        lambda now: now.gradient - now.sent,
        "keep what is left of gradient + residual",
    ),
    _Guess(
        "chosen-without-residual",
        "each rank chose the largest elements of its gradient alone, expected those "
        "of gradient + residual",
        rule="choose from gradient + residual",
        sends=lambda gradient, corrected: _only(corrected, gradient),
    ),
)


def _later(runs: Runs, step: int, bucket: int) -> list[Suspect]:
    n, seed = runs.world_size, runs.seed
    return [
        Suspect(
            slug=guess.slug,
            values=[
                expected(seed, n, guess.keeps, share=guess.share, sends=guess.sends)[
                    step
                ][bucket]
            ]
            * n,
            sentence=f"in step {step + 1}, {guess.sentence}",
            rule=guess.rule,
        )
        for guess in GUESSES
    ]


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


@clause(TASK, "C4", worlds=WORLDS, runs=[on_ranks(compress)])
def bytes_are_saved(runs: Runs) -> str | None:
    """What each rank gives to collectives and messages, by their cost."""
    n, k = runs.world_size, max(1, int(RATIO * SIZE))
    run = runs.finished(compress)
    value = 6 if n == NARROW else 8  # the mean of both buckets
    each = k * (4 + value)  # int32 and a value
    limit = (n - 1) * each
    if over := bytes_over(run, STEPS, limit):
        rank, sent = over
        dense = sent >= (n - 1) / n * SIZE * value
        raise NotYetError(
            f"rank {rank} sends {sent:.0f} bytes for a bucket of {SIZE} elements, "
            f"expected {limit} for {k} indices and values, sent {_times(n - 1)}",
            slug="sent-dense" if dense else "",
            evidence=heard_lines(run),
            rule="send the k values and their indices, not a tensor of zeros"
            if dense
            else "",
        )
    whole = 2 * (n - 1) / n * SIZE * value
    return f"n = {n}: {limit} bytes per bucket, dense {whole:.0f}"


@clause(TASK, "C5", worlds=(3, 2), runs=[on_ranks(compress)])
def the_call_returns_at_once(runs: Runs) -> str | None:
    """Calls and waits between the call of the hook and its return."""
    expect_no_wait_in_call(runs.finished(compress))
    return None
