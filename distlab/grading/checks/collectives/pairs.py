"""Checks of tasks 1.1 and 1.2, from one rank to the next: values, and who sent."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.any_tensor import (
    emptied,
    expect_each,
    finished_with_each,
    with_each,
)
from distlab.grading.kit.messages import (
    WORLDS,
    calls_of_each,
    expect_bytes,
    expect_messages,
    numbers,
    received,
)
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    close,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.terminal import ranks_in_words

BEFORE = -7.0
"""What is in `incoming` before the call: it may hold anything."""

# ── 1.1 send_recv ───────────────────────────────────────────────────────────────────


def exchange_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Every rank's tensor, before and after the call."""
    tensor = numbers(seed, context.rank, 4).to(context.comm.device)
    before = tensor.clone()
    unit.send_recv(context.comm, tensor)
    return {"before": before, "after": tensor}


def exchange_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Tensors of other dtypes and shapes; what is in rank 1's own is nan."""

    def call(tensor: Tensor) -> None:
        given = emptied(tensor) if context.rank == 1 else tensor
        unit.send_recv(context.comm, given)

    return with_each(context, seed, call)


def _exchanges(world_size: int) -> list[RunSpec]:
    also = [on_ranks(exchange_any)] if world_size == 3 else []
    return [on_ranks(exchange_once), *also]


@clause("collectives.exchange", "C1", worlds=(2, 3, 4, 7, 1), runs=_exchanges)
def tensor_arrives(runs: Runs) -> str | None:
    """Rank 1's tensor equals rank 0's."""
    if runs.world_size == 1:
        _expect_no_hang_alone(runs, exchange_once)
        return None
    run = runs.ended(exchange_once)
    pair = run.ranks[:2]
    # If only others hang, the two that this clause is about can be judged all the same.
    if run.outcome != "deadlock" or any(r.status != "finished" for r in pair):
        run = runs.finished(exchange_once)
    source, target = pair[0].value, pair[1].value
    if close(target["after"], source["before"]):
        expect_messages(run, "rank 1's tensor is right, but not through comm")
        if runs.world_size == 3 and run.outcome == "finished":
            expect_each(
                finished_with_each(runs, exchange_any),
                lambda before: [before[0]] * len(before),
                "the tensor",
                ranks=(1,),
            )
        return None
    expect_messages(run, "rank 1's tensor lacks rank 0's values")
    evidence = calls_of_each(run)
    if close(source["after"], target["before"]):
        raise NotYetError(
            "rank 0 got rank 1's tensor, expected the other direction: rank 0's tensor "
            "on rank 1",
            evidence=evidence,
            rule="rank 0 sends, rank 1 receives",
        )
    unchanged = close(target["after"], target["before"])
    if unchanged and received(pair[1]):
        raise NotYetError(
            "rank 1 received a message, but its tensor is unchanged: the values went "
            "into another tensor",
            slug="not-in-place",
            evidence=evidence,
            rule="receive into the argument itself: comm.recv(tensor, 0)",
        )
    if unchanged:
        raise NotYetError(
            f"with {runs.world_size} ranks, rank 1 received no message and its tensor "
            "is unchanged, expected rank 0's values in it",
            evidence=evidence,
            rule="rank 0 sends, rank 1 receives, however many ranks there are",
        )
    expect_values(
        [value["after"] for value in run.values[:2]],
        [source["before"]] * 2,
        what="the tensor",
    )
    return None


@clause(
    "collectives.exchange", "C2", worlds=(2, 3, 4, 7), runs=[on_ranks(exchange_once)]
)
def nobody_else(runs: Runs) -> str | None:
    """One message, from rank 0 to rank 1, and no other rank's tensor changes."""
    run = runs.finished(exchange_once)
    messages = sum(record.messages for record in run.ranks)
    if messages > 1:
        raise NotYetError(
            f"with {runs.world_size} ranks, {messages} messages were sent, expected "
            "only one, from rank 0 to rank 1",
            slug="extra-messages",
            evidence=calls_of_each(run),
            rule="rank 0 sends once, rank 1 receives once, all other ranks do nothing",
        )
    for rank, value in enumerate(run.values):
        if rank != 1 and not close(value["after"], value["before"]):
            raise NotYetError(
                f"send_recv changed rank {rank}'s tensor, expected it to change only "
                "rank 1's",
                evidence=calls_of_each(run),
                rule="a message is a copy: the sender's tensor stays unchanged",
            )
    source, target = (value["after"] for value in run.values[:2])
    if close(target, source):
        expect_bytes(run, source.nbytes, "rank 1's tensor is right")
    return "drawn: rank 0 ──────▶ rank 1"


# ── 1.2 ring_shift ──────────────────────────────────────────────────────────────────


