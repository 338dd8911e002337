"""What a run of the corpus came to, against what is expected and the other transports.

`verdict` has all that a learner would be told, and how each rank ended. Two transports
agree on a program if these are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distlab.grading.diagnosis import diagnose, diagnose_finished
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence
from tests.corpora.programs.case import Case


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run ended, and what a learner is told about it (nothing if all is well)."""

    outcome: str
    statuses: tuple[str, ...]
    values: list[Any]
    error: str = ""
    waits_for: dict[int, tuple[int, ...]]
    cycle: tuple[int, ...]
    message: str = ""
    slug: str = ""
    kind: str = ""
    rule: str = ""
    evidence: tuple[Evidence, ...] = ()


def verdict(run: Run) -> Verdict:
    """Judge a run as any submission is judged."""
    first = run.primary()
    return Verdict(
        outcome=run.outcome,
        statuses=tuple(record.status for record in run.ranks),
        values=[plain(value) for value in run.values],
        error=first.error.type if first is not None and first.error else "",
        waits_for=run.waits_for,
        cycle=run.cycle,
        **_told(run),
    )


def _told(run: Run) -> dict[str, Any]:
    try:
        if run.outcome != "finished":
            raise diagnose(run)
        diagnose_finished(run)
    except NotYetError as told:
        names = ("message", "slug", "kind", "rule", "evidence")
        return {name: getattr(told, name) for name in names}
    return {}


def plain(value: Any) -> Any:
    """With each tensor as its type and its elements, which == can compare."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def elements(value: Any) -> Any:
    """Of what `plain` gave, the elements alone."""
    if isinstance(value, tuple):
        return value[1]
    return [elements(part) for part in value] if isinstance(value, list) else value


# ── against what is expected ────────────────────────────────────────────────────────


def problems(case: Case, came: Verdict) -> list[str]:
    """In what a verdict is not the one that the program expects."""
    found = []
    if case.outcome not in (came.outcome, "anyhow"):
        found.append(f"{came.outcome}, not {case.outcome}: {came.message}")
    if case.error and came.error != case.error:
        found.append(f"raised {came.error or 'nothing'}, not {case.error}")
    if case.outcome in ("finished", "anyhow") and came.slug != case.slug:
        found.append(f"judged {came.slug or 'right'}, not {case.slug or 'right'}")
    if case.gives is not None:
        found += _wrong_values(case, came, case.gives)
    if not case.is_right and not case.guilty():
        found.append("a buggy program has no line marked as guilty")
    return found


def _wrong_values(
    case: Case, came: Verdict, gives: Callable[[int, int], Any]
) -> list[str]:
    return [
        f"rank {rank} returned {elements(value)}, not {gives(rank, case.world_size)}"
        for rank, value in enumerate(came.values)
        if elements(value) != gives(rank, case.world_size)
    ]


def differences(case: Case, one: Verdict, other: Verdict) -> list[str]:
    """In what two transports do not say the same.

    When a rank raises, the run is over: which of several was first, and how far the
    others have come by then, is a race between real processes. Of a run that may end
    anyhow, only what the learner is told must be the same.
    """
    names: Iterable[str] = Verdict.__dataclass_fields__
    if case.outcome == "raised":
        names = ("outcome", "error", "slug", "kind", "rule")
    elif case.outcome == "anyhow":
        names = ("message", "slug", "rule")
    return [
        f"{name}: {getattr(one, name)!r} against {getattr(other, name)!r}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]


# ── the guilty line ─────────────────────────────────────────────────────────────────


def names_line(case: Case, came: Verdict) -> bool:
    """Whether a guilty line is in the verdict: beside a rank, or in a sentence."""
    texts = [came.message, came.rule, *(line.text for line in came.evidence)]
    told = set(re.findall(r"\bline (\d+)", " ".join(texts)))
    return bool(_at_guilty(case, came)) or bool(told & _lines(case))


def names_rank(case: Case, came: Verdict) -> bool:
    """Whether the sentence itself speaks of a rank that stands on a guilty line."""
    told = re.search(r"\d+(→\d+)+", came.message)
    ranks = re.findall(r"\d+", told[0]) if told else []
    ranks += re.findall(r"ranks? (\d+)", came.message)
    every = re.search(r"\bboth ranks|all \d+ ranks", came.message)
    guilty = _at_guilty(case, came)
    return bool(guilty) and bool(every or guilty & set(map(int, ranks)))


def _at_guilty(case: Case, came: Verdict) -> set[int]:
    ends = case.guilty()
    return {
        line.rank
        for line in came.evidence
        if line.state != "finished" and any(_is_at(line.where, end) for end in ends)
    }


def _is_at(where: str, end: str) -> bool:
    """`messages.py:41 ← :60` is at line 41 and at line 60 of that file."""
    place, _, caller = where.partition(" ← ")
    file = place.rpartition(":")[0]
    places = [place, f"{file}{caller}"] if caller else [place]
    return any(place.replace("\\", "/").rpartition("/")[2] == end for place in places)


def _lines(case: Case) -> set[str]:
    return {place.rpartition(":")[2] for place in case.guilty()}


# ── a row of the table ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program on so many ranks, on each transport."""

    case: Case
    verdicts: Mapping[str, Verdict]

    @property
    def disagreements(self) -> list[str]:
        """Where a transport says something else than expected, or than the first."""
        (_, first), *_ = self.verdicts.items()
        found = []
        for name, came in self.verdicts.items():
            wrong = problems(self.case, came) or differences(self.case, first, came)
            found += [f"{name}: {problem}" for problem in wrong]
        return found

    @property
    def line_named(self) -> bool:
        """On every transport."""
        return all(names_line(self.case, came) for came in self.verdicts.values())

    @property
    def rank_named(self) -> bool:
        """On every transport."""
        return all(names_rank(self.case, came) for came in self.verdicts.values())


Runner = Callable[[Case], Run]


def judge(case: Case, transports: Mapping[str, Runner]) -> Row:
    """Run a program on each transport."""
    runs = {name: runner(case) for name, runner in transports.items()}
    return Row(case=case, verdicts={name: verdict(run) for name, run in runs.items()})
