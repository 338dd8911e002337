"""What checks of messages have in common: numbers to send, and who sent what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distlab.grading.mismatches import printed
from distlab.grading.runs import Runs, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import Evidence, describe, place_of

# The world size that tells most comes first: with 3 a cycle is a cycle, and nothing
# that is right by luck for 2 gets through.
WORLDS = (3, 2, 4, 7, 1)
ONLY_MESSAGES = "ranks are separate processes: data moves between them in messages only"
RECEIVING = frozenset({"recv", "irecv", "sendrecv"})


def numbers(seed: int, rank: int, count: int, dtype: str = "float64") -> Tensor:
    """`count` random numbers that depend on the seed and the rank."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return values.to(getattr(torch, dtype))


def expect_messages(run: Run, state: str) -> None:
    """With more than one rank nothing can be right if no rank made a call."""
    if run.world_size > 1 and not any(record.calls() for record in run.ranks):
        raise NotYetError(
            f"{state}: no rank sent anything",
            slug="no-messages",
            evidence=calls_of_each(run),
            rule=ONLY_MESSAGES,
            output=printed(run),
        )


def expect_sent(run: Run, amounts: Sequence[float], state: str) -> None:
    """The same where the checks have messages of their own: by what each rank sent."""
    if run.world_size > 1 and not any(amounts):
        raise NotYetError(
            f"{state}: no rank sent anything",
            slug="no-messages",
            rule=ONLY_MESSAGES,
            output=printed(run),
        )


def expect_bytes(run: Run, least: float, state: str) -> None:
    """A right result needs `least` bytes in messages, of all ranks together.

    Raises:
        NotYetError: there are fewer: the rest came some other way.
    """
    total = sum(record.sent_bytes for record in run.ranks)
    if total < least:
        raise NotYetError(
            f"{state}, but the messages carried "
            f"{f'only {total:.0f} bytes in all' if total else 'no data'}, "
            f"expected at least {least:.0f} bytes",
            evidence=calls_of_each(run),
            rule=ONLY_MESSAGES,
        )


def reports_made(run: Run) -> int:
    """How many reports a scenario had made where a run failed, or got stuck.

    A scenario that reports as each of its parts begins tells so in which part that was.
    Ranks may be in different ones: what failed first counts, or who came least far.
    """
    first = run.primary()
    if first:
        return len(first.marks)
    under_way = [r for r in run.ranks if r.status != "finished"]
    return min((len(record.marks) for record in under_way), default=0)


def finished_in_parts(
    runs: Runs, scenario: Scenario, situation: Callable[[int], str], **values: Any
) -> Run:
    """The finished run of a scenario that reports as each of its parts begins.

    Raises:
        NotYetError: it did not finish; with the `situation` of the part, from 0 on, in
            which it ended, if one had begun.
    """
    try:
        return runs.finished(scenario, **values)
    except NotYetError as failure:
        begun = reports_made(failure.run) if failure.run else 0
        if not begun:
            raise
        raise failure.but(situation=situation(begun - 1)) from failure


def received(record: RankRecord) -> bool:
    """Whether any message came to this rank."""
    return any(call["op"] in RECEIVING for call in record.calls())


def with_lines(evidence: Sequence[Evidence], run: Run) -> tuple[Evidence, ...]:
    """The same evidence, and where each rank's first call stands in the function."""
    first = {record.rank: record.calls()[:1] for record in run.ranks}
    return tuple(
        replace(line, where=line.where or place_of(first[line.rank][0]))
        if first.get(line.rank)
        else line
        for line in evidence
    )


def calls_of_each(run: Run) -> tuple[Evidence, ...]:
    """What each rank called, as evidence: its first calls, and the first one's line."""
    lines = []
    for record in run.ranks:
        calls = record.calls()
        text = ", ".join(describe(call) for call in calls[:4]) or "no call"
        if len(calls) > 4:
            text += f", … ({len(calls)} calls)"
        where = place_of(calls[0]) if calls else ""
        lines.append(
            Evidence(rank=record.rank, state="finished", text=text, where=where)
        )
    return tuple(lines)
