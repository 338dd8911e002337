"""Which samples a sampler drops or repeats in 1.9: those that its shuffle put there."""

from __future__ import annotations

from collections import Counter

from distlab.grading.checks.data_loader.orders import EPOCHS, Case
from distlab.grading.kit.plans import Plan, named, on, table
from distlab.grading.verdict import NotYetError


def expect_all_are_read(cases: list[Case]) -> None:
    """What is dropped or repeated is left to the shuffle.

    In one data set it may be the same samples in all epochs by chance, in all data sets
    it is not.

    Raises:
        NotYetError: it is not left to the shuffle.
    """
    for drop_last, count, what in (
        (True, 0, "dropped"),
        (False, 2, "repeated"),
    ):
        found = [
            (case, [_occurring(plans, case, count) for plans in case["orders"]])
            for case in cases
            if case["shuffle"] and case["drop_last"] == drop_last
        ]
        found = [
            (case, sets)
            for case, sets in found
            if 0 < len(sets[0]) < case["num_samples"]
        ]
        if found and all(sets == [sets[0]] * EPOCHS for _, sets in found):
            case, sets = found[0]
            n = len(case["orders"][0])
            setting = on(case["num_samples"], n, drop_last=drop_last)
            raise NotYetError(
                f"{setting}, {named(sets[0])} {'is' if len(sets[0]) == 1 else 'are'} "
                f"{what} in every epoch, expected the shuffle to choose",
                evidence=table(case["orders"][0]),
                rule="shuffle all samples first; then take this rank's shard",
            )


def _occurring(plans: Plan, case: Case, count: int) -> list[int]:
    """The samples that are `count` times on the ranks."""
    times = Counter(number for plan in plans for number in plan)
    return [number for number in range(case["num_samples"]) if times[number] == count]
