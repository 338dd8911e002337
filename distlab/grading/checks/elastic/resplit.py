"""Checks of 4.8, `elastic.resplit`: epochs that are played at several world sizes.

A plan is the learner's; what is left after it is counted from that plan, so a shard of
a step may have any samples of the step.
"""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, listed, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.terminal import enumerated

TASK = "elastic.resplit"
SIZES = (1, 2, 3, 4, 5)
NUM_RANDOM = 60
PlanOf = list[list[list[int]]]
Stage = tuple[int, ...]
"""For each rank of a world size: how many steps of its plan it completes."""


@dataclass(frozen=True)
class ResplitCase:
    """An epoch: its samples, the global batch size, and the world sizes in turn."""

    num_samples: int
    global_batch_size: int
    stages: tuple[Stage, ...]
    epoch: int = 0

    def order(self) -> list[int]:
        """A shuffle; its samples are not 0, 1, 2 …, as positions are."""
        numbers = list(range(100, 100 + self.num_samples))
        random.Random(self.num_samples + 1000 * self.epoch).shuffle(numbers)
        return numbers


BY_HAND = (
    ResplitCase(12, 4, ((1, 1), (0,))),
    ResplitCase(12, 4, ((1, 1), (0,)), epoch=1),
    ResplitCase(10, 4, ((1, 1, 1, 1), (1, 1), (0, 0, 0))),
    ResplitCase(24, 4, ((2, 2, 2, 2), (2, 2), (2, 2, 2))),
    ResplitCase(26, 6, ((1, 1), (1, 1, 1, 1), (1, 1, 1), (0, 0))),
    ResplitCase(7, 6, ((0, 0, 0, 0), (0,))),
    ResplitCase(3, 5, ((0, 0, 0, 0), (1, 0, 1, 0), (0, 0))),
    ResplitCase(20, 4, ((2, 1), (0, 0))),
    ResplitCase(20, 4, ((3, 2, 1, 2), (1, 2), (0, 0, 0))),
    ResplitCase(30, 6, ((2, 0, 1), (0, 2), (1, 1, 1, 1), (0, 0))),
    ResplitCase(8, 4, ((2, 2), (0, 0, 0))),
    ResplitCase(9, 2, ((1, 1, 1), (1, 0, 1), (0, 0))),
)


def cases(seed: int) -> list[ResplitCase]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    return [*BY_HAND, *(_random_case(draw) for _ in range(NUM_RANDOM))]


