"""Checks of the unit `collectives`: values, in place, and who sent how much."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.bench import Bench, Implementation
from distlab.grading.clause import clause
from distlab.grading.diagnosis import printed
from distlab.grading.oracles import (
    Suspect,
    all_close,
    close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, RankRecord, Run
from distlab.runner.autopsy import Evidence, describe, place

# The world size that tells most comes first: with 3 a cycle is a cycle, and nothing
# that is right by luck for 2 gets through.
WORLDS = (3, 2, 4, 7, 1)
RECEIVING = frozenset({"recv", "irecv", "sendrecv"})


def numbers(seed: int, rank: int, count: int, dtype: str = "float64") -> Tensor:
    """`count` random numbers that depend on the seed and the rank."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return values.to(getattr(torch, dtype))


# ── 1.1 exchange ────────────────────────────────────────────────────────────────────


def exchange_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Every rank has a box of its own; afterwards, what is in it."""
    box = numbers(seed, context.rank, 4)
    before = box.clone()
    unit.exchange(context.comm, box)
    return {"before": before, "after": box}


@clause("collectives.exchange", "C1", worlds=(2, 3, 4, 7, 1))
def box_arrives(impl: Implementation, cluster: Bench) -> str | None:
    """V: rank 1's box equals rank 0's."""
    if cluster.world_size == 1:
        _expect_no_hang_alone(impl, cluster, exchange_once)
        return None
    run = cluster.observe(impl, exchange_once)
    pair = run.ranks[:2]
    # If only others hang, the two that this clause is about can be judged all the same.
    if run.outcome != "deadlock" or any(r.status != "finished" for r in pair):
        run = cluster.run(impl, exchange_once)
    source, target = pair[0].value, pair[1].value
    if close(target["after"], source["before"]):
        return None
    _expect_messages(run, "rank 1's box is as it was")
    evidence = _calls_of_each(run)
    if close(source["after"], target["before"]):
        raise NotYetError(
            "the other way round: rank 0 got rank 1's box",
            evidence=evidence,
            rule="rank 0 sends, rank 1 receives",
        )
    unchanged = close(target["after"], target["before"])
    if unchanged and _received(pair[1]):
        raise NotYetError(
            "a message arrived, but not in the caller's box on rank 1",
            slug="not-in-place",
            evidence=evidence,
            rule="receive into the tensor you were given",
        )
    raise NotYetError(
        "rank 1's box differs from rank 0's",
        evidence=evidence,
        rule="rank 0 sends, rank 1 receives, however many ranks there are",
    )


@clause("collectives.exchange", "C2", worlds=(2, 3, 4, 7))
def nobody_else(impl: Implementation, cluster: Bench) -> str | None:
    """J: one message, from rank 0 to rank 1, and no other box is touched."""
    run = cluster.run(impl, exchange_once)
    messages = sum(record.messages for record in run.ranks)
    if messages > 1:
        raise NotYetError(
            f"{messages} messages in all, where one is enough",
            slug="extra-messages",
            evidence=_calls_of_each(run),
            rule="rank 0 sends once, rank 1 receives once, the others do nothing",
        )
    for rank, value in enumerate(run.values):
        if rank != 1 and not close(value["after"], value["before"]):
            raise NotYetError(
                f"rank {rank}'s box changed; only rank 1's may",
                evidence=_calls_of_each(run),
                rule="a message is a copy: the sender keeps what it has",
            )
    return "drawn: rank 0 ──────▶ rank 1"


# ── 1.2 pass_around ─────────────────────────────────────────────────────────────────


def pass_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One number goes one place to the right."""
    outgoing = numbers(seed, context.rank, 1)
    incoming = torch.zeros(1, dtype=torch.float64)
    before = outgoing.clone()
    unit.pass_around(context.comm, outgoing, incoming)
    return {"sent": before, "outgoing": outgoing, "incoming": incoming}


