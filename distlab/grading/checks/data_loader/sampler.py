"""Checks of task 1.9, `data_loader.sampler`: all ranks' orders, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations, pairwise

import torch

from distlab.grading.checks.data_loader.left_out import expect_all_are_read
from distlab.grading.checks.data_loader.orders import EPOCHS, Case, work_out_orders
from distlab.grading.clause import clause
from distlab.grading.kit.plans import (
    Plan,
    expect_even,
    expect_shared,
    is_readable,
    on,
    table,
    worked_out,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence

ENOUGH = 10  # samples of a rank that a shuffle does not leave in order by chance


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause("data_loader.sampler", "C1", worlds=(1,), runs=[on_ranks(work_out_orders)])
def ranks_share_one_shuffle(runs: Runs) -> str | None:
    """As in 1.8, of one order; another one in another epoch."""
    cases = list(_readable(runs))
    for judge in (_same_again, _shared_out, _in_order, _follows_epochs, _goes_far):
        for case in cases:
            failure = judge(case)
            if failure:
                raise failure
    expect_all_are_read(cases)
    sizes = sorted({len(case["orders"][0]) for case in cases})
    return f"{len(cases)} data sets in {EPOCHS} epochs, on {_listed(sizes)} ranks"


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _readable(runs: Runs) -> Iterator[Case]:
    for case in worked_out(runs, work_out_orders).values[0]:
        first = case["orders"], case["others"]
        rest = case["fresh"], case["again"], case["straight"]
        for plans in (*chain(*first), *rest):
            if not is_readable(plans):
                rank = next(r for r, plan in enumerate(plans) if isinstance(plan, str))
                told = str(plans[rank]).replace("contains", "yields")
                raise NotYetError(
                    f"{_setting(case)}, __iter__ on rank {rank} {told}",
                    rule="yield the indices of this rank's samples",
                    fatal=True,
                )
        yield case


def _setting(case: Case) -> str:
    return on(case["num_samples"], len(case["orders"][0]))


def _same_again(case: Case) -> NotYetError | None:
    first, fresh, again = case["orders"][0], case["fresh"], case["again"]
    if first == fresh == again:
        return _straight_on(case)
    if case["moved_to"] is not None:
        return NotYetError(
            f"{_setting(case)}, iterating in epoch 0 sets self.epoch to "
            f"{case['moved_to']}, expected no change",
            evidence=table(first),
            rule="only set_epoch changes the epoch; iterating does not",
        )
    is_used = first == fresh  # a new sampler agrees, one that was iterated does not
    again = again if is_used else fresh
    rank = next(r for r, plan in enumerate(first) if plan != again[r])
    sentence = (
        f"iterating rank {rank}'s sampler twice in one epoch gives two orders, "
        "expected the same"
        if is_used
        else f"a new sampler with the same seed and epoch gives rank {rank} other "
        "samples, expected the same"
    )
    return NotYetError(
        f"{_setting(case)}, {sentence}",
        slug="" if is_used else "not-reproducible",
        evidence=[
            (rank, "first", _start(first[rank])),
            (rank, "second", _start(again[rank])),
        ],
        rule="the order depends on seed and epoch only"
        + "; iterating changes neither" * is_used,
    )


def _straight_on(case: Case) -> NotYetError | None:
    """Training that goes on in a later epoch has that epoch's order."""
    last, straight = case["orders"][-1], case["straight"]
    if straight == last:
        return None
    rank = next(r for r, plan in enumerate(last) if plan != straight[r])
    epoch = len(case["orders"]) - 1
    return NotYetError(
        f"{_setting(case)}, rank {rank} gets another order in epoch {epoch} if earlier "
        "epochs weren't iterated, expected the same order",
        evidence=[
            (rank, "after all", _start(last[rank])),
            (rank, "straight", _start(straight[rank])),
        ],
        rule="the order depends on seed and epoch only",
    )


def _shared_out(case: Case) -> NotYetError | None:
    count, drop_last = case["num_samples"], case["drop_last"]
    for epoch, plans in enumerate(case["orders"]):
        failure = expect_even(plans, count, drop_last) or expect_shared(
            plans, count, drop_last, f" in epoch {epoch}"
        )
        if failure is None:
            continue
        if case["shuffle"] and len(plans) > 1 and not failure.slug:
            # Neither the parts nor the shuffle alone can be the matter: both were
            # judged before, without a shuffle and on one rank.
            return failure.but(
                slug="own-shuffle-per-rank",
                rule="one shuffle on all ranks alike; then each takes its part",
            )
        return failure
    return None


def _goes_far(case: Case) -> NotYetError | None:
    """Epochs and seeds that differ in their higher bits only."""
    for (shift, epoch, one), (other_shift, other, two) in combinations(case["far"], 2):
        if one == two:
            seed = case["seed"]
            return NotYetError(
                f"{_setting(case)}, epoch {other} with seed {seed + other_shift} has "
                f"the order of epoch {epoch} with seed {seed + shift}, expected "
                "another order",
                rule="use every digit of self.seed and self.epoch",
            )
    return None


