"""Checks of 3.14, `sharded_optimizer.clip`: the norm, and the gradients after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.grading.checks.sharded_optimizer import scenarios, shards
from distlab.grading.checks.sharded_optimizer.mistakes import buckets_of, owner_of_each
from distlab.grading.checks.sharded_optimizer.stage1 import WORLDS
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError

TASK = "sharded_optimizer.clip"
TORCH_EPSILON = 1e-6
"""What torch's clip_grad_norm_ adds to the norm: as right as without it."""
RULE = "sum the squares of all elements of all shards; take the root last"


def full_gradient(seed: int, number: int) -> dict[str, Tensor]:
    """The gradient that is clipped to MAX_NORMS[number]."""
    weights = scenarios.weights_of(scenarios.make_model(seed))
    return shards.gradient_to_clip(seed, number, weights)


@clause(TASK, "C1", worlds=WORLDS, runs=[on_ranks(shards.clip_gradients)])
def one_norm_for_all(runs: Runs) -> str | None:
    """The norm that clip returns, on every rank."""
    run, n = runs.finished(shards.clip_gradients), runs.world_size
    owners = owner_of_each(runs.seed, n)
    for number, max_norm in enumerate(shards.MAX_NORMS):
        reports = [value[number]["norm"] for value in run.values]
        odd = [norm for norm in reports if not isinstance(norm, int | float)]
        if odd:
            raise NotYetError(
                f"clip returned a {type(odd[0]).__name__}, expected a number",
                rule="float(…) converts a tensor with one element",
            )
        norms = [torch.tensor([norm], dtype=torch.float64) for norm in reports]
        values = flat(full_gradient(runs.seed, number))
        what = f"with max_norm {max_norm:g}, the norm that clip returns"
        if number == shards.INFINITE:
            _expect_infinite(reports)
            continue
        if number == shards.ZERO:
            what = "for a gradient of zeros, the norm that clip returns"
        if number == shards.LONE:
            what = "where only rank 0's gradient isn't zero, the norm that clip returns"
        norm = values.norm().reshape(1)
        parts = [values[owners == rank].norm().reshape(1) for rank in range(n)]
        expect_values(
            norms,
            same_everywhere(norm, n),
            what=what,
            suspects=_suspects(norm, parts, max_norm),
        )
        expect_equal_bits(
            norms,
            what="the norm",
            slug="own-order-sum",
            rule="all ranks must add the squares in the same order, or use one "
            "rank's sum",
        )
    return None


def _expect_infinite(reports: list[float]) -> None:
    """Of a gradient with an infinite element, on one rank: all learn of it."""
    finite = [rank for rank, norm in enumerate(reports) if norm != math.inf]
    if finite:
        raise NotYetError(
            "when one element of the gradient is inf, clip returned "
            f"{reports[finite[0]]:.3g} on rank {finite[0]}, expected inf",
            evidence=[
                (rank, "returns", f"{norm}   expected inf")
                for rank, norm in enumerate(reports)
            ],
        )


WHOLE = ", expected the norm of the whole gradient"


def _suspects(norm: Tensor, parts: list[Tensor], max_norm: float) -> list[Suspect]:
    n, norms = len(parts), torch.stack(parts)
    found = [
        ("norm-of-own-shard", parts, "the norm of this rank's shards only"),
        ("norms-added", [norms.sum(0)] * n, "the sum of the ranks' norms"),
        ("", [norms.mean(0)] * n, "the mean of the ranks' norms"),
        ("", [norms.amax(0)] * n, "the largest of the ranks' norms"),
        ("", [norm**2] * n, "the sum of squares, not its root"),
        ("", [norm / n**0.5] * n, "the root of the mean over the ranks of the squares"),
    ]
    suspects = [
        Suspect(
            slug=slug, values=values, sentence=f"clip returned {what}{WHOLE}", rule=RULE
        )
        for slug, values, what in found
    ]
    after = Suspect(
        slug="norm-after-clipping",
        values=same_everywhere(norm.clamp(max=max_norm), n),
        sentence="clip returned the norm after clipping, expected the norm before it",
        rule="return the norm that was compared with max_norm",
    )
    return [*suspects, after]


@clause(
    TASK, "C2", worlds=WORLDS, runs=[on_ranks(shards.clip_gradients)], after=("C1",)
)
def scaled_to_max_norm(runs: Runs) -> str | None:
    """The shards' gradients after clip."""
    _expect_scaled(runs)
    return None


def _expect_scaled(runs: Runs) -> None:
    run, n = runs.finished(shards.clip_gradients), runs.world_size
    for number, max_norm in enumerate(shards.MAX_NORMS):
        gradient = full_gradient(runs.seed, number)
        norm = float(flat(gradient).norm())
        buckets = [
            torch.cat([gradient[name].reshape(-1) for name in bucket])
            for bucket in buckets_of(runs.seed)
        ]
        factor = max_norm / norm if norm > max_norm else 1.0
        given = [value[number]["gradient"] for value in run.values]
        if norm > max_norm and all_close(
            given,
            _shards(buckets, [max_norm / (norm + TORCH_EPSILON)] * len(buckets), n),
        ):
            continue
        expect_values(
            given,
            _shards(buckets, [factor] * len(buckets), n),
            what=f"after clip of a gradient of norm {norm:.3g} with max_norm "
            f"{max_norm:g}, shard.grad",
            suspects=_wrong_factors(buckets, norm, max_norm, n),
        )


def _shards(
    buckets: Sequence[Tensor], factors: Sequence[float], n: int
) -> list[Tensor]:
    """What each rank has of the buckets, each times its factor."""
    chunks: list[list[Tensor]] = [[] for _ in range(n)]
    for values, factor in zip(buckets, factors, strict=True):
        padded = torch.cat([values * factor, values.new_zeros(-len(values) % n)])
        for rank, chunk in enumerate(padded.chunk(n)):
            chunks[rank].append(chunk)
    return [torch.cat(chunk) for chunk in chunks]


def _wrong_factors(
    buckets: Sequence[Tensor], norm: float, max_norm: float, n: int
) -> list[Suspect]:
    """What other factors would leave; none of them has a name of its own."""
    each = [max_norm / max(float(values.norm()), max_norm) for values in buckets]
    found = [
        (
            [max_norm / norm if norm else 1.0] * len(buckets),
            f"with max_norm {max_norm:g}, clip scaled a gradient of norm "
            f"{norm:.3g} up, "
            "expected no change",
            "scale only if norm > max_norm",
        ),
        (
            [1.0] * len(buckets),
            f"with max_norm {max_norm:g}, clip left a gradient of norm {norm:.3g} "
            f"unchanged, expected norm {max_norm:g}",
            "change shard.grad in place: multiply by max_norm / norm",
        ),
        (
            each,
            "clip scaled each bucket by its own norm, expected the norm of all buckets",
            "one norm of all buckets, and one factor for all of them",
        ),
        (
            [max_norm / norm / n if norm else 1.0] * len(buckets),
            "clip divided the gradient by the number of ranks, expected "
            "the mean to stay",
            "the shards hold the mean gradient already",
        ),
    ]
    return [
        Suspect(slug="", values=_shards(buckets, factors, n), sentence=text, rule=rule)
        for factors, text, rule in found
    ]
