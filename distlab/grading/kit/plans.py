"""Lists of sample numbers, one per rank: read, counted, laid side by side."""

from __future__ import annotations

import math
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch

from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import enumerated

Plan = list[list[int]]
"""The numbers of each rank's samples."""

_SHOWN = 12  # numbers in one line of a table


# ── in the rank: whatever the code gives, as numbers ────────────────────────────────


@contextmanager
def in_call(call: str) -> Iterator[None]:
    """Let an error say in which call: one process plays all ranks."""
    try:
        yield
    except Exception as error:
        error.args = (f"{error}, in {call}",)
        raise


def numbers(value: Any, limit: int) -> list[int] | str:
    """A list, tensor or the like as plain numbers, or what is wrong with it."""
    if value is None:
        return "gives None, expected a list of sample numbers"
    if isinstance(value, torch.Tensor):
        return "gives a tensor, expected a list of ints: .tolist() makes one"
    if not hasattr(value, "__len__"):
        return f"gives a {type(value).__name__}, which has no length, expected a list"
    return taken(value, limit)


def taken(values: Any, limit: int) -> list[int] | str:
    """What iterating gives, as plain numbers, or what is wrong with it."""
    found = []
    for item in islice(values, limit + 1):
        if isinstance(item, torch.Tensor):
            return f"contains {item!r:.40}, expected ints: .tolist() makes them"
        try:
            found.append(operator.index(item))
        except TypeError:
            return f"contains {item!r:.40}, expected ints"
    if len(found) > limit:
        return f"contains more than {limit} numbers: does the loop end?"
    return found


def disturb(unit: ModuleType, place: int) -> None:
    """Give `unit` what a process has for itself: random numbers, and hashes of texts.

    Ranks that were forked have those of their parent, and so would agree by luck.
    """
    torch.default_generator.manual_seed(place * 7919 + 13)
    random.seed(place * 7907 + 17)
    np.random.seed(place * 7901 + 19)

    def salted(value: object) -> int:
        has_text = any(mark in repr(value) for mark in ("'", '"'))
        return hash((place, value)) if has_text else hash(value)

    unit.__dict__["hash"] = salted


# ── in the parent: words and tables ─────────────────────────────────────────────────


def worked_out(runs: Runs, scenario: Scenario | RunSpec, **values: Any) -> Run:
    """The run of a scenario in which one process plays all ranks.

    Raises:
        NotYetError: the code did not come to its end; that is not said of "rank 0",
            which is our player.
    """
    try:
        return runs.finished(scenario, **values)
    except NotYetError as failure:
        words = re.sub(r"^(rank 0|ranks 0 and 1 each)\b", "your code", failure.message)
        words = words.replace("; rank 0 was at", "; it was at")
        raise failure.but(message=words) from failure


def is_readable(plans: Sequence[list[int] | str]) -> TypeGuard[Plan]:
    """Whether every rank gave numbers."""
    return not any(isinstance(plan, str) for plan in plans)


def table(plans: Sequence[Sequence[int]]) -> tuple[Evidence, ...]:
    """What each rank has, one line per rank."""
    return tuple(
        Evidence(rank, _count(len(plan)), listed(plan))
        for rank, plan in enumerate(plans)
    )


def listed(plan: Sequence[int]) -> str:
    """The first numbers of a list."""
    more = " …" if len(plan) > _SHOWN else ""
    return " ".join(map(str, plan[:_SHOWN])) + more


def named(numbers: Sequence[int]) -> str:
    """The first few samples, in words."""
    plural = "s" if len(numbers) > 1 else ""
    if len(numbers) > 4:
        return f"samples {', '.join(map(str, numbers[:3]))} …"
    return f"sample{plural} {enumerated(numbers)}"


