"""Checks of 3.12, `sharded_optimizer.plan`: who owns what, and the bytes of a rank."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

Piece = tuple[int, int, int]
Shards = list[list[Piece]]

CASES: tuple[tuple[list[int], int], ...] = (
    *(([17, 2, 9, 1], 5), ([10], 4), ([2, 1, 1], 7), ([1], 4), ([5, 3], 1)),
    *(([7, 7, 7], 3), ([3, 4], 2), ([4, 0, 3], 3), ([6, 1, 2, 12], 8)),
    ([1_000_003, 64], 64),
)
"""(sizes, world_size): remainders, fewer elements than ranks, a parameter on many."""
SIZES = ((1_000_000_000, 8), (10, 4), (3, 8), (1_001, 7), (64, 1))
PER_ELEMENT = ((4, 4, 8), (2, 2, 12), (8, 8, 16))
RULE = "rank r's shard is elements r · s … (r + 1) · s - 1 of the vector, s = ⌈N / n⌉"
FORMULA = "a shard is ⌈N / n⌉ elements; stage 1 shards the state, stage 2 also the "
FORMULA += "gradients, stage 3 also the weights"


def cases(seed: int) -> list[tuple[list[int], int]]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    drawn = [
        ([draw.randint(1, 40) for _ in range(draw.randint(2, 7))], draw.randint(2, 9))
        for _ in range(6)
    ]
    return [*CASES, *drawn]


def make_plans(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The shards of each case, or what they are instead."""
    found = []
    for sizes, world_size in cases(seed):
        with in_call(f"plan({sizes}, {world_size})"):
            found.append(read_shards(unit.plan(list(sizes), world_size)))
    return found