def _follows_epochs(case: Case) -> NotYetError | None:
    if not case["shuffle"] or case["num_samples"] < 12:
        return None
    orders = case["orders"]
    if all(plans == [_unseeded(case["num_samples"])] for plans in orders):
        return _told_by_rank_0(
            f"{_setting(case)}, every epoch has the order of an unseeded "
            "torch.Generator, expected one that depends on self.seed and self.epoch",
            orders,
            "",
            "torch.Generator() has a fixed default seed: call manual_seed",
        )
    alike = [pair for pair in combinations(range(EPOCHS), 2) if _equal(orders, *pair)]
    if alike:
        earlier, epoch = alike[0]
        own = " and seed 0" * (case["seed"] == 0)
        return _told_by_rank_0(
            f"{_setting(case)}{own}, epoch {epoch} has the order of epoch {earlier} "
            f"even after set_epoch({epoch}), expected another order",
            orders,
            "" if own else "epoch-ignored",
            "the shuffle must depend on self.epoch" + ", for every seed" * bool(own),
        )
    if len(orders[0]) > 1 and _never_mixed(orders):
        return _told_by_rank_0(
            f"{_setting(case)}, rank 0 gets the same samples in every epoch, expected "
            "a new choice from all samples",
            orders,
            "shuffle-inside-shards",
            "shuffle all samples first; then take this rank's shard",
        )
    for epoch, other in enumerate(case["others"]):
        if other != orders[epoch]:
            continue
        return NotYetError(
            f"{_setting(case)}, another seed gives the same order in epoch {epoch}, "
            "expected another order",
            evidence=table(orders[epoch]),
            rule="the shuffle must depend on self.seed, in every epoch; "
            "torch's CPU generator uses only the lowest 32 bits of a seed",
        )
    return None


def _equal(orders: list[Plan], one: int, other: int) -> bool:
    return orders[one] == orders[other]


def _unseeded(num_samples: int) -> list[int]:
    order: list[int] = torch.randperm(num_samples, generator=torch.Generator()).tolist()
    return order


def _told_by_rank_0(
    message: str, orders: list[Plan], slug: str, rule: str
) -> NotYetError:
    evidence = tuple(
        Evidence(0, f"epoch {epoch}", _start(plans[0]))
        for epoch, plans in enumerate(orders[:3])
    )
    return NotYetError(message, slug=slug, evidence=evidence, rule=rule)


def _never_mixed(orders: list[Plan]) -> bool:
    sets = [[set(plan) for plan in plans] for plans in orders]
    return all(later == sets[0] for later in sets[1:])


def _in_order(case: Case) -> NotYetError | None:
    """Shuffled where it was asked for, and not where it was not."""
    if len(case["orders"][0][0]) < ENOUGH:
        return None
    for epoch, plans in enumerate(case["orders"]):
        ordered = all(_falls(plan) <= 1 for plan in plans)
        if ordered == case["shuffle"]:
            samples = f"the samples of epoch {epoch} are"
            how = f" and shuffle=False, {samples} shuffled, expected their own order"
            if ordered:
                how = f", {samples} in their own order, expected them shuffled"
            return NotYetError(
                f"{_setting(case)}{how}",
                evidence=table(plans),
                rule="self.shuffle says whether the samples are shuffled",
            )
    return None


def _falls(plan: list[int]) -> int:
    """How often a smaller number follows a larger one: padding does it once."""
    return sum(later < earlier for earlier, later in pairwise(plan))


def _start(plan: list[int]) -> str:
    return table([plan])[0].text


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause("data_loader.sampler", "C2", worlds=(1,), runs=[on_ranks(work_out_orders)])
def len_and_random_numbers(runs: Runs) -> str | None:
    """len() is what iterating gives; the global random state does not change."""
    judges: tuple[Callable[[Case], NotYetError | None], ...] = (_length, _left_alone)
    for case in _readable(runs):
        for judge in judges:
            failure = judge(case)
            if failure:
                raise failure
    return None


def _length(case: Case) -> NotYetError | None:
    plans = [plan for plans in case["orders"] for plan in plans]
    n = len(case["orders"][0])
    for place, (plan, length) in enumerate(zip(plans, case["lengths"], strict=True)):
        if length == len(plan):
            continue
        setting = on(case["num_samples"], n, drop_last=case["drop_last"])
        of_all = length == case["num_samples"]
        return NotYetError(
            f"{setting}, len() of rank {place % n}'s sampler is {length}, expected "
            f"{len(plan)}, as many samples as iterating gives",
            slug="len-of-the-whole" if of_all else "",
            rule="len() is the number of this rank's samples: rounded down, since the "
            "rest is dropped"
            if case["drop_last"]
            else "len() is the number of this rank's samples, padding included",
        )
    return None


def _left_alone(case: Case) -> NotYetError | None:
    if not case["changed"]:
        return None
    return NotYetError(
        f"iterating the sampler changes {case['changed']}'s global random state, "
        "which dropout and augmentation use, expected it unchanged",
        slug="global-rng-changed",
        rule="shuffle with a new torch.Generator()",
    )
