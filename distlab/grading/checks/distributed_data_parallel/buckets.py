"""Checks of task 3.9, `distributed_data_parallel.buckets`: C1 to C3, the buckets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

_BY_TENSOR = "backward() computes the last tensor's gradient first"
_BY_BUCKET = (
    "a bucket can be sent when its lowest-numbered tensor has its gradient: "
    "first comes the bucket that is complete first"
)

Buckets = list[list[int]]
Spec = tuple[int, str, str]
"""A tensor: how many numbers, dtype, device."""


@dataclass(frozen=True)
class Model:
    """Tensors to be shared out into buckets of at most `cap` bytes."""

    name: str
    specs: tuple[Spec, ...]
    cap: int

    def tensors(self) -> list[Tensor]:
        """One of each, in their order: scalars, matrices, slices of larger memory."""
        return [
            torch.empty(2 * count, dtype=getattr(torch, dtype), device=device)[
                :count
            ].view(_shape(count))
            for count, dtype, device in self.specs
        ]

    def bytes_of(self, place: int) -> int:
        """How large a tensor is."""
        count, dtype, _ = self.specs[place]
        return int(count * getattr(torch, dtype).itemsize)

    def has_one_kind(self, *places: int) -> bool:
        """Whether these tensors may share a bucket."""
        return len({self.specs[place][1:] for place in places}) == 1

    @property
    def situation(self) -> str:
        """The tensors and the limit, as a headline begins."""
        sizes = [str(self.bytes_of(place)) for place in range(len(self.specs))]
        told = self.name
        if self.is_uniform:
            told = f"{len(sizes)} tensors"
            if 1 < len(sizes) < 7:
                told = f"tensors of {', '.join(sizes)} bytes"
        return f"with {told} and bucket_bytes={self.cap},"

    @property
    def is_uniform(self) -> bool:
        """Whether any two of its tensors may share a bucket."""
        return len({spec[1:] for spec in self.specs}) == 1


def _shape(count: int) -> tuple[int, ...]:
    if count == 1:
        return ()
    return (2, count // 2) if count % 2 == 0 else (count,)


def _alike(name: str, counts: list[int], cap: int, dtype: str = "float32") -> Model:
    return Model(name, tuple((count, dtype, "cpu") for count in counts), cap)


def models(seed: int) -> list[Model]:
    """What is shared out; some of it depends on the seed."""
    draw = random.Random(seed)
    wide, thin = ("float64", "cpu"), ("bfloat16", "cpu")
    elsewhere = ("float32", "meta")
    return [
        _alike("8, 8, 40 and 8 bytes", [2, 2, 10, 2], 16),
        _alike("tensors that fill a bucket to the last byte", [3, 1, 2, 2, 4, 4], 16),
        _alike("tensors that are all too large", [9, 9, 9], 16),
        _alike("one bucket for all", [5, 0, 3, 4, 1], 4096),
        _alike("float64", [2, 2, 2, 2, 3], 32, "float64"),
        _alike("one tensor", [4], 16),
        _alike("drawn", [draw.randint(1, 9) for _ in range(17)], 48),
        Model("two dtypes", ((4, *wide), (4, *wide), (4, *thin), (4, *thin)), 64),
        Model("two dtypes of 16 bits", ((4, *thin), (4, "float16", "cpu")) * 2, 64),
        Model("alternating dtypes", ((4, *wide), (4, *thin)) * 3, 64),
        Model("a large bucket, then two small", ((2, *wide),) * 2 + ((6, *thin),), 32),
        Model("two devices", ((4, "float32", "cpu"), (4, *elsewhere)) * 2, 64),
        Model("tensors of a GiB", ((2**28, *elsewhere),) * 7, 2**32),
    ]


def lay_out(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """Each model's buckets, as the places of their tensors; -1 is a foreign one."""
    found: list[Any] = []
    for model in models(seed):
        given = model.tensors()
        places = {id(tensor): place for place, tensor in enumerate(given)}
        with in_call(f"assign_buckets({model.name}, bucket_bytes={model.cap})"):
            buckets = unit.assign_buckets(given, model.cap)
        if buckets is None:
            found.append(
                "returned None, expected a list of lists: is a return missing?"
            )
        elif not isinstance(buckets, list | tuple) or any(
            not isinstance(bucket, list | tuple) for bucket in buckets
        ):
            found.append("didn't return a list of lists, expected one list per bucket")
        else:
            found.append([[places.get(id(t), -1) for t in b] for b in buckets])
    return found