def count_bytes(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What `bytes_per_rank` gives for each size, kind and stage."""
    found = []
    for size, world_size in SIZES:
        for kind in PER_ELEMENT:
            for stage in range(4):
                with in_call(f"bytes_per_rank({size}, {world_size}, {stage}, {kind})"):
                    value = unit.bytes_per_rank(size, world_size, stage, kind)
                    found.append(value if isinstance(value, int | float) else None)
    with in_call("bytes_per_rank(1000, 8, 1)"):
        found.append(unit.bytes_per_rank(1000, 8, 1))
    return found


def read_shards(value: Any) -> Shards | str:
    """Lists of three integers, or what it is instead, to go on after "plan"."""
    if value is None:
        return "returned None, expected a list per rank: is a return missing?"
    try:
        return [
            [(_whole(which), _whole(start), _whole(stop)) for which, start, stop in one]
            for one in value
        ]
    except (TypeError, ValueError):
        return f"returned {value!r:.40}, expected a list of shard ranges for each rank"


def _whole(value: Any) -> int:
    return operator.index(value)


def right_plan(sizes: list[int], world_size: int) -> Shards:
    """Chunk r of the vector, as pieces."""
    share = -(-sum(sizes) // world_size)
    shards: Shards = [[] for _ in range(world_size)]
    place = 0
    for which, size in enumerate(sizes):
        for rank in range(world_size):
            start = max(0, rank * share - place)
            stop = min(size, (rank + 1) * share - place)
            if start < stop:
                shards[rank].append((which, start, stop))
        place += size
    return shards


def _plans(runs: Runs) -> Iterator[tuple[str, list[int], int, Shards | str]]:
    found = worked_out(runs, make_plans).values[0]
    for (sizes, n), shards in zip(cases(runs.seed), found, strict=True):
        if not isinstance(shards, str):
            shards = [[(a, b, c) for a, b, c in one] for one in shards]
        yield f"plan({sizes}, {n})", sizes, n, shards


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause("sharded_optimizer.plan", "C1", worlds=(1,), runs=[on_ranks(make_plans)])
def each_element_once(runs: Runs) -> str | None:
    """Among n lists, each element of each parameter is in one piece only."""
    for call, sizes, n, shards in _plans(runs):
        if isinstance(shards, str):
            raise NotYetError(f"{call} {shards}", rule=RULE, fatal=True)
        if len(shards) != n:
            raise NotYetError(
                f"{call} returned {len(shards)} shards, expected {n}",
                rule="one list per rank; a rank without elements has an empty list",
                fatal=True,
            )
        if outside := counted_in_the_vector(sizes, shards):
            which, start, stop = outside
            raise NotYetError(
                f"in {call}, a range of parameter {which} is {start} to {stop}, "
                "counted in the whole vector, expected from its first element",
                evidence=_drawn(shards),
                rule="start and stop count from the first element of the parameter",
            )
        flaw, slug = _flaw(sizes, shards)
        if flaw:
            raise NotYetError(
                f"in {call}, {flaw}", slug=slug, evidence=_drawn(shards), rule=RULE
            )
    return "1 element on 4 ranks: rank 0 has it, the other shards are empty"


def counted_in_the_vector(sizes: list[int], shards: Shards) -> Piece | None:
    """A range that lies in the vector where its parameter does, and not in it."""
    begins = [sum(sizes[:which]) for which in range(len(sizes))]
    pieces = [piece for one in shards for piece in one]
    if any(which not in range(len(sizes)) for which, _, _ in pieces):
        return None
    is_all = all(
        begins[which] <= start <= stop <= begins[which] + sizes[which]
        for which, start, stop in pieces
    )
    beyond = [piece for piece in pieces if piece[2] > sizes[piece[0]]]
    return beyond[0] if is_all and beyond else None


def _flaw(sizes: list[int], shards: Shards) -> tuple[str, str]:
    for which, size in enumerate(sizes):
        pieces = sorted(
            (a, b) for one in shards for w, a, b in one if w == which and a < b
        )
        place = 0
        for start, stop in pieces:
            if start < place:
                return (
                    f"element {start} of parameter {which} is in two "
                    "shards, expected in one",
                    "",
                )
            if start > place:
                return (
                    f"element {place} of parameter {which} is in no shard, "
                    "expected in one",
                    "",
                )
            place = stop
        if place < size:
            n, before = len(shards), sum(sizes[:which]) + place
            is_rest = before == n * (sum(sizes) // n)
            slug = "remainder-unowned" if is_rest else ""
            return (
                f"element {place} of parameter {which} is in no shard, expected in one",
                slug,
            )
        if place > size:
            return (
                f"a range of parameter {which} ends after its {size} elements",
                "",
            )
    known = range(len(sizes))
    strange = [w for one in shards for w, _, _ in one if w not in known]
    return (f"a range is of parameter {strange[0]}", "") if strange else ("", "")


def _drawn(shards: Shards) -> tuple[Evidence, ...]:
    lines = [
        Evidence(rank, "owns", ", ".join(map(str, one))[:60] or "nothing")
        for rank, one in enumerate(shards)
    ]
    return tuple(lines[:8])


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause("sharded_optimizer.plan", "C2", worlds=(1,), runs=[on_ranks(make_plans)])
def chunk_by_chunk(runs: Runs) -> str | None:
    """Rank r has the pieces of chunk r, in order, and no empty ones."""
    for call, sizes, n, shards in _plans(runs):
        if isinstance(shards, str) or len(shards) != n or _flaw(sizes, shards)[0]:
            raise NotJudgedError("elements are missing or repeated: see C1")
        if shards == right_plan(sizes, n):
            continue
        if any(start >= stop for one in shards for _, start, stop in one):
            raise NotYetError(
                f"{call} returned an empty range, expected no empty ranges",
                evidence=_drawn(shards),
                rule="a parameter without elements in a chunk is not in its list",
            )
        sentence, slug = _other_plan(sizes, n, shards)
        raise NotYetError(
            f"in {call}, {sentence}", slug=slug, evidence=_drawn(shards), rule=RULE
        )
    return None


def _other_plan(sizes: list[int], n: int, shards: Shards) -> tuple[str, str]:
    counts = [_length(one) for one in shards]
    pieces = [piece for one in shards for piece in one]
    if len(sizes) > 1 and all((w, 0, sizes[w]) in pieces for w, _, _ in pieces):
        return (
            "each parameter is whole on one rank, expected the vector in n chunks",
            "full-parameters",
        )
    split = [right_plan([size], n) for size in sizes]
    each = [
        [(w, a, b) for w, s in enumerate(split) for _, a, b in s[r]] for r in range(n)
    ]
    if len(sizes) > 1 and sorted(map(sorted, shards)) == sorted(map(sorted, each)):
        return (
            "each parameter is cut into n chunks, expected the parameters end to end "
            "to be cut into n",
            "sharded-per-parameter",
        )
    if max(counts) > -(-sum(sizes) // n):
        most = f"rank {counts.index(max(counts))} has {max(counts)} elements"
        share = -(-sum(sizes) // n)
        return f"{most}, expected at most {share}", "one-shard-larger"
    if counts != (wanted := [_length(one) for one in right_plan(sizes, n)]):
        told, right = (", ".join(map(str, some)) for some in (counts, wanted))
        return f"the ranks have {told} elements, expected {right}", ""
    chunks = right_plan(sizes, n)
    rank = next(r for r in range(n) if shards[r] != chunks[r])
    if sorted(shards[rank]) == chunks[rank]:
        return f"rank {rank}'s ranges are out of order, expected the vector's order", ""
    return f"rank {rank} has other elements than chunk {rank}, which is expected", ""


def _length(shard: list[Piece]) -> int:
    return sum(stop - start for _, start, stop in shard)


# ── C3 ──────────────────────────────────────────────────────────────────────────────


def right_bytes(size: int, n: int, stage: int, per_element: tuple[int, ...]) -> int:
    """The formula."""
    share = -(-size // n)
    weight, gradient, state = per_element
    whole_or_shard = [share if stage >= first else size for first in (3, 2, 1)]
    return sum(
        c * b for c, b in zip(whole_or_shard, (weight, gradient, state), strict=True)
    )


@clause("sharded_optimizer.plan", "C3", worlds=(1,), runs=[on_ranks(count_bytes)])
def bytes_of_a_rank(runs: Runs) -> str | None:
    """Whole or shard, for each of the three, at each stage."""
    found = worked_out(runs, count_bytes).values[0]
    values = iter(found)
    for size, n in SIZES:
        for kind in PER_ELEMENT:
            told = [next(values) for _ in range(4)]
            right = [right_bytes(size, n, stage, kind) for stage in range(4)]
            if told != right:
                raise _wrong_bytes((size, n, kind), told, right)
    default, right_one = next(values), right_bytes(1000, 8, 1, (4, 4, 8))
    if default != right_one:
        raise NotYetError(
            f"bytes_per_rank(1000, 8, 1) returned {default}, expected {right_one} with "
            "the default per_element",
            rule="the default of per_element is 4, 4 and 8 bytes",
        )
    return "1,000,000,000 elements on 8 ranks: 16, 9, 5.5 and 2 GB"


def _wrong_bytes(
    case: tuple[int, int, tuple[int, ...]], told: list[Any], right: list[int]
) -> NotYetError:
    size, n, kind = case
    stage = next(s for s in range(4) if told[s] != right[s])
    slug = ""
    rounded = [right_bytes(n * (size // n), n, s, kind) for s in (1, 2, 3)]
    backward = tuple(reversed(kind))
    if stage > 0 and told[3] == rounded[2] and size % n:
        slug = "remainder-unowned"
    elif told == [right_bytes(size, n, s, backward) for s in range(4)]:
        slug = "stages-swapped"
    return NotYetError(
        f"bytes_per_rank({size}, {n}, {stage}, {kind}) returned {told[stage]}, "
        f"expected {right[stage]}",
        slug=slug,
        evidence=[
            (NOBODY, f"stage {s}", f"expected {right[s]}   got {told[s]}")
            for s in range(4)
        ],
        rule=FORMULA,
    )
