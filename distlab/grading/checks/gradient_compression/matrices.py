"""What ranks do in 4.15 with buckets of no, one, two and three matrices.

The parameters are in other buckets, and in another order, from step 3 on, as torch's
DDP does it after its first step: what is kept belongs to a parameter, not to a place.
So what the parent expects is worked out by parameter.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.given.gradient_compression import FlatBucket, Residuals, first_factor
from distlab.grading.checks.gradient_compression.hooked import Listener
from distlab.runner import RankContext

RANK, STEPS, MOVED = 2, 4, 2
SHAPES: tuple[tuple[int, ...], ...] = (
    (5, 6), (4,), (11, 9), (), (6, 6), (5, 6), (3,), (2,), (2, 3, 2), (1, 8), (5,),
    (3, 4), (6, 4),
)  # fmt: skip
EMPTY, LOW = 11, 12
"""In the first step the ranks' sum of EMPTY is zero and that of LOW has the rank 1;
what an orthonormal basis adds to such a P is any."""
OLD = [[1, 0, 3, 2, 6, 4], [7, 10], [5], [9, 8, 11, 12]]
NEW = [[4, 10, 0], [6, 2, 11, 5, 1], [3, 7], [8, 9, 12]]
"""The parameters of each bucket, in their order: before step MOVED, and from it on."""
FACTORS = {5: 1e-6, 4: 1e6}
"""Parameters whose gradients are so much smaller or larger than the others'."""
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]
OTHERS = [i for i, shape in enumerate(SHAPES) if len(shape) <= 1]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]

Rows = list[list[list[Tensor]]]
"""By step, parameter and rank: its gradient, or its part of a bucket; flat."""


def narrow_dtype(world_size: int) -> str:
    """Which other dtype a bucket has, beside float64."""
    return "bfloat16" if world_size == 2 else "float32"


def layout(step: int) -> list[list[int]]:
    """The parameters of each bucket."""
    return OLD if step < MOVED else NEW


def sides(parameter: int) -> tuple[int, int]:
    """The rows and the columns of a matrix."""
    rows = SHAPES[parameter][0]
    return rows, SIZES[parameter] // rows


@lru_cache(maxsize=32)
def gradients(seed: int, n: int) -> Rows:
    """In the first step the sum of each matrix has the rank RANK or less."""
    generator = torch.Generator().manual_seed(seed * 211 + n)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found: Rows = []
    for step in range(STEPS):
        found.append([])
        for parameter, size in enumerate(SIZES):
            factor = FACTORS.get(parameter, 1.0)
            ranks = [factor * drawn(size) for _ in range(n)]
            if parameter in MATRICES and step == 0:
                rows, columns = sides(parameter)
                rank = {EMPTY: 0, LOW: 1}.get(parameter, min(RANK, rows, columns))
                basis = drawn(rows, rank)
                lows = [basis @ drawn(rank, columns) for _ in range(n)]
                ranks = [factor * low.reshape(-1) for low in lows]
            found[-1].append(ranks)
    return found


def compress_several(
    context: RankContext, unit: ModuleType, seed: int, dtype: str = "float64"
) -> dict[str, Any]:
    """STEPS steps with all buckets in flight at once; each is waited for twice."""
    kind, rank = getattr(torch, dtype), context.rank
    hook, heard, sums = unit.PowerSGD(RANK), list[list[Any]](), list[list[Tensor]]()
    parameters = [torch.zeros(shape, dtype=kind) for shape in SHAPES]
    counts: list[list[list[str]]] = []
    kept = torch.zeros(0)
    for step, of_parameters in enumerate(gradients(seed, context.world_size)):
        buckets, works, comms = [], [], []
        for places in layout(step):
            parts = [of_parameters[i][rank].to(kind) for i in places]
            buckets.append(
                FlatBucket([parameters[i] for i in places], torch.cat(parts))
            )
            comms.append(Listener(context.comm, []))
            works.append(hook(comms[-1], buckets[-1]))
        for comm, work in zip(comms, works, strict=True):
            comm.when = "wait"
            if not hasattr(work, "wait"):
                told = {"sums": [], "heard": heard, "counts": counts, "kept": kept}
                return {**told, "returned": [repr(work)[:60]]}
            work.wait()
            comm.when = "again"
            work.wait()
        sums.append([torch.zeros(0)] * len(SHAPES))
        for places, bucket in zip(layout(step), buckets, strict=True):
            lengths = [SIZES[i] for i in places]
            for i, part in zip(places, bucket.flat.split(lengths), strict=True):
                sums[-1][i] = part.clone()
        heard += [call for comm in comms for call in comm.heard]
        counts.append([[c[0] for c in comm.heard] for comm in comms])
        kept = _kept_of_others(hook, parameters, kind)
    told = {"sums": sums, "heard": heard, "counts": counts, "kept": kept}
    return {**told, "returned": []}


def _kept_of_others(hook: Any, parameters: list[Tensor], kind: torch.dtype) -> Tensor:
    """The residual of what is summed exactly, where it is kept as given."""
    some = [parameters[i] for i in OTHERS]
    flat = torch.zeros(sum(SIZES[i] for i in OTHERS), dtype=kind)
    residuals = getattr(hook, "residuals", None)
    if not isinstance(residuals, Residuals):
        return flat
    return residuals.of(FlatBucket(some, flat))


@lru_cache(maxsize=64)
def expected(seed: int, n: int, mistake: str = "") -> Rows:
    """By step, parameter and rank what is in the bucket; a mistake is one in all."""
    found: Rows = [[[] for _ in SHAPES] for _ in range(STEPS)]
    for parameter in range(len(SHAPES)):
        own = [row[parameter] for row in gradients(seed, n)]
        if parameter in OTHERS:
            sums = [[torch.stack(ranks).sum(0)] * n for ranks in own]
        else:
            sums = _of_matrix(parameter, own, mistake)
        for step, ranks in enumerate(sums):
            found[step][parameter] = ranks
    return found


def _of_matrix(
    parameter: int, own: list[list[Tensor]], mistake: str
) -> list[list[Tensor]]:
    rows, columns = sides(parameter)
    n, zeros = len(own[0]), torch.zeros(rows, columns, dtype=torch.float64)
    factor, held = first_factor(zeros, RANK), [zeros] * n
    found = []
    for ranks in own:
        parts = [g.view(rows, columns) + h for g, h in zip(ranks, held, strict=True)]
        p = torch.stack([m @ factor for m in parts]).sum(0)
        if mistake != "not-orthonormal":
            p = torch.linalg.qr(p).Q
        qs = [m.T @ p for m in parts]
        q = torch.stack(qs).sum(0)
        sums = [p @ q.T] * n
        if mistake == "factor-not-summed":
            sums = [p @ one.T for one in qs]
        if mistake != "no-error-feedback":
            held = [m - s / n for m, s in zip(parts, sums, strict=True)]
        if mistake != "factor-forgotten":
            factor = q
        found.append([s.reshape(-1) for s in sums])
    return found
