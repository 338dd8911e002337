"""Checks of 3.25, C3 and C4: what a server has after it was killed, once and twice."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from distlab.given.parameter_server import LOG
from distlab.grading.checks.parameter_server.exactly_once import (
    CRASHES,
    RANKS,
    TASK,
    Pushed,
    ask,
    counts_of,
    crashes_of,
    expect_all,
    files_of,
    is_torn,
    named,
    new_server,
    when,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.sim import CrashPoint

FIRST_LIFE: tuple[Pushed, ...] = ((0, 1), (1, 1))
SECOND_LIFE: tuple[Pushed, ...] = (*FIRST_LIFE, (0, 2))
_EVERY = 29  # of the first crashes, one in so many is followed by second ones


def _flaw(
    unit: ModuleType, point: CrashPoint, told: set[Pushed], may: set[Pushed]
) -> dict[str, Any] | None:
    """What the next server has wrong, or the one after it; only `may` may count."""
    disk = point.disk()
    of_next, of_second = (
        counts_of(new_server(unit, disk).weights.tolist()[0]) for _ in range(2)
    )
    for push in sorted(told | set(of_next) | set(of_second)):
        counts = of_next if of_next.get(push) != 1 else of_second
        count = counts.get(push, 0)
        if count > 1 or (count == 0 and push in told) or push not in may:
            return {
                "push": push,
                "count": count,
                "told": push in told,
                "when": when(point),
                "disk": files_of(point),
            }
    return None


def one_crash(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The first crash that the next server does not survive; then retries."""
    for point in crashes_of(unit, FIRST_LIFE):
        told = set(point.told)
        wrong = _flaw(unit, point, told, set(FIRST_LIFE))
        if wrong is not None:
            return wrong
        server = new_server(unit, point.disk())
        for push in FIRST_LIFE:  # each worker repeats what it did not get a reply to
            server.handle(push[0], ask(push).message)
        counts = counts_of(server.weights.tolist()[0])
        for push in FIRST_LIFE:
            if counts.get(push) != 1:
                facts = {"push": push, "count": counts.get(push, 0), "told": True}
                return facts | {"when": when(point), "disk": [], "repeated": True}
    return None


def two_crashes(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The first two crashes in a row that the third server does not survive."""
    for place, first in enumerate(crashes_of(unit, FIRST_LIFE)):
        torn = len(first.files.get(LOG, b"")) > 0 and "append" in first.last
        if place % _EVERY and not (torn and place % 9 == 4):
            continue
        told = set(first.told)
        for second in crashes_of(unit, SECOND_LIFE, dict(first.files)):
            both = told | set(second.told)
            wrong = _flaw(unit, second, both, set(SECOND_LIFE))
            if wrong is not None:
                old, new = (one.files.get(LOG, b"") for one in (first, second))
                is_longer = len(new) > len(old) and new.startswith(old)
                is_behind = is_torn(old) and is_longer
                return wrong | {"first": when(first), "behind": is_behind}
    return None


@clause(
    TASK,
    "C3",
    worlds=(1,),
    plays=(RANKS,),
    runs=[on_ranks(one_crash).when("after a crash of the server")],
)
def there_after_a_crash(runs: Runs) -> str | None:
    """At every crash, what the next server has; and again after retries."""
    wrong = worked_out(runs, one_crash).values[0]
    if wrong is None:
        return None
    names = [name for name, _ in wrong["disk"]]
    slug, rule = "", ""
    if wrong["count"] > 1 and wrong.get("repeated"):
        slug, rule = "clock-forgotten", "the clock of each worker is in the log, too"
    elif not wrong["count"] and LOG not in names and not wrong.get("repeated"):
        slug, rule = "name-not-synced", "the name of a new file needs sync_folder"
    raise NotYetError(
        f"when the server was killed {wrong['when'] or 'at its start'} and restarted, "
        f"{_facts(wrong)}",
        slug=slug,
        evidence=_disk(wrong),
        rule=rule,
    )


def _facts(wrong: dict[str, Any]) -> str:
    push, count = named(tuple(wrong["push"])), wrong["count"]
    what = "had acknowledged" if wrong["told"] else "had received"
    if wrong.get("repeated"):
        push = f"{push}, which was sent again"
    elif not count:
        push = f"{push}, which the server {what}"
    if count > 1:
        comma = "," * ("which" in push)
        return f"{push}{comma} was applied {count} times, expected once"
    return f"the weights {'contain' if count else 'lack'} {push}"


def _disk(wrong: dict[str, Any]) -> tuple[Evidence, ...]:
    names = ", ".join(f"{name} ({size} bytes)" for name, size in wrong["disk"])
    return (Evidence(NOBODY, "disk", names or "no file"),)


@clause(
    TASK,
    "C4",
    worlds=(1,),
    plays=(RANKS,),
    runs=[on_ranks(two_crashes).when("after two crashes of the server"), CRASHES],
)
def there_after_two_crashes(runs: Runs) -> str | None:
    """The same for pairs of crashes, and under scripts that kill the server."""
    wrong = worked_out(runs, two_crashes).values[0]
    if wrong is not None:
        slug, rule = "", ""
        if wrong["behind"] and not wrong["count"]:
            slug = "behind-torn-record"
            rule = "read_records stops at a torn record: remove it before you append"
        raise NotYetError(
            f"when the server was killed {wrong['first']}, restarted and killed again "
            f"{wrong['when'] or 'at its start'}, {_facts(wrong)}",
            slug=slug,
            evidence=_disk(wrong),
            rule=rule,
        )
    record = worked_out(runs, CRASHES).values[0]
    expect_all(record)
    return f"the same under {record['num_scripts']} scripts that kill the server"