@clause("collectives.pass_around", "C1", worlds=WORLDS)
def neighbours_number(impl: Implementation, cluster: Bench) -> str | None:
    """V: incoming is the left neighbour's; outgoing is untouched."""
    if cluster.world_size == 1:
        _expect_no_hang_alone(impl, cluster, pass_once)
        return None
    run = cluster.run(impl, pass_once)
    sent = [value["sent"] for value in run.values]
    incoming = [value["incoming"] for value in run.values]
    n = cluster.world_size
    outgoing = [value["outgoing"] for value in run.values]
    _expect_messages(run, "incoming is not the left neighbour's number")
    if not all_close(outgoing, sent):
        raise NotYetError(
            "outgoing was overwritten; what arrives belongs in incoming",
            slug="outgoing-changed",
            evidence=_calls_of_each(run),
            rule="two tensors: one to give, one to receive into",
        )
    zero = torch.zeros(1, dtype=torch.float64)
    expect_values(
        incoming,
        [sent[(rank - 1) % n] for rank in range(n)],
        what="incoming",
        suspects=[
            Suspect(
                slug="wrong-source",
                values=[sent[(rank + 1) % n] for rank in range(n)],
                sentence="incoming holds the right neighbour's number: the circle "
                "runs the other way",
                rule="send to rank + 1, receive from rank - 1",
            ),
            Suspect(
                slug="not-in-place" if all(map(_received, run.ranks)) else "",
                values=same_everywhere(zero, n),
                sentence="incoming is as it was on every rank: nothing was received "
                "into it",
                rule="receive into the tensor you were given",
            ),
            Suspect(
                slug="",
                values=sent,
                sentence="incoming holds the rank's own number",
                rule="the number must come from the neighbour, in a message",
            ),
        ],
        rule="send to rank + 1, receive from rank - 1, both modulo n",
    )
    return None


@clause("collectives.pass_around", "C2", worlds=(3, 2, 4, 7))
def one_message_each(impl: Implementation, cluster: Bench) -> str | None:
    """J: every rank sends exactly one message, straight to its neighbour."""
    run = cluster.run(impl, pass_once)
    counts = [record.messages for record in run.ranks]
    if any(count != 1 for count in counts):
        raise NotYetError(
            f"messages sent by ranks 0, 1, …: {counts}; one each is enough",
            slug="extra-messages",
            evidence=_calls_of_each(run),
            rule="everybody gives to the right and takes from the left, once",
        )
    return f"messages {sum(counts)}, bytes per rank {run.ranks[0].sent_bytes:.0f}"


# ── 1.3 broadcast ───────────────────────────────────────────────────────────────────