def pass_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One number goes one place to the right."""
    outgoing = numbers(seed, context.rank, 1).to(context.comm.device)
    incoming = torch.full_like(outgoing, BEFORE)
    before = outgoing.clone()
    unit.ring_shift(context.comm, outgoing, incoming)
    return {"sent": before, "outgoing": outgoing, "incoming": incoming}


def pass_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Tensors of other dtypes and shapes; what is in incoming is nan."""

    def call(outgoing: Tensor) -> Tensor:
        incoming = emptied(torch.zeros_like(outgoing))
        unit.ring_shift(context.comm, outgoing, incoming)
        return incoming

    return with_each(context, seed, call)


def _passes(world_size: int) -> list[RunSpec]:
    also = [on_ranks(pass_any)] if world_size == 3 else []
    return [on_ranks(pass_once), *also]


@clause("collectives.pass_around", "C1", worlds=WORLDS, runs=_passes)
def neighbors_number(runs: Runs) -> str | None:
    """Incoming is the left neighbor's; outgoing is untouched."""
    if runs.world_size == 1:
        ended = _expect_no_hang_alone(runs, pass_once)
        if ended is not None:
            _expect_own_number(ended.values[0])
        return None
    run = runs.finished(pass_once)
    sent = [value["sent"] for value in run.values]
    incoming = [value["incoming"] for value in run.values]
    n = runs.world_size
    outgoing = [value["outgoing"] for value in run.values]
    came = all_close(incoming, sent[-1:] + sent[:-1])
    expect_messages(
        run,
        "`incoming` is right, but not through comm"
        if came
        else "`incoming` doesn't hold the left neighbor's number on every rank",
    )
    changed = [r for r in range(n) if not close(outgoing[r], sent[r])]
    if changed:
        raise NotYetError(
            f"ring_shift overwrote `outgoing` on {ranks_in_words(changed)}, expected "
            "it unchanged",
            slug="outgoing-changed",
            evidence=calls_of_each(run),
            rule="send from outgoing, receive into incoming",
        )
    old = torch.full_like(sent[0], BEFORE)
    all_received = all(map(received, run.ranks))
    expect_values(
        incoming,
        [sent[(rank - 1) % n] for rank in range(n)],
        what="`incoming`",
        suspects=[
            Suspect(
                slug="wrong-source",
                values=[sent[(rank + 1) % n] for rank in range(n)],
                sentence="on each rank, `incoming` holds the right neighbor's number, "
                "expected the left neighbor's",
                rule="send to rank + 1, receive from rank - 1",
            ),
            Suspect(
                slug="not-in-place" if all_received else "",
                values=same_everywhere(old, n),
                sentence="`incoming` is unchanged on every rank"
                + (
                    ": the numbers were received into another tensor"
                    if all_received
                    else ", expected the left neighbor's number in it"
                ),
                rule="receive into the argument itself: incoming",
            ),
            Suspect(
                slug="",
                values=sent,
                sentence="on each rank, `incoming` holds the rank's own number, "
                "expected the left neighbor's",
                rule="the number must come from the left neighbor, in a message",
            ),
        ],
    )
    if n == 3:
        expect_each(
            finished_with_each(runs, pass_any),
            lambda before: [before[-1], *before[:-1]],
            "`incoming`",
        )
    return None


@clause(
    "collectives.pass_around", "C2", worlds=(3, 2, 4, 7), runs=[on_ranks(pass_once)]
)
def one_message_each(runs: Runs) -> str | None:
    """Every rank sends exactly one message, straight to its neighbor."""
    run = runs.finished(pass_once)
    counts = [record.messages for record in run.ranks]
    odd = next((rank for rank, count in enumerate(counts) if count != 1), None)
    if odd is not None:
        raise NotYetError(
            f"with {runs.world_size} ranks, rank {odd} sent {counts[odd]} messages, "
            "expected one from each rank, to its right neighbor",
            slug="extra-messages",
            evidence=calls_of_each(run),
            rule="every rank sends once to the right and receives once from the left",
        )
    sent = [value["sent"] for value in run.values]
    if all_close([value["incoming"] for value in run.values], sent[-1:] + sent[:-1]):
        least = sum(outgoing.nbytes for outgoing in sent)
        expect_bytes(run, least, "`incoming` is right on every rank")
    return f"messages {sum(counts)}, bytes per rank {run.ranks[0].sent_bytes:.0f}"


# ── shared ─────────────────────────────────────────────────────────────────────────


def _expect_no_hang_alone(runs: Runs, scenario: Any) -> Run | None:
    """A single rank has no other: it may return, or comm may refuse its call."""
    run = runs.ended(scenario)
    first = run.primary()
    refused = first is not None and first.error is not None and first.error.refused
    if refused:
        return None
    try:
        return runs.finished(scenario)
    except NotYetError as failure:
        raise failure.but(situation="with one rank") from failure


def _expect_own_number(value: dict[str, Any]) -> None:
    """In a ring of one rank, the left neighbor is the rank itself."""
    if not close(value["incoming"], value["sent"]):
        raise NotYetError(
            f"with one rank, `incoming` holds {value['incoming'].item():.3g}, expected "
            f"{value['sent'].item():.3g}, the rank's own `outgoing`",
            rule="a rank that is alone is its own left neighbor",
        )