def _random_case(draw: random.Random) -> ResplitCase:
    num_samples, size = draw.randint(5, 40), draw.randint(2, 8)
    stages, is_even, left = [], draw.random() < 0.4, num_samples
    for _ in range(draw.randint(2, 4)):
        # No rank completes more steps than its plan has; `left` is the least there is.
        n, most = draw.choice(SIZES), min(draw.randint(0, 3), -(-left // size))
        steps = [most if is_even else draw.randint(0, most) for _ in range(n)]
        stages.append(tuple(steps))
        left = max(0, left - sum(steps) * -(-size // n))
    return ResplitCase(num_samples, size, tuple(stages))


def plans_of_cases(
    context: RankContext, unit: ModuleType, seed: int
) -> list[list[Any]]:
    """The plans of each case, one for each world size, or what they are instead."""
    found = []
    for case in cases(seed):
        plans: list[Any] = []
        order = case.order()  # the caller's, who has one for the whole epoch
        for place, stage in enumerate(case.stages):
            history = [list(steps) for steps in case.stages[:place]]
            arguments = order, case.global_batch_size, history, len(stage)
            with in_call(_call(case, place)):
                given = unit.resplit(*arguments)
            plans.append(_changed(case, place, order, history) or _read(given))
            if isinstance(plans[-1], str):
                break
        found.append(plans)
    return found


def _changed(
    case: ResplitCase, place: int, order: list[int], history: list[list[int]]
) -> str:
    """Say which of the caller's lists the call has changed, if any."""
    if order != case.order():
        now = f"{len(order)} samples are in it now"
        if len(order) == case.num_samples:
            now = "its samples are others now"
        return f"changed the caller's `order`, expected it unchanged: {now}"
    if history != [list(steps) for steps in case.stages[:place]]:
        return f"changed the caller's `history` to {history}, expected it unchanged"
    return ""


def _read(given: Any) -> PlanOf | str:
    if given is None:
        return "returned None: is a return missing?"
    try:
        return [[[operator.index(i) for i in b] for b in shard] for shard in given]
    except TypeError:
        return f"returned {given!r:.40}, expected plan[rank][step], a list of samples"


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _completed(steps: Stage) -> str:
    ranks = _num(len(steps), "rank")
    if len({*steps}) == 1:
        return f"{ranks} completed {_num(steps[0], 'step')}{' each' * (len(steps) > 1)}"
    to = "and" if len(steps) == 2 else "to"
    return f"ranks 0 {to} {len(steps) - 1} completed {enumerated(steps)} steps"


def _numbers(items: Sequence[int]) -> str:
    if len(items) > 4:
        return f"{', '.join(map(str, items[:4]))} …"
    return enumerated(items)


def _samples_of(items: Sequence[int]) -> str:
    return f"sample{'s' * (len(items) > 1)} {_numbers(items)}"


def _call(case: ResplitCase, place: int) -> str:
    history = [list(steps) for steps in case.stages[:place]]
    n = len(case.stages[place])
    return (
        f"{case.num_samples} samples, global_batch_size={case.global_batch_size}, "
        f"history={history}, world_size={n}"
    )


PLAYED = on_ranks(plans_of_cases)


@dataclass(frozen=True)
class Split:
    """One call: its plan, the samples that were left, and the plans before."""

    call: str
    case: ResplitCase
    place: int
    plan: PlanOf
    left: list[int]

    @property
    def steps(self) -> list[list[int]]:
        """The samples of all ranks, step by step."""
        length = max(map(len, self.plan), default=0)
        return [[i for s in self.plan for i in chain(*s[k : k + 1])]
                for k in range(length)]  # fmt: skip

    def batches(self, left: list[int]) -> list[set[int]]:
        """Global batches."""
        size = self.case.global_batch_size
        return [set(left[s : s + size]) for s in range(0, len(left), size)]

    def table(self) -> tuple[Evidence, ...]:
        """The call, and what each rank has, step by step."""
        rows = [
            Evidence(rank, _num(len(shard), "step"), " | ".join(map(listed, shard[:6])))
            for rank, shard in enumerate(self.plan[:5])
        ]  # fmt: skip
        called = Evidence(NOBODY, "called with", self.call)
        return (called, Evidence(NOBODY, "left", listed(self.left)), *rows)

    @property
    def num_ranks(self) -> int:
        """The world size that the plan is for."""
        return len(self.case.stages[self.place])

    @property
    def situation(self) -> str:
        """Who has trained before, and for whom this plan is."""
        trained = [stage for stage in self.case.stages[: self.place] if any(stage)]
        whose = f"the plan for {_num(self.num_ranks, 'rank')}"
        if not trained:
            return f"in a new epoch, {whose}"
        if len(trained) > 1:
            sizes = " and then ".join(str(len(stage)) for stage in trained)
            return f"after training on {sizes} ranks, {whose}"
        return f"after {_completed(trained[0])}, {whose}"

    def error(self, message: str, rule: str, slug: str = "") -> NotYetError:
        """What is wrong with this call; the message goes on about the plan."""
        text, evidence = f"{self.situation} {message}", self.table()
        return NotYetError(
            text, slug=slug, evidence=evidence, rule=rule, played=self.num_ranks
        )


def _splits(runs: Runs) -> Iterator[Split]:
    """All calls; of a case those up to the first that is not as it must be."""
    found = worked_out(runs, PLAYED).values[0]
    for case, plans in zip(cases(runs.seed), found, strict=True):
        left = case.order()
        for place, (plan, stage) in enumerate(zip(plans, case.stages, strict=False)):
            call = _call(case, place)
            if isinstance(plan, str):
                called = Evidence(NOBODY, "called with", call)
                raise NotYetError(f"`resplit` {plan}", evidence=(called,), fatal=True)
            split = Split(call, case, place, plan, left)
            yield split
            if _shape(split) or _samples(split) or _order(split):
                break
            shards = zip(plan, stage, strict=True)
            done = {i for shard, k in shards for batch in shard[:k] for i in batch}
            left = [index for index in left if index not in done]


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C1", worlds=(1,), plays=SIZES, runs=[PLAYED])
def global_batches_stay(runs: Runs) -> str | None:
    """Each step has the next samples of those that are left, a global batch."""
    is_open = False
    for split in _splits(runs):
        if _shape(split) or _samples(split):
            is_open = True
        elif fault := _order(split):
            raise fault
    if is_open:
        raise NotJudgedError("samples are missing or repeated: see C2 and C3")
    return f"{len(BY_HAND) + NUM_RANDOM} epochs at several world sizes"


def _order(split: Split) -> NotYetError | None:
    expected = split.batches(split.left)
    for number, (actual, due) in enumerate(zip(split.steps, expected, strict=False)):
        if set(actual) == due:
            continue
        size = split.case.global_batch_size
        first = len(split.case.stages[0])
        scaled = round(size / first * len(split.plan))
        if len(actual) != len(due):
            is_local = split.place and len(actual) == scaled
            why = "the global batch" if len(due) == size else "all that are left"
            return split.error(
                f"has {_num(len(actual), 'sample')} in step {number}, expected "
                f"{len(due)}, {why}",
                "the global batch size does not depend on the number of ranks",
                "global-batch-scaled" if is_local else "",
            )
        more = sorted(set(actual) - due)
        less = [index for index in split.left if index in due - set(actual)]
        return split.error(
            f"has {_samples_of(more)} in step {number}, expected {_numbers(less)}, "
            f"which come{'s' * (len(less) == 1)} first in `order`",
            "take the samples in the order of the shuffle, a global batch for each "
            "step; then split each of these over the ranks",
        )
    if len(split.steps) > len(expected):
        return split.error(
            "ends with a step in which no rank has a sample, expected no such step",
            "make no step without samples: the mean of its gradients is 0 / 0",
        )
    return None


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C2", worlds=(1,), plays=SIZES, runs=[PLAYED])
def what_is_left_comes_once(runs: Runs) -> str | None:
    """All that no rank has completed, at any world size, and nothing else."""
    for split in _splits(runs):
        if fault := _samples(split):
            raise fault
    return None


def _samples(split: Split) -> NotYetError | None:
    given, left = set(chain(*split.steps)), set(split.left)
    order = split.case.order()
    if unknown := sorted(given - set(order)):
        return split.error(
            f"has {_samples_of(unknown)}, expected only values of `order`",
            "a plan has values of `order`, not positions in it",
        )
    again = [index for index in order if index in given - left]
    lost = [index for index in order if index in left - given]
    if not again and not lost:
        return None
    what = []
    if again:
        what.append(f"repeats {_samples_of(again)}")
    if lost:
        what.append(f"leaves out {_samples_of(lost)}")
    slug, rule = _cause(split, given)
    text = f"{' and '.join(what)}, expected each remaining sample once"
    return split.error(text, rule, slug)


def _cause(split: Split, given: set[int]) -> tuple[str, str]:
    order, history = split.case.order(), split.case.stages[: split.place]
    if any(len(set(steps)) > 1 for steps in history):
        if given == set(order[len(order) - len(given) :]):
            return (
                "all-equally-far",
                "ranks may have completed different numbers of steps: look at each",
            )
    elif history and given == set(order):
        return "epoch-again", "take out what the history says is completed"
    elif len(history) > 1 and not given <= set(split.left):
        return (
            "one-plan-for-all",
            "the steps of a world size belong to the plan of that world size",
        )
    return "", ""


# ── C3 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C3", worlds=(1,), plays=SIZES, runs=[PLAYED])
def shards_are_even(runs: Runs) -> str | None:
    """Every rank has every step; shards differ by at most one; no repeats."""
    for split in _splits(runs):
        if fault := _shape(split):
            raise fault
    return None


def _shape(split: Split) -> NotYetError | None:
    n, plan = len(split.case.stages[split.place]), split.plan
    if len(plan) != n:
        message = f"has {_num(len(plan), 'list')}, expected one for each rank"
        return split.error(message, "plan has n lists")
    lengths = list(map(len, plan))
    if len(set(lengths)) > 1:
        rank, other = lengths.index(min(lengths)), lengths.index(max(lengths))
        return split.error(
            f"has {_num(min(lengths), 'step')} for rank {rank} and {max(lengths)} for "
            f"rank {other}, expected the same number for all",
            "a rank without samples in a step has an empty shard: it takes part in the "
            "all_reduce",
        )
    counts = Counter(chain(*split.steps))
    often = [index for index in counts if counts[index] > 1]
    if often:
        return split.error(
            f"has sample {often[0]} {counts[often[0]]} times, expected every sample "
            "once",
            "do not pad: shards may differ by one sample",
        )
    for step in range(lengths[0] if lengths else 0):
        sizes = [len(shard[step]) for shard in plan]
        if max(sizes) - min(sizes) > 1:
            return split.error(
                f"gives {_numbers(sizes)} samples in step {step}, expected counts "
                "that differ by at most 1",
                "the shards of a step differ by at most one sample",
            )
    return None
