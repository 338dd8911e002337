"""C4 of 4.2, `monitoring.suspects`: counted on each rank, then averaged over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from distlab.comm import Call, Comm, Work, Wrapper
from distlab.grading.checks.monitoring.recorded import INF, NAN, number
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call
from distlab.grading.kit.values import brief, close, largest_error
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

T = TypeVar("T")
WORLDS = (3, 2, 1, 4)
SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (), (5,), (0, 4), (2,))
BAD: tuple[tuple[float, ...], ...] = ((), (NAN,), (INF,), (-INF, NAN), (NAN, NAN, INF))
"""What is put among the elements, case by case."""


def gradients_of(seed: int, rank: int, bad: tuple[float, ...] = ()) -> list[Tensor]:
    """A rank's gradients; `bad` elements are in the third and, if three, the second."""
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES
    ]
    for place, value in enumerate(bad):
        if place == 2:
            tensors[1].fill_(value)
        else:
            tensors[2][2 * place] = value
    return tensors


def count(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What count_nonfinite returns for each case, and for parameters without .grad.

    The second gradient is a transpose: its elements are not next to each other.
    """
    found = []
    for bad in BAD:
        first, single, third, *others = gradients_of(seed, 0, bad)
        gradients: list[Tensor | None] = [third, first.t(), None, single, *others]
        with in_call(f"count_nonfinite with {words(bad)}"):
            one_by_one = (g for g in [*gradients, None])  # any Iterable
            found.append(number(unit.count_nonfinite(one_by_one), int))
    with in_call("count_nonfinite([None])"):
        found.append(number(unit.count_nonfinite([None]), int))
    return found


def words(bad: tuple[float, ...]) -> str:
    """The elements that are not finite, in words."""
    return " and ".join(str(value) for value in bad) or "finite elements only"


def origin(world_size: int) -> int:
    """The rank whose gradients have them."""
    return world_size // 2


class Clocked(Wrapper):
    """A clock that advances by a second in each call that waits, and in each wait().

    A call with async_op=True takes no time: it returns at once.
    """

    def __init__(self, inner: Comm, took: dict[str, float]) -> None:
        super().__init__(inner)
        self.took = took

    def now_s(self) -> float:
        """The seconds so far."""
        return sum(self.took.values())

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.blocking:
            self.took["calls"] += 1
            return proceed()
        return _Waited(proceed(), self.took)  # type: ignore[return-value,arg-type]

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return Clocked(group, self.took)


class _Waited:
    def __init__(self, work: Work, took: dict[str, float]) -> None:
        self._work, self._took, self._is_first = work, took, True

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._took["waits"] += self._is_first
        self._is_first = False
        self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


def reduce(context: RankContext, unit: ModuleType, seed: int, poisoned: bool) -> Any:
    """One call of reduce_gradients, with a clock that advances in collectives."""
    comm = Clocked(context.comm, {"calls": 0.0, "waits": 0.0})
    timer = unit.StepTimer(comm.now_s)
    bad = BAD[-1] if poisoned and context.rank == origin(context.world_size) else ()
    gradients = [t.to(comm.device) for t in gradients_of(seed, context.rank, bad)]
    told = number(unit.reduce_gradients(comm, timer, gradients), int)
    return {
        "count": told,
        "gradients": gradients,
        "seconds": dict(timer.seconds),
        "took": comm.took,
    }


@clause(
    "monitoring.suspects",
    "C4",
    worlds=WORLDS,
    runs=[
        on_ranks(count).when("for a list with None and an empty gradient"),
        on_ranks(reduce, poisoned=False),
        on_ranks(reduce, poisoned=True),
    ],
)
def counted_first(runs: Runs) -> str | None:
    """Counts of the rank's own gradients, means over the ranks, measured."""
    _expect_counts(runs.finished(count).values[0])
    for poisoned in (False, True):
        _expect_reduced(runs, poisoned)
    return None


def _expect_counts(found: list[Any]) -> None:
    cases = [*BAD, ()]
    for told, bad in zip(found, cases, strict=True):
        if told == len(bad):
            continue
        if isinstance(told, str):
            raise NotYetError(f"count_nonfinite returned {told}")
        slug = rule = ""
        no_nan = [0] * len(cases)
        only_nan = [sum(map(math.isnan, case)) for case in cases]
        if found == no_nan:
            slug, rule = "nan-compared", "nan == nan is False: torch.isfinite"
        elif found == only_nan:
            slug, rule = "inf-not-counted", "inf is not finite either: torch.isfinite"
        raise NotYetError(
            f"for gradients with {words(bad)}, count_nonfinite returned {told}, "
            f"expected {len(bad)}",
            slug=slug,
            rule=rule,
        )


def _expect_reduced(runs: Runs, poisoned: bool) -> None:
    n = runs.world_size
    run = runs.finished(reduce, poisoned=poisoned)
    own = [
        gradients_of(runs.seed, rank, BAD[-1] if poisoned and rank == origin(n) else ())
        for rank in range(n)
    ]
    expected = [
        len(BAD[-1]) if poisoned and rank == origin(n) else 0 for rank in range(n)
    ]
    counts = [value["count"] for value in run.values]
    if counts != expected:
        everywhere = n > 1 and counts == [len(BAD[-1])] * n
        only = "only" if n > 1 else "the single"
        after = "after the all_reduce every rank has them" * everywhere
        raise NotYetError(
            f"when {only} rank {origin(n)} has {len(BAD[-1])} elements that aren't "
            f"finite, the ranks' reduce_gradients returned {_told(counts)}, expected "
            f"{_told(expected)}"
            if poisoned
            else "when all elements are finite, reduce_gradients returned "
            f"{_told(counts)}, expected {_told(expected)}",
            slug="nan-after-reduce" if everywhere else "",
            evidence=[
                (r, f"returned {c}", f"expected {e}")
                for r, (c, e) in enumerate(zip(counts, expected, strict=True))
            ],
            rule=f"count before the all_reduce: {after}" if everywhere else "",
        )
    for place in range(len(SHAPES)):
        _expect_means(run.values, [tensors[place] for tensors in own], place, poisoned)
    for rank, value in enumerate(run.values):
        _expect_measured(rank, value["seconds"], value["took"])


def _told(counts: list[Any]) -> str:
    """By rank: "0, 3 and 0"."""
    if len(counts) == 1:
        return str(counts[0])
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"


def _expect_means(values: Any, own: list[Tensor], place: int, poisoned: bool) -> None:
    n = len(own)
    total = torch.stack(own).sum(0)
    for rank, value in enumerate(values):
        found = value["gradients"][place]
        finite = torch.isfinite(total)
        right = total / n
        if (
            close(found[finite], right[finite])
            and not torch.isfinite(found[~finite]).any()
        ):
            continue
        is_sum = bool(finite.any()) and close(found[finite], total[finite])
        told = f"in gradient {place} {_error(found, right)}"
        if is_sum or not finite.any():
            whose = ("the ranks' sum ", "the ranks' mean ") if is_sum else ("", "")
            told = (
                f"gradient {place} is {whose[0]}{brief(found)}, expected {whose[1]}"
                f"{brief(right)}"
            )
        raise NotYetError(
            f"after reduce_gradients on rank {rank}, {told}",
            slug="sum-not-mean" if is_sum and not poisoned else "",
        )


def _error(found: Tensor, right: Tensor) -> str:
    """The largest one, with as many digits as it takes to see it."""
    for digits in (3, 6, 9, 12):
        told = largest_error(found, right, digits)
        got, _, wanted = told.partition("   expected ")
        if got.rpartition("got ")[2] != wanted:
            break
    got = got.replace(": got", " is").replace("got", "the number is")
    return f"{got}, expected {wanted}"


def _expect_measured(
    rank: int, seconds: dict[str, Any], took: dict[str, float]
) -> None:
    others = {part: s for part, s in seconds.items() if part != "communication" and s}
    measured, total = float(seconds["communication"]), sum(took.values())
    if measured == total and not others:
        return
    if took["waits"] and measured == took["calls"] and not others:
        raise NotYetError(
            f"rank {rank} waited {took['waits']:g} s in Work.wait(), but its timer has "
            f"{measured:g} s of communication, expected {total:g} s",
            slug="start-only-measured",
            rule="an async collective returns at once: its wait() belongs inside "
            'with timer.measure("communication")',
        )
    if measured and not others:
        raise NotYetError(
            f"rank {rank}'s collectives took {total:g} s, but its timer has "
            f"{measured:g} s of communication",
            rule='with timer.measure("communication"): around the collectives',
        )
    what = next(iter(others), "communication")
    raise NotYetError(
        f"after reduce_gradients, rank {rank}'s timer has {others.get(what, 0):g} s of "
        f"{what}, expected {total:g} s of communication",
        rule='with timer.measure("communication"): around the collectives',
    )