def broadcast_each(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One broadcast from each rank in turn, of a 2 × 3 tensor."""
    before, after = [], []
    for src in range(context.world_size):
        tensor = numbers(seed + src, context.rank, 6).reshape(2, 3)
        before.append(tensor.clone())
        unit.broadcast(context.comm, tensor, src)
        after.append(tensor)
    return {"before": before, "after": after}


@clause("collectives.broadcast", "C1", worlds=WORLDS)
def everyone_has_it(impl: Implementation, cluster: Bench) -> str | None:
    """V: after a broadcast from src every rank has src's values, for every src."""
    run = cluster.run(impl, broadcast_each)
    n = cluster.world_size
    _expect_messages(run, "every rank's tensor is as it was")
    for src in range(n):
        before = [value["before"][src] for value in run.values]
        expect_values(
            [value["after"][src] for value in run.values],
            same_everywhere(before[src], n),
            what=f"the tensor after a broadcast from rank {src}",
            suspects=[
                Suspect(
                    slug="not-in-place" if all(map(_received, run.ranks)) else "",
                    values=before,
                    sentence="every rank's tensor is as it was before",
                    rule="receive into the tensor you were given",
                ),
                Suspect(
                    slug="source-ignored",
                    values=same_everywhere(before[0], n),
                    sentence=f"src is {src}, but every rank has rank 0's values",
                    rule="the source is the argument src, not always rank 0",
                ),
            ],
            rule="src sends to everyone else; everyone else receives from src",
        )
    return None


@clause("collectives.broadcast", "C2", worlds=(3, 2, 4, 7))
def messages_of_broadcast(impl: Implementation, cluster: Bench) -> str | None:
    """B: n broadcasts take n(n - 1) messages: each rank but src receives once."""
    run = cluster.run(impl, broadcast_each)
    n = cluster.world_size
    total = sum(record.messages for record in run.ranks)
    if total != n * (n - 1):
        raise NotYetError(
            f"{total / n:g} messages per broadcast on {n} ranks; {n - 1} are enough",
            slug="extra-messages",
            evidence=_calls_of_each(run),
            rule="every rank but src receives once",
        )
    return f"n = {n}: {n - 1} messages"


# ── 1.4 all_reduce ──────────────────────────────────────────────────────────────────


def reduce_once(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Sum twice: float64 whose order of summation shows in the bits, and float32."""
    # Sizes of 1 to 1,000,000 side by side; and no default shape or dtype fits both.
    uneven = numbers(seed, context.rank, 64) * 10.0 ** torch.arange(64).remainder(7)
    plain = numbers(seed + 1, context.rank, 6, "float32").reshape(2, 3)
    results = []
    for tensor in (uneven, plain):
        before = tensor.clone()
        returned = unit.all_reduce(context.comm, tensor)
        is_tensor = isinstance(returned, Tensor)
        copy = returned.detach().clone() if is_tensor else None
        results.append({"before": before, "after": tensor, "returned": copy})
    return results


@dataclass(frozen=True)
class Sums:
    """One of the two sums: what each rank had, has and returned."""

    run: Run
    which: int

    def of_each(self, key: str) -> list[Any]:
        """"before", "after" or "returned", by rank."""
        return [value[self.which][key] for value in self.run.values]

    @property
    def tolerance(self) -> float:
        """What rounding may cost, in the tensor's own dtype."""
        return 1e-5 if self.of_each("before")[0].dtype == torch.float32 else 1e-12

    @property
    def total(self) -> Tensor:
        """The right sum, in float64."""
        return torch.stack([before.double() for before in self.of_each("before")]).sum(0)

    def outside(self) -> list[int]:
        """The ranks that have the sum, but not in the caller's tensor; if all have it.

        Those whose tensor is still as it was, although they received a message or
        returned the sum. No rank, as soon as one holds anything else but the sum.
        """
        before, after, total = self.of_each("before"), self.of_each("after"), self.total
        found = []
        for record, was, now in zip(self.run.ranks, before, after, strict=True):
            if close(now, total, self.tolerance):
                continue
            returned = record.value[self.which]["returned"]
            has_it = close(returned, total, self.tolerance) or _received(record)
            if not (torch.equal(now, was) and has_it):
                return []
            found.append(record.rank)
        return found


@clause("collectives.all_reduce", "C1", worlds=WORLDS)
def sum_everywhere(impl: Implementation, cluster: Bench) -> str | None:
    """V and X: what each rank ends up with is the sum, and the same bits."""
    run = cluster.run(impl, reduce_once)
    _expect_messages(run, "the tensors are not the sum over the ranks")
    for sums in (Sums(run, 0), Sums(run, 1)):
        if sums.outside():
            raise NotJudgedError("the sum is not in the caller's tensor: see C2")
        after = sums.of_each("after")
        expect_values(
            after,
            same_everywhere(sums.total, cluster.world_size),
            what="the sum",
            tolerance=sums.tolerance,
            suspects=_wrong_sums(sums.of_each("before"), sums.total),
            rule="add up all ranks' tensors, each exactly once",
        )
        expect_equal_bits(
            after,
            what="the sum",
            slug="own-order-sum",
            rule="let one rank add, and copy its result to the others: a + b + c "
            "rounds differently from c + b + a",
        )
    return None


@clause("collectives.all_reduce", "C2", worlds=WORLDS)
def in_place(impl: Implementation, cluster: Bench) -> str | None:
    """V: the caller's own tensor holds the sum."""
    run = cluster.run(impl, reduce_once)
    n = cluster.world_size
    for sums in (Sums(run, 0), Sums(run, 1)):
        outside = sums.outside()
        if outside:
            raise NotYetError(
                _where_the_sum_is(sums, outside),
                slug="not-in-place",
                evidence=_calls_of_each(run),
                rule="write into the tensor you were given: tensor += … or "
                "tensor.copy_(…); tensor = … makes a new one",
            )
        expect_values(
            sums.of_each("after"),
            same_everywhere(sums.total, n),
            what="the caller's tensor",
            tolerance=sums.tolerance,
            rule="write into the tensor you were given, on every rank",
        )
    halves = [len(record.calls()) // 2 for record in run.ranks]
    return (
        f"n = {n}: rank 0 takes part in {halves[0]} messages, rank {n - 1} in "
        f"{halves[-1]}. And with n = 1,000?"
    )


def _where_the_sum_is(sums: Sums, outside: list[int]) -> str:
    n = sums.run.world_size
    on = "every rank" if len(outside) == n else f"rank {outside[0]}"
    unchanged = f"the caller's tensor is unchanged on {on}"
    returned = sums.of_each("returned")
    if all(close(returned[rank], sums.total, sums.tolerance) for rank in outside):
        return f"your return value is right, but {unchanged}"
    return f"{unchanged}: what arrived there went into another one"


def _wrong_sums(before: list[Tensor], total: Tensor) -> list[Suspect]:
    n = len(before)
    first = before[0].double()
    return [
        Suspect(
            slug="",
            values=[total, *before[1:]],
            sentence="rank 0 has the sum, the other ranks still have their own tensor",
            rule="the second half is missing: everybody gets the result",
        ),
        Suspect(
            slug="",
            values=before,
            sentence="every rank's tensor is as it was before",
            rule="write into the tensor you were given: tensor += … or tensor.copy_(…)",
        ),
        Suspect(
            slug="",
            values=same_everywhere(before[0], n),
            sentence="every rank has rank 0's tensor: nothing was added to it",
            rule="the first half is missing: one rank adds everything up",
        ),
        Suspect(
            slug="last-write-wins",
            values=same_everywhere(before[-1], n),
            sentence=f"every rank has rank {n - 1}'s tensor: what arrived replaced "
            "the sum instead of being added to it",
            rule="receive into a second tensor, then add it",
        ),
        Suspect(
            slug="own-value-missing",
            values=same_everywhere(total - first, n),
            sentence="rank 0's own tensor is missing from the sum",
            rule="start from your own values, then add the others'",
        ),
        Suspect(
            slug="own-value-twice",
            values=same_everywhere(total + first, n),
            sentence="rank 0's own tensor is in the sum twice",
            rule="each rank's tensor counts exactly once",
        ),
        Suspect(
            slug="mean-not-sum",
            values=same_everywhere(total / n, n),
            sentence=f"every rank has the mean, not the sum: divided by {n}",
            rule="all_reduce sums; who wants the mean divides afterwards",
        ),
    ]


# ── shared ──────────────────────────────────────────────────────────────────────────


def _expect_no_hang_alone(impl: Implementation, cluster: Bench, scenario: Any) -> None:
    """One rank has nobody to talk to: to return or to be refused is both fine."""
    run = cluster.observe(impl, scenario)
    first = run.primary()
    refused = first is not None and first.error is not None and first.error.refused
    if not refused:
        cluster.run(impl, scenario)


def _expect_messages(run: Run, state: str) -> None:
    """With more than one rank nothing can be right if no rank made a call."""
    if run.world_size > 1 and not any(record.calls() for record in run.ranks):
        raise NotYetError(
            f"{state}: no rank sent anything",
            slug="no-messages",
            evidence=_calls_of_each(run),
            rule="ranks are separate processes: only a message gets across",
            output=printed(run),
        )


def _received(record: RankRecord) -> bool:
    """Whether any message came to this rank."""
    return any(call["op"] in RECEIVING for call in record.calls())


def _calls_of_each(run: Run) -> tuple[Evidence, ...]:
    lines = []
    for record in run.ranks:
        calls = record.calls()
        text = ", ".join(describe(call) for call in calls[:4]) or "no call"
        if len(calls) > 4:
            text += f", … ({len(calls)} calls)"
        where = place((calls[0]["file"], calls[0]["line"])) if calls else ""
        lines.append(
            Evidence(rank=record.rank, state="finished", text=text, where=where)
        )
    return tuple(lines)
