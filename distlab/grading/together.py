"""Several scenarios of a task in one run: to start ranks takes longer than most play.

Each check is asked what it would run first; what all of them name is then played in
one run, with the unit loaded anew for each. Only a run that came to its end counts,
and only what passes: where ranks fail, or a check finds fault, the scenario is played
again by itself, so that no mistake is blamed on what was played before it or after it
(a rank that is through with one play begins the next while others are still in it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from distlab.runner import RankContext, RankRecord, Run
from distlab.runner.context import seed_everything
from distlab.runner.rank import name_of

if TYPE_CHECKING:
    from distlab.grading.bench import Bench, Implementation
    from distlab.grading.clause import Check

Scenario = Callable[..., Any]
"""A function `(context, unit, **values) -> record` that runs on every rank."""


@dataclass(frozen=True)
class Play:
    """A scenario with its values."""

    scenario: Scenario
    values: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """How a rank finds the scenario."""
        return name_of(self.scenario)


def play_of(scenario: Scenario, values: dict[str, Any]) -> Play:
    """The same values in another order are the same play."""
    return Play(scenario, tuple(sorted(values.items())))


class Asked(BaseException):  # no check may catch it
    """What a check would run."""

    def __init__(self, play: Play) -> None:
        self.play = play


def first_plays(
    checks: Iterable[Check], impl: Implementation, asker: Bench
) -> tuple[Play, ...]:
    """What each of these checks runs first, and then; each play once.

    `asker` is a bench that answers every wish for a run with `Asked`.
    """
    plays: dict[Play, None] = {}
    for check in checks:
        try:
            check.judge(impl, asker)
        except Asked as asked:
            plays[asked.play] = None
            more = check.also(asker.world_size)
            plays.update((play_of(*wish), None) for wish in more)
        except Exception:  # what it has to say is heard when it judges
            continue
    return tuple(plays)


def asked(scenario: Scenario, values: dict[str, Any]) -> NoReturn:
    """Say what is wanted instead of running it."""
    raise Asked(play_of(scenario, values))


def play_all(
    context: RankContext,
    play: Callable[[str, dict[str, Any]], Any],
    plays: list[tuple[str, dict[str, Any]]],
) -> None:
    """In each rank: one after another; each result is reported when it is there."""
    for name, values in plays:
        seed_everything(values["seed"] + context.rank)
        traffic = context.traffic
        sent_bytes, messages = traffic.sent_bytes, traffic.messages
        value = play(name, values)
        context.report(
            [value, traffic.sent_bytes - sent_bytes, traffic.messages - messages]
        )


def taken_apart(run: Run, told: list[list[Any]], count: int) -> list[Run]:
    """The run as if each of the `count` plays had been one; nothing if it failed.

    `told` has the reports of each rank.
    """
    is_whole = run.outcome == "finished" and all(
        len(record.marks) == count == len(told[record.rank])
        and all(_is_report(report) for report in told[record.rank])
        for record in run.ranks
    )
    if not is_whole:
        return []
    return [
        replace(
            run,
            ranks=tuple(
                _part(record, number, *told[record.rank][number])
                for record in run.ranks
            ),
        )
        for number in range(count)
    ]


def _part(
    record: RankRecord, number: int, value: Any, sent_bytes: float, messages: int
) -> RankRecord:
    first, last = [0, *record.marks][number], record.marks[number]
    return replace(
        record,
        value=value,
        journal=record.journal[first:last],
        sent_bytes=sent_bytes,
        messages=messages,
    )


def _is_report(told: Any) -> bool:
    """Whether it is ours: the code under judgement can write on this line too."""
    return (
        isinstance(told, list)
        and len(told) == 3
        and isinstance(told[1], int | float)
        and isinstance(told[2], int)
    )