def on(num_samples: int, world_size: int, *, drop_last: bool = False) -> str:
    """The setting, in words: "with 10 samples on 4 ranks"."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    dropping = " and drop_last=True" * drop_last
    return f"with {_count(num_samples)} on {ranks}{dropping}"


def share_of(num_samples: int, world_size: int, drop_last: bool) -> int:
    """How many samples each rank has to get."""
    if drop_last:
        return num_samples // world_size
    return math.ceil(num_samples / world_size)


def expect_even(plans: Plan, num_samples: int, drop_last: bool) -> NotYetError | None:
    """Equally many on every rank."""
    counts = list(map(len, plans))
    if len(set(counts)) == 1:
        return None
    most, least = counts.index(max(counts)), counts.index(min(counts))
    n = len(plans)
    return NotYetError(
        f"{on(num_samples, n, drop_last=drop_last)}, rank {most} gets "
        f"{_count(counts[most])} and rank {least} only {counts[least]}, expected "
        f"{share_of(num_samples, n, drop_last)} on each",
        slug="uneven-shards",
        evidence=table(plans),
        rule="every rank takes part in every step: all ranks need equally many samples",
    )


def expect_shared(
    plans: Plan, num_samples: int, drop_last: bool, what: str = ""
) -> NotYetError | None:
    """The right samples, and no more repeats than needed; equally many per rank."""
    n = len(plans)
    setting = f"{on(num_samples, n, drop_last=drop_last)}{what}"
    counts = Counter(number for plan in plans for number in plan)
    unknown = sorted(set(counts) - set(range(num_samples)))
    if unknown:
        rank = next(r for r, plan in enumerate(plans) if unknown[0] in plan)
        return NotYetError(
            f"{setting}, rank {rank} gets sample {unknown[0]}, expected only samples "
            f"from 0 to {num_samples - 1}",
            evidence=table(plans),
            rule="check the last index of the last rank and the first index of rank 0",
        )
    has_all = share_of(num_samples, n, drop_last) == num_samples
    if not has_all and all(set(p) == set(range(num_samples)) for p in plans):
        return NotYetError(
            f"{setting}, every rank gets all samples, expected "
            f"{share_of(num_samples, n, drop_last)} on each",
            slug="not-sharded",
            evidence=table(plans),
            rule="rank and world_size determine this rank's shard",
        )
    missing = sorted(set(range(num_samples)) - set(counts))
    wanted = share_of(num_samples, n, drop_last) * n
    if drop_last:
        return _dropped(plans, setting, counts, missing, num_samples - wanted)
    return _padded(plans, setting, counts, missing, wanted - num_samples)


def _dropped(
    plans: Plan, setting: str, counts: Counter[int], missing: list[int], wanted: int
) -> NotYetError | None:
    repeat = next((number for number, times in counts.items() if times > 1), None)
    if repeat is not None:
        return NotYetError(
            f"{setting}, sample {repeat} is on {_ranks_with(plans, repeat)}, expected "
            "no sample twice",
            evidence=table(plans),
            rule="with drop_last ranks get fewer samples; no sample is repeated",
        )
    if len(missing) != wanted:
        return NotYetError(
            f"{setting}, {_count(len(missing))} ({listed(missing)}) "
            f"{'is' if len(missing) == 1 else 'are'} dropped, expected {wanted}",
            evidence=table(plans),
            rule="keep the largest number of samples that n divides",
        )
    return None


def _padded(
    plans: Plan, setting: str, counts: Counter[int], missing: list[int], wanted: int
) -> NotYetError | None:
    repeats = sum(counts.values()) - len(counts)
    often = max(counts, key=lambda number: counts[number], default=0)
    if missing and not repeats:
        return NotYetError(
            f"{setting}, no rank gets {named(missing)}, expected every sample on some "
            "rank",
            slug="remainder-lost" if len(missing) < len(plans) else "",
            evidence=table(plans),
            rule="without drop_last every sample is on some rank",
        )
    if missing:
        return NotYetError(
            f"{setting}, no rank gets {named(missing)}, but sample {often} occurs "
            f"{times(counts[often])}, expected every sample",
            evidence=table(plans),
            rule="without drop_last every sample is on some rank",
        )
    if repeats != wanted:
        return NotYetError(
            f"{setting}, padding repeats {_count(repeats)}, expected {wanted}",
            evidence=table(plans),
            rule="pad to the next multiple of n, and no further",
        )
    rare = min(counts, key=lambda number: counts[number])
    if counts[often] - counts[rare] > 1:
        return NotYetError(
            f"{setting}, sample {often} occurs {times(counts[often])} and sample "
            f"{rare} {times(counts[rare])}, expected a difference of at most 1",
            slug="padding-repeats-one",
            evidence=table(plans),
            rule="spread the repeats over the samples: counts may differ by at most 1",
        )
    return None


def _ranks_with(plans: Plan, number: int) -> str:
    ranks = [str(r) for r, plan in enumerate(plans) for n in plan if n == number]
    if len(set(ranks)) == 1:
        return f"rank {ranks[0]}, {times(len(ranks))}"
    if len(ranks) > 4:
        return f"ranks {', '.join(ranks[:3])} and {len(ranks) - 3} more"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def _count(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def times(count: int) -> str:
    """How often, in words."""
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"
