"""Several scenarios of a task in one run: to start ranks takes longer than most take.

The unit is loaded anew for each. Only a run that came to its end counts, and only what
passes: where ranks fail, or a judge finds fault, each scenario is run again by itself,
so that no mistake is blamed on what ran before it or after it (a rank that is through
with one scenario begins the next while others are still in it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from distlab.runner import RankContext, RankRecord, Run
from distlab.runner.context import seed_everything


def play_all(
    context: RankContext,
    play: Callable[[str, dict[str, Any]], Any],
    plays: list[tuple[str, dict[str, Any]]],
) -> None:
    """In each rank: one after another; each result is reported when it is there."""
    for name, values in plays:
        play_reported(context, values["seed"], partial(play, name, values))


def play_reported(context: RankContext, seed: int, play: Callable[[], Any]) -> None:
    """In each rank: play, and report the result with what it sent."""
    seed_everything(seed + context.rank)
    traffic = context.traffic
    sent_bytes, messages = traffic.sent_bytes, traffic.messages
    value = play()
    context.report(
        [value, traffic.sent_bytes - sent_bytes, traffic.messages - messages]
    )


def is_past_first(told: list[list[Any]]) -> bool:
    """Whether any rank was through with a scenario."""
    return any(_ends(reports) for reports in told)


def taken_apart(run: Run, told: list[list[Any]], count: int) -> list[Run]:
    """The run as if each of the `count` scenarios had been one; nothing if it failed.

    `told` has the reports of each rank: those that scenarios make of their own, and
    ours at the end of each.
    """
    is_whole = run.outcome == "finished" and all(
        len(record.marks) == len(reports)
        and len(ends := _ends(reports)) == count
        and ends[-1] == len(reports) - 1
        for record in run.ranks
        for reports in [told[record.rank]]
    )
    if not is_whole:
        return []
    return [
        replace(
            run,
            ranks=tuple(
                _part(record, told[record.rank], number) for record in run.ranks
            ),
        )
        for number in range(count)
    ]


def _part(record: RankRecord, reports: list[Any], number: int) -> RankRecord:
    ends = [-1, *_ends(reports)]
    before, end = ends[number : number + 2]
    first = record.marks[before] if number else 0
    value, sent_bytes, messages = reports[end]
    return replace(
        record,
        value=value,
        journal=record.journal[first : record.marks[end]],
        marks=[mark - first for mark in record.marks[before + 1 : end]],
        sent_bytes=sent_bytes,
        messages=messages,
    )


def _ends(reports: list[Any]) -> list[int]:
    """Which of these reports are ours."""
    return [place for place, told in enumerate(reports) if _is_report(told)]


def _is_report(told: Any) -> bool:
    """Whether it is ours: a scenario, and the code under judgement, write here too."""
    return (
        isinstance(told, list)
        and len(told) == 3
        and isinstance(told[1], int | float)
        and isinstance(told[2], int)
    )