def _laid_out(runs: Runs) -> Iterator[tuple[Model, Buckets]]:
    run = worked_out(runs, lay_out)
    for model, buckets in zip(models(runs.seed), run.values[0], strict=True):
        if isinstance(buckets, str):
            raise NotYetError(
                f"{model.situation} assign_buckets {buckets}",
                rule="return a list with a list of tensors for each bucket",
                fatal=True,
            )
        yield model, buckets


@clause(
    "distributed_data_parallel.buckets", "C1", worlds=(1,), runs=[on_ranks(lay_out)]
)
def each_tensor_from_last_to_first(runs: Runs) -> str | None:
    """The tensors themselves, each once, in the order in which backward() comes."""
    for model, buckets in _laid_out(runs):
        flaw, slug = _flaw(model, buckets)
        if flaw:
            placed = sorted(place for bucket in buckets for place in bucket)
            is_order = placed == list(range(len(model.specs)))
            raise NotYetError(
                f"{model.situation} {flaw}",
                slug=slug,
                evidence=_table(model, buckets),
                rule=(_BY_BUCKET if _misplaced(buckets) else _BY_TENSOR) * is_order,
            )
    return f"{len(models(runs.seed))} models"


def _flaw(model: Model, buckets: Buckets) -> tuple[str, str]:
    """What is wrong with who is where, and its name if it has one; or nothing."""
    placed = [place for bucket in buckets for place in bucket]
    everyone = list(range(len(model.specs)))
    if -1 in placed:
        return (
            "a bucket holds a tensor that was not an argument, expected only those",
            "",
        )
    if [] in buckets:
        return f"bucket {buckets.index([])} is empty, expected no such bucket", ""
    missing = [place for place in everyone if place not in placed]
    if missing:
        return (
            f"tensor {missing[0]} is in no bucket, expected every tensor in one",
            "tensor-in-no-bucket",
        )
    if sorted(placed) != everyone:
        twice = next(place for place in everyone if placed.count(place) > 1)
        return f"tensor {twice} is in two buckets, expected it in only one", ""
    if len(everyone) > 2 and placed == everyone:
        return (
            "the first tensor is in the first bucket, expected it in the last one",
            "buckets-in-forward-order",
        )
    return _order(buckets), ""


def _order(buckets: Buckets) -> str:
    """What comes too early; or nothing."""
    for number, bucket in enumerate(buckets):
        for one, other in pairwise(bucket):
            if one < other:
                return (
                    f"in bucket {number}, tensor {one} comes before tensor {other}, "
                    "expected the other order"
                )
    return _misplaced(buckets)


def _misplaced(buckets: Buckets) -> str:
    """The first bucket that comes before one that is complete earlier; or nothing.

    Nothing either if a bucket's own tensors are out of order.
    """
    if any(bucket != sorted(bucket, reverse=True) for bucket in buckets):
        return ""
    for number, (one, other) in enumerate(pairwise(bucket[-1] for bucket in buckets)):
        if one < other:  # its last tensor is the last one to have a gradient
            return (
                f"bucket {number}, with tensor {one}, comes before bucket "
                f"{number + 1}, with tensor {other}, expected the other order: "
                f"tensor {other}'s gradient is ready first"
            )
    return ""


