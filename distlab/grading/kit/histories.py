"""What a service met, row by row, and a model that says which replies were due.

A judge plays the rows of a history to a model (`compared`), so it knows at each row
which reply was due, and what the service had to have. `first_by_clause` is its half in
the rank: of many scripts it keeps those that break a clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, RunSpec
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import NOBODY, Evidence

GONE, RESTARTED, CRASHED = "gone", "restarted", "crashed"
"""What stands in a row for `PeerGone`, a start after a crash, and no reply at all."""
_LAST = 8  # rows that a verdict shows
S = TypeVar("S")


class Row(NamedTuple):
    """One thing that the service met: a message, the end of a rank, its own restart."""

    time_s: float
    peer: int
    request: Any  # as the codec reads it; or GONE, RESTARTED
    reply: Any  # as the codec reads it; None: not yet; CRASHED: it died in the call
    state: Any = None  # of the service afterwards, where the player was told to look


History = Sequence[Sequence[Any]]
"""Rows, before or after their way through a record."""


Faults = Callable[[S, History], dict[str, NotYetError]]
"""What is wrong with the history of a script: the verdict on each clause it breaks."""


class Model:
    """What a judge holds against a history."""

    def offer(self, row: Row) -> Any:
        """The reply that is due to `row.request`; None: not yet."""
        raise NotImplementedError

    def gone(self, peer: int) -> None:
        """This rank's process has ended."""

    def restart(self) -> None:
        """The service was made again."""


class Compared(NamedTuple):
    """A message, and the reply that was due."""

    place: int  # of the row
    row: Row
    expected: Any

    @property
    def is_early_or_late(self) -> bool:
        """Whether it was answered although it was not due, or the other way round."""
        return (self.row.reply is None) != (self.expected is None)


def rows_of(history: History) -> list[Row]:
    """The rows of a history, after its way through a record."""
    return [Row(*row) for row in history]


def compared(history: History, model: Model) -> Iterator[Compared]:
    """Each message that was handled; meanwhile the model has met what comes before."""
    for place, row in enumerate(rows_of(history)):
        if row.request == RESTARTED:
            model.restart()
        elif row.request == GONE:
            model.gone(row.peer)
        elif row.reply != CRASHED:
            yield Compared(place, row, model.offer(row))


# ── many scripts, one record for each clause ────────────────────────────────────────


def first_by_clause(
    scripts: Iterable[S],
    play: Callable[[S], History],
    faults: Faults[S],
    shorter: Callable[[S], Iterable[S]] = lambda script: (),
) -> list[tuple[S, History]]:
    """In the rank: for each clause the first script that breaks it, with its history.

    `shorter` gives the scripts with one step less: the shortest that breaks it is kept.
    One of them may be impossible, with an event that refers to what never was. So
    `faults` says nothing about a history from its first impossible event on.
    """
    found, known = [], set[str]()
    for script in scripts:
        for name in faults(script, play(script)).keys() - known:

            def fails(one: S, name: str = name) -> bool:
                return name in faults(one, play(one))

            known.add(name)
            short = shortest(script, fails, shorter)
            found.append((short, play(short)))
    return found


def shortest(
    script: S, fails: Callable[[S], bool], shorter: Callable[[S], Iterable[S]]
) -> S:
    """A script that fails, of which no step can be left out."""
    while (less := next(filter(fails, shorter(script)), None)) is not None:
        script = less
    return script


def expect(runs: Runs, scenario: RunSpec, clause_id: str, faults: Faults[Any]) -> None:
    """In the judge: what `first_by_clause` kept says nothing against this clause.

    Raises:
        NotYetError: it does.
    """
    for script, history in worked_out(runs, scenario).values[0]:
        if fault := faults(script, history).get(clause_id):
            raise fault


# ── in words ────────────────────────────────────────────────────────────────────────


def under(record: dict[str, Any]) -> str:
    """The script of a record as the beginning of a sentence, or nothing."""
    return f"{', '.join(record['faults'])}: " if record["faults"] else ""


def last_rows(
    history: History,
    words: Callable[[Row], str],
    upto: int | None = None,
    *,
    beside: int = 1,
) -> tuple[Evidence, ...]:
    """The rows up to one place, the last few of them, one line each.

    The last one, which decides, is always shown: `beside` rows have room before these,
    and a line says how many are left out. A message that was offered again and got no
    reply again has one line. Where no time passes, a line has the number of its row.
    """
    rows = rows_of(history)[: None if upto is None else upto + 1]
    has_times = any(row.time_s for row in rows)
    shown = [
        (number, row)
        for number, row in enumerate(rows, 1)
        if number == len(rows)
        or row.reply is not None
        or row[1:4] not in [other[1:4] for other in rows[: number - 1]]
    ]
    room = _LAST - beside
    left_out: tuple[Evidence, ...] = ()
    if len(shown) > room:
        num, shown = len(shown) - room + 1, shown[1 - room :]
        text = f"{num} event{'s' * (num > 1)} before"
        left_out = (Evidence(NOBODY, "…", text),)
    return left_out + tuple(
        Evidence(
            max(row.peer, NOBODY),
            f"{row.time_s:.4g} s" if has_times else f"#{number}",
            row.request if row.request in (GONE, RESTARTED) else words(row),
        )
        for number, row in shown
    )
