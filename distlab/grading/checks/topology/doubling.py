"""Checks of task 3.24: all-reduces with few messages, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.topology.forms import doubling_rounds
from distlab.grading.checks.topology.nodes import (
    ITEM,
    NOT_FINITE,
    TABLE,
    Ledger,
    lent_of,
    sum_of,
    told_of,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.lent import expect_own_memory
from distlab.grading.kit.messages import expect_sent, finished_in_parts
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, in_rounds, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import ranks_in_words

WORLDS = (3, 4, 6, 1)
COUNTS = (29, 1, 0, TABLE, NOT_FINITE)
NAMES = ("recursive_doubling", "halving_doubling")
MANY = (64, 100)  # simulated: a power of two, and far from one


def double_all(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Both functions on tensors of each length: values, messages and bytes."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for name in NAMES:
        for count in COUNTS:
            context.report(f"{name} of {told_of(count)}")
            lent = lent_of(seed, context.rank, count, context.comm.device)
            ledger = Ledger(context.comm)
            getattr(unit, name)(ledger, lent.tensor)
            found[name].append(
                {
                    **lent.left(),
                    "messages": ledger.messages,
                    "bytes": sum(ledger.sent_bytes),
                }
            )
    return found


def double_many(
    context: RankContext, unit: ModuleType, seed: int, count: int
) -> dict[str, dict[str, Any]]:
    """On many ranks: whether it is right, what was sent, and when it was over."""
    n = context.world_size
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        tensor = torch.full((count,), 1.0 + context.rank, dtype=torch.float64)
        ledger = Ledger(context.comm)
        getattr(unit, name)(ledger, tensor)
        found[name] = {
            "is_right": bool((tensor == n * (n + 1) / 2).all()),
            "messages": ledger.messages,
            "bytes": sum(ledger.sent_bytes),
            "ended_s": context.comm.time(),
        }
    return found


def _on_many(n: int) -> RunSpec:
    """A tensor takes a second, and messages have no latency."""
    count = 2 * MANY[0]
    return in_rounds(double_many, n, count * ITEM, count=count)


def _many(runs: Runs, n: int) -> list[dict[str, Any]]:
    """By rank."""
    told: list[dict[str, Any]] = runs.simulated(_on_many(n))["values"]
    return told


def _finished(runs: Runs) -> Run:
    """The run; if it failed, with the function and the tensor with which it did."""

    def situation(part: int) -> str:
        name, count = NAMES[part // len(COUNTS)], COUNTS[part % len(COUNTS)]
        return f"in {name}" + f" of {told_of(count)}" * (count != COUNTS[0])

    return finished_in_parts(runs, double_all, situation)


# ── values ──────────────────────────────────────────────────────────────────────────


@clause("topology.halving_doubling", "C1", worlds=WORLDS, runs=[on_ranks(double_all)])
def everyone_has_the_sum(runs: Runs) -> str | None:
    """Both functions."""
    run = _finished(runs)
    n = runs.world_size
    for name in NAMES:
        sent = [value[name][0]["messages"] for value in run.values]
        expect_sent(run, sent, f"in {name}, a sum over the ranks needs messages")
        for number, count in enumerate(COUNTS):
            told = [value[name][number] for value in run.values]
            before = [part["before"] for part in told]
            after = [part["after"] for part in told]
            total = same_everywhere(sum_of(before), n)
            if count == COUNTS[0] and not all_close(after, total):
                _expect_sum_beside(name, before, after)
            of = f" of {told_of(count)}" * (number > 0)
            what = f"{name}{of} on {n} ranks"
            expect_own_memory(run, told, what)
            what = f"after {what}, the tensor"
            expect_values(
                after,
                total,
                what=what,
                # Who forgets ranks forgets them at any length: the first one shows it.
                suspects=partial(_suspects, name, before) if not number else (),
                parts=before,
            )
            expect_equal_bits(
                after,
                what=what,
                slug="own-order-sum",
                rule="a + b and b + a have the same bits, so the partners of the next "
                "round start from equal partial sums",
            )
    return None


def _expect_sum_beside(
    name: str, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> None:
    """The ranks without a partner must get the sum too."""
    n, total = len(before), sum_of(before)
    size = 2 ** (n.bit_length() - 1)
    served = [rank for rank in range(n) if all_close([after[rank]], [total])]
    others = [rank for rank in range(n) if rank not in served]
    unchanged = all(all_close([after[r]], [before[r]]) for r in others)
    if size < n and len(served) == size and unchanged:
        who, is_one = ranks_in_words(others), len(others) == 1
        have, hold = ("has", "holds") if is_one else ("have", "hold")
        their = "its" if is_one else "their"
        raise NotYetError(
            f"after {name} on {n} ranks, {who}, which {have} no partner, still {hold} "
            f"{their} own tensor, expected the sum",
            slug="ranks-beyond-the-power",
            rule="the rank that added their tensor sends them the sum at the end",
        )


def _suspects(name: str, before: list[torch.Tensor]) -> list[Suspect]:
    """The sums if the ranks beyond the power of two are omitted."""
    n = len(before)
    size = 2 ** (n.bit_length() - 1)
    if size == n:
        return []
    return [
        Suspect(
            slug="ranks-beyond-the-power",
            values=[sum_of(before[:size])] * size + before[size:],
            sentence=f"after {name} on {n} ranks, the sum lacks the values of "
            f"{ranks_in_words(range(size, n))}, expected the sum over all ranks",
            rule="a rank without a partner first sends its tensor; it receives the sum",
        )
    ]


# ── rounds, messages, bytes ─────────────────────────────────────────────────────────


@clause(
    "topology.halving_doubling",
    "C2",
    worlds=(6,),
    runs=[on_ranks(double_all)],
    later=[_on_many(n) for n in MANY],
)
def in_so_few_rounds(runs: Runs) -> str | None:
    """On many simulated ranks."""
    runs.finished(double_all)
    notes = []
    for n in MANY:
        told = [value[NAMES[0]] for value in _many(runs, n)]
        with judged_after(everyone_has_the_sum, runs, "C1"):
            _expect_right(NAMES[0], told, "continue until a sum covers all ranks")
        needed = max(value["ended_s"] for value in told)
        enough = doubling_rounds(n)
        if needed > enough + 1e-6:
            raise NotYetError(
                f"on {n} simulated ranks, recursive_doubling takes {needed:.3g} rounds "
                f"of messages, expected {enough}",
                slug="too-many-rounds",
                rule="in each round a rank exchanges its partial sum with one partner",
            )
        notes.append(f"{n} ranks: {enough}")
    return f"rounds of recursive_doubling, simulated: {', '.join(notes)}"


@clause(
    "topology.halving_doubling",
    "C3",
    worlds=(4, 6, 3),
    runs=[on_ranks(double_all)],
    later=[_on_many(MANY[-1])],
)
def with_so_few_messages(runs: Runs) -> str | None:
    """By rank, here and on many simulated ranks."""
    run = runs.finished(double_all)
    own = [value[NAMES[1]][0] for value in run.values]
    _expect_few_messages("", own)
    if runs.world_size != 6:  # where C1 is judged, too: six is no power of two
        return None
    n = MANY[-1]
    told = [value[NAMES[1]] for value in _many(runs, n)]
    with judged_after(everyone_has_the_sum, runs, "C1"):
        _expect_right(NAMES[1], told, "halve until each rank has a chunk of the sum")
    most = _expect_few_messages("simulated ", told)
    return f"{n} ranks, simulated: {most} messages each; in a ring {2 * (n - 1)}"


def _expect_right(name: str, told: Sequence[dict[str, Any]], rule: str) -> None:
    if not all(value["is_right"] for value in told):
        raise NotYetError(
            f"on {len(told)} simulated ranks, {name} gives a wrong sum, expected "
            f"{len(told) * (len(told) + 1) // 2} in each element",
            rule=rule,
        )


def _expect_few_messages(kind: str, told: Sequence[dict[str, Any]]) -> int:
    n = len(told)
    doublings = n.bit_length() - 1
    most: int = 2 * doublings + (n != 2**doublings)
    sent = [value["messages"] for value in told]
    if max(sent) > most:
        raise NotYetError(
            f"on {n} {kind}ranks, rank {sent.index(max(sent))} sent {max(sent)} "
            f"messages in halving_doubling, expected at most {most}",
            slug="too-many-rounds",
            evidence=_by_rank(sent, "messages", most),
            rule="halving takes log2 n messages, and doubling as many",
        )
    return most


@clause(
    "topology.halving_doubling", "C4", worlds=(4, 6, 3), runs=[on_ranks(double_all)]
)
def with_so_few_bytes(runs: Runs) -> str | None:
    """By rank; each half may be larger by one element."""
    run = runs.finished(double_all)
    n, count = runs.world_size, COUNTS[0]
    doublings = n.bit_length() - 1
    halves = [ceil(count / 2**turn) for turn in range(1, doublings + 1)]
    most = 2 * sum(halves) * ITEM + (n != 2**doublings) * count * ITEM
    told = [value[NAMES[1]][0] for value in run.values]
    if any(value["messages"] == 0 for value in told):
        raise NotJudgedError("a rank sends nothing: see C1")
    sent = [value["bytes"] for value in told]
    if max(sent) > most:
        raise NotYetError(
            f"in halving_doubling with a tensor of {count * ITEM} bytes on {n} ranks, "
            f"rank {sent.index(max(sent))} sent {max(sent)} bytes, expected at most "
            f"{most}",
            slug="whole-tensor-every-step",
            evidence=_by_rank(sent, "bytes", most),
            rule="send half of the remaining slice each round: S / 2, S / 4, S / 8 …",
        )
    return None


def _by_rank(sent: Sequence[int], what: str, most: int) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, "right" if amount <= most else "many", f"{amount} {what}")
        for rank, amount in enumerate(sent[:8])
    )
