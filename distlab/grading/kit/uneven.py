"""Ranks whose shares of the data are unequal, and a rank that has nothing.

The classic mistake there is to leave early: the others then wait in a collective that
one rank never calls, or meet another call of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distlab.comm import COLLECTIVES
from distlab.grading.runs import Runs, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import evidence, in_words

TAKE_PART = "a rank with nothing to add adds zeros: every rank makes every call"

_MISFITS = ("collective-mismatch", "peer-finished")

Naming = Callable[[Run], NotYetError | None]
"""Looks at a run that did not go well, and names the mistake if it knows it."""


def run_or_name(
    runs: Runs,
    scenario: Scenario,
    name: Naming,
    **values: Any,
) -> Run:
    """`runs.finished`; a failure is looked at by `name` first.

    Raises:
        NotYetError: the run did not end well.
    """
    try:
        return runs.finished(scenario, **values)
    except NotYetError as error:
        run = error.run
        # What a rank raised is told by its message; only misfits need another name.
        if run is not None and (run.outcome == "deadlock" or error.slug in _MISFITS):
            raise name(run) or error from error
        raise


def left_early(
    run: Run, empty: Sequence[int], why: str, ended: str = "finished"
) -> NotYetError | None:
    """A rank of `empty` that made fewer calls than a rank that waits for it.

    `ended` says how it left: finished or raised.
    """
    waiting = [record for record in run.ranks if record.waiting]
    for rank in empty:
        record = run.ranks[rank]
        longer = [w for w in waiting if made(w) > made(record)]
        if record.status != ended or not longer:
            continue
        count = made(record)
        calls = f"stopped after {count} call{'s' * (count > 1)}"
        return NotYetError(
            f"rank {rank} {why} and {calls if count else 'made no call'}, but rank "
            f"{longer[0].rank} waits for it in {in_words(longer[0].waiting)}",
            slug="no-samples-no-call",
            evidence=evidence(run),
            rule=TAKE_PART,
            kind="DEADLOCK",
            fatal=True,
        )
    return None


def made(record: RankRecord) -> int:
    """How many collectives a rank has begun."""
    return sum(call["op"] in COLLECTIVES for call in record.calls())


def on_one_rank_only(run: Run) -> NotYetError | None:
    """A line that one rank alone has reached, and waits there for the others."""
    lines = [
        {tuple(place) for call in record.calls() for place in _places(call)}
        for record in run.ranks
    ]
    for record in run.ranks:
        if not record.waiting:
            continue
        others = set().union(*(own for r, own in enumerate(lines) if r != record.rank))
        alone = [p for p in _places(record.waiting) if tuple(p) not in others]
        if alone and run.world_size > 1:
            line = alone[-1][1]
            return NotYetError(
                f"only rank {record.rank} reached line {line}, where it waits for "
                f"the others in {in_words(record.waiting)}",
                slug="collective-mismatch",
                evidence=evidence(run),
                rule="every rank must call a function that has a collective inside",
                kind="DEADLOCK",
                fatal=True,
            )
    return None


def _places(call: Any) -> list[Any]:
    """Where a call stands and, if it is in a function of the learner's, its caller."""
    return [[call["file"], call["line"]], *([call["via"]] if call.get("via") else [])]