@clause(
    "distributed_data_parallel.buckets", "C2", worlds=(1,), runs=[on_ranks(lay_out)]
)
def full_and_not_too_full(runs: Runs) -> str | None:
    """No bucket above the limit, and none that could have taken the next tensor."""
    laid_out = list(_laid_out(runs))
    if any(_flaw(*entry)[0] for entry in laid_out):
        raise NotJudgedError("the tensors are not where they must be: see C1")
    for model, buckets in laid_out:
        sizes = [sum(map(model.bytes_of, bucket)) for bucket in buckets]
        for number, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
            if size > model.cap and len(bucket) > 1:
                raise _not_full_right(
                    laid_out,
                    model,
                    buckets,
                    f"bucket {number} has {size} bytes in {len(bucket)} tensors, "
                    f"expected at most {model.cap}",
                )
        for number, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
            after = bucket[-1] - 1
            if after < 0 or not model.has_one_kind(bucket[-1], after):
                continue
            if size + model.bytes_of(after) <= model.cap:
                raise _not_full_right(
                    laid_out,
                    model,
                    buckets,
                    f"bucket {number} ends after {size} bytes, expected it to hold the "
                    f"next tensor, of {model.bytes_of(after)} bytes, too",
                )
    return None


def _not_full_right(
    laid_out: list[tuple[Model, Buckets]], model: Model, buckets: Buckets, flaw: str
) -> NotYetError:
    plain = [entry for entry in laid_out if entry[0].is_uniform]
    slug = ""
    if all(own == _from_the_first(each) for each, own in plain):
        flaw = "the buckets were filled from the first tensor, expected from the last"
    if all(len(own) == 1 for _, own in plain):
        slug = "one-giant-bucket"
    elif all(len(own) == len(each.specs) for each, own in plain):
        slug = "bucket-per-parameter"
    elif all(own == _by_count(each) for each, own in plain):
        slug = "elements-not-bytes"
    return NotYetError(
        f"{model.situation} {flaw}",
        slug=slug,
        evidence=_table(model, buckets),
        rule="a bucket ends when the next tensor does not fit",
    )


def _by_count(model: Model) -> Buckets:
    """What comes of counting numbers in place of bytes."""
    buckets: Buckets = []
    left = 0
    for place in reversed(range(len(model.specs))):
        count = model.specs[place][0]
        if count > left or not buckets:
            buckets.append([])
            left = model.cap
        buckets[-1].append(place)
        left -= count
    return buckets


def _from_the_first(model: Model) -> Buckets:
    """What comes of filling buckets from the first tensor on, and turning all round."""
    buckets: Buckets = []
    left = 0
    for place in range(len(model.specs)):
        size = model.bytes_of(place)
        if size > left or not buckets:
            buckets.insert(0, [])
            left = model.cap
        buckets[0].insert(0, place)
        left -= size
    return buckets


@clause(
    "distributed_data_parallel.buckets", "C3", worlds=(1,), runs=[on_ranks(lay_out)]
)
def one_kind_in_a_bucket(runs: Runs) -> str | None:
    """A bucket is one flat tensor, and that has one dtype and one device."""
    for model, buckets in _laid_out(runs):
        for number, bucket in enumerate(buckets):
            kinds = sorted({model.specs[p][1:] for p in bucket if p >= 0})
            if len(kinds) > 1:
                both = " and ".join(f"{dtype} on {where}" for dtype, where in kinds[:2])
                raise NotYetError(
                    f"{model.situation} bucket {number} holds {both}, "
                    "expected one dtype and one device",
                    slug="mixed-bucket",
                    evidence=_table(model, buckets),
                    rule="a flat tensor has one dtype and one device: begin another",
                )
    return None


def _table(model: Model, buckets: Buckets) -> tuple[Evidence, ...]:
    lines = []
    for number, bucket in enumerate(buckets[:4]):
        text = ", ".join(
            f"tensor {place} ({model.bytes_of(place)} B)" if place >= 0 else "another"
            for place in bucket[:5]
        )
        lines.append(Evidence(NOBODY, f"bucket {number}", text or "empty"))
    return tuple(lines)
