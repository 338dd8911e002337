"""Checks of tasks 1.1 and 1.2, from one rank to the next: values, and who sent."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.messages import (
    WORLDS,
    calls_of_each,
    expect_messages,
    numbers,
    received,
)
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import (
    Suspect,
    all_close,
    close,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

# ── 1.1 exchange ────────────────────────────────────────────────────────────────────


def exchange_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Every rank has a box of its own; afterwards, what is in it."""
    box = numbers(seed, context.rank, 4).to(context.comm.device)
    before = box.clone()
    unit.exchange(context.comm, box)
    return {"before": before, "after": box}


@clause("collectives.exchange", "C1", worlds=(2, 3, 4, 7, 1))
def box_arrives(impl: Implementation, harness: RankHarness) -> str | None:
    """V: rank 1's box equals rank 0's."""
    if harness.world_size == 1:
        _expect_no_hang_alone(impl, harness, exchange_once)
        return None
    run = harness.observe(impl, exchange_once)
    pair = run.ranks[:2]
    # If only others hang, the two that this clause is about can be judged all the same.
    if run.outcome != "deadlock" or any(r.status != "finished" for r in pair):
        run = harness.run(impl, exchange_once)
    source, target = pair[0].value, pair[1].value
    if close(target["after"], source["before"]):
        expect_messages(run, "rank 1's box is right, but not by a message")
        return None
    expect_messages(run, "rank 1's box is as it was")
    evidence = calls_of_each(run)
    if close(source["after"], target["before"]):
        raise NotYetError(
            "the other way round: rank 0 got rank 1's box",
            evidence=evidence,
            rule="rank 0 sends, rank 1 receives",
        )
    unchanged = close(target["after"], target["before"])
    if unchanged and received(pair[1]):
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
def nobody_else(impl: Implementation, harness: RankHarness) -> str | None:
    """J: one message, from rank 0 to rank 1, and no other box is touched."""
    run = harness.run(impl, exchange_once)
    messages = sum(record.messages for record in run.ranks)
    if messages > 1:
        raise NotYetError(
            f"{messages} messages in all, where one is enough",
            slug="extra-messages",
            evidence=calls_of_each(run),
            rule="rank 0 sends once, rank 1 receives once, the others do nothing",
        )
    for rank, value in enumerate(run.values):
        if rank != 1 and not close(value["after"], value["before"]):
            raise NotYetError(
                f"rank {rank}'s box changed; only rank 1's may",
                evidence=calls_of_each(run),
                rule="a message is a copy: the sender keeps what it has",
            )
    return "drawn: rank 0 ──────▶ rank 1"


# ── 1.2 pass_around ─────────────────────────────────────────────────────────────────


def pass_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One number goes one place to the right."""
    outgoing = numbers(seed, context.rank, 1).to(context.comm.device)
    incoming = torch.zeros(1, dtype=torch.float64, device=context.comm.device)
    before = outgoing.clone()
    unit.pass_around(context.comm, outgoing, incoming)
    return {"sent": before, "outgoing": outgoing, "incoming": incoming}


@clause("collectives.pass_around", "C1", worlds=WORLDS)
def neighbors_number(impl: Implementation, harness: RankHarness) -> str | None:
    """V: incoming is the left neighbor's; outgoing is untouched."""
    if harness.world_size == 1:
        _expect_no_hang_alone(impl, harness, pass_once)
        return None
    run = harness.run(impl, pass_once)
    sent = [value["sent"] for value in run.values]
    incoming = [value["incoming"] for value in run.values]
    n = harness.world_size
    outgoing = [value["outgoing"] for value in run.values]
    expect_messages(run, "incoming is not the left neighbor's number")
    if not all_close(outgoing, sent):
        raise NotYetError(
            "outgoing was overwritten; what arrives belongs in incoming",
            slug="outgoing-changed",
            evidence=calls_of_each(run),
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
                sentence="incoming holds the right neighbor's number: the circle "
                "runs the other way",
                rule="send to rank + 1, receive from rank - 1",
            ),
            Suspect(
                slug="not-in-place" if all(map(received, run.ranks)) else "",
                values=same_everywhere(zero, n),
                sentence="incoming is as it was on every rank: nothing was received "
                "into it",
                rule="receive into the tensor you were given",
            ),
            Suspect(
                slug="",
                values=sent,
                sentence="incoming holds the rank's own number",
                rule="the number must come from the neighbor, in a message",
            ),
        ],
        rule="send to rank + 1, receive from rank - 1, both modulo n",
    )
    return None


@clause("collectives.pass_around", "C2", worlds=(3, 2, 4, 7))
def one_message_each(impl: Implementation, harness: RankHarness) -> str | None:
    """J: every rank sends exactly one message, straight to its neighbor."""
    run = harness.run(impl, pass_once)
    counts = [record.messages for record in run.ranks]
    if any(count != 1 for count in counts):
        raise NotYetError(
            f"messages sent by ranks 0, 1, …: {counts}; one each is enough",
            slug="extra-messages",
            evidence=calls_of_each(run),
            rule="everybody gives to the right and takes from the left, once",
        )
    return f"messages {sum(counts)}, bytes per rank {run.ranks[0].sent_bytes:.0f}"


# ── shared ─────────────────────────────────────────────────────────────────────────


def _expect_no_hang_alone(
    impl: Implementation, harness: RankHarness, scenario: Any
) -> None:
    """One rank has nobody to talk to: to return or to be refused is both fine."""
    run = harness.observe(impl, scenario)
    first = run.primary()
    refused = first is not None and first.error is not None and first.error.refused
    if not refused:
        harness.run(impl, scenario)
