"""Checks of the unit `collectives`: values, in place, and who sent how much."""

from __future__ import annotations

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


def broadcast_once(
    context: RankContext, unit: ModuleType, seed: int, src: int
) -> dict[str, Any]:
    """One broadcast of a 2 × 3 tensor."""
    tensor = numbers(seed, context.rank, 6).reshape(2, 3)
    before = tensor.clone()
    unit.broadcast(context.comm, tensor, src)
    return {"before": before, "after": tensor}


def _sources(world_size: int) -> tuple[int, ...]:
    """All with three ranks, one that is neither 0 nor obvious with other numbers."""
    # A run each: two broadcasts in one run would make a hang of the first one hard to
    # read, because some ranks would wait in the second already.
    return (1, 0, 2) if world_size == 3 else (world_size // 2,)


@clause("collectives.broadcast", "C1", worlds=WORLDS)
def everyone_has_it(impl: Implementation, cluster: Bench) -> str | None:
    """V: after a broadcast from src every rank has src's values, for every src."""
    n = cluster.world_size
    for src in _sources(n):
        run = cluster.run(impl, broadcast_once, src=src)
        _expect_messages(run, "every rank's tensor is as it was")
        before = [value["before"] for value in run.values]
        arrived = [_received(record) for record in run.ranks if record.rank != src]
        expect_values(
            [value["after"] for value in run.values],
            same_everywhere(before[src], n),
            what=f"the tensor after a broadcast from rank {src}",
            suspects=[
                Suspect(
                    slug="not-in-place" if all(arrived) else "",
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
    """B: n - 1 messages, since each rank but src receives once."""
    n = cluster.world_size
    for src in _sources(n):
        run = cluster.run(impl, broadcast_once, src=src)
        total = sum(record.messages for record in run.ranks)
        if total != n - 1:
            raise NotYetError(
                f"{total} messages for a broadcast on {n} ranks; {n - 1} are enough",
                slug="extra-messages",
                evidence=_calls_of_each(run),
                rule="every rank but src receives once",
            )
    return f"n = {n}: {n - 1} messages"


# ── 1.4 all_reduce ──────────────────────────────────────────────────────────────────


def reduce_once(
    context: RankContext, unit: ModuleType, seed: int, kind: str = "uneven"
) -> dict[str, Any]:
    """Sum a tensor: no default shape or dtype fits both kinds.

    "uneven" is float64, from 1 to 1,000,000: the order of summation shows in the bits.
    """
    if kind == "uneven":
        tensor = numbers(seed, context.rank, 64)
        tensor *= 10.0 ** torch.arange(64).remainder(7)
    else:
        tensor = numbers(seed, context.rank, 6, "float32").reshape(2, 3)
    before = tensor.clone()
    returned = unit.all_reduce(context.comm, tensor)
    is_tensor = isinstance(returned, Tensor)
    return {
        "before": before,
        "after": tensor,
        "returned": returned.detach().clone() if is_tensor else None,
    }


class Sums:
    """What each rank had, has and returned; and what it should have."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before: list[Tensor] = [value["before"] for value in run.values]
        self.after: list[Tensor] = [value["after"] for value in run.values]
        self.returned: list[Any] = [value["returned"] for value in run.values]
        self.total = torch.stack([before.double() for before in self.before]).sum(0)
        single = self.before[0].dtype == torch.float32
        self.tolerance = 1e-5 if single else 1e-12

    def right(self, value: object) -> bool:
        """Whether it is the sum, up to rounding."""
        return close(value, self.total, self.tolerance)

    def outside(self) -> list[int]:
        """The ranks that have the sum, but not in the caller's tensor; if all have it.

        Those whose tensor is still as it was, although they received a message or
        returned the sum. No rank, as soon as one holds anything else but the sum.
        """
        wrong = [rank for rank, now in enumerate(self.after) if not self.right(now)]
        for rank in wrong:
            changed = not torch.equal(self.after[rank], self.before[rank])
            received = _received(self.run.ranks[rank])
            if changed or not (received or self.right(self.returned[rank])):
                return []
        return wrong


def _sums(impl: Implementation, cluster: Bench) -> list[Sums]:
    kinds = ("uneven", "plain") if cluster.world_size == 3 else ("uneven",)
    return [Sums(cluster.run(impl, reduce_once, kind=kind)) for kind in kinds]


@clause("collectives.all_reduce", "C1", worlds=WORLDS)
def sum_everywhere(impl: Implementation, cluster: Bench) -> str | None:
    """V and X: what each rank ends up with is the sum, and the same bits."""
    for sums in _sums(impl, cluster):
        _expect_messages(sums.run, "the tensors are not the sum over the ranks")
        if sums.outside():
            raise NotJudgedError("the sum is not in the caller's tensor: see C2")
        expect_values(
            sums.after,
            same_everywhere(sums.total, cluster.world_size),
            what="the sum",
            tolerance=sums.tolerance,
            suspects=_wrong_sums(sums.before, sums.total),
            rule="add up all ranks' tensors, each exactly once",
        )
        expect_equal_bits(
            sums.after,
            what="the sum",
            slug="own-order-sum",
            rule="let one rank add, and copy its result to the others: a + b + c "
            "rounds differently from c + b + a",
        )
    return None


@clause("collectives.all_reduce", "C2", worlds=WORLDS)
def in_place(impl: Implementation, cluster: Bench) -> str | None:
    """V: the caller's own tensor holds the sum."""
    n = cluster.world_size
    for sums in _sums(impl, cluster):
        outside = sums.outside()
        if outside:
            raise NotYetError(
                _where_the_sum_is(sums, outside),
                slug="not-in-place",
                evidence=_calls_of_each(sums.run),
                rule="write into the tensor you were given: tensor += … or "
                "tensor.copy_(…); tensor = … makes a new one",
            )
        expect_values(
            sums.after,
            same_everywhere(sums.total, n),
            what="the caller's tensor",
            tolerance=sums.tolerance,
            rule="write into the tensor you were given, on every rank",
        )
    halves = [len(record.calls()) for record in sums.run.ranks]
    return (
        f"n = {n}: rank 0 takes part in {halves[0]} messages, rank {n - 1} in "
        f"{halves[-1]}. And with n = 1,000?"
    )


def _where_the_sum_is(sums: Sums, outside: list[int]) -> str:
    n = sums.run.world_size
    on = "every rank" if len(outside) == n else f"rank {outside[0]}"
    unchanged = f"the caller's tensor is unchanged on {on}"
    if all(sums.right(sums.returned[rank]) for rank in outside):
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
