"""How good the autograder is: what it says of each entry of the catalogue."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum
from distlab.grading.blind import Foreign
from distlab.grading.catalogue import Entry
from distlab.grading.grade import Grader
from distlab.grading.verdict import TaskVerdict
from distlab.runner import Cluster

SEED = 20  # every run sees the same numbers, so that a survivor can be looked at


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """What the grader said about one entry; `clause` and `slug` are the verdict's."""

    entry: Entry
    status: str
    clause: str
    slug: str
    message: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether it was rejected, as a mutant must be."""
        return self.status == "fail"

    @property
    def as_named(self) -> bool:
        """Whether it was rejected through its clause, with its diagnosis or none."""
        named = (self.clause, self.slug) == (self.entry.clause, self.entry.slug)
        return self.killed and named

    @property
    def is_right(self) -> bool:
        """Whether the grader did with it what it must."""
        return self.as_named if self.entry.is_mutant else self.status == "pass"

    def to_json(self) -> dict[str, Any]:
        """One line of the report."""
        line: dict[str, Any] = {"id": self.entry.id, "task": self.entry.task}
        if self.entry.is_mutant:
            line |= {"killed": self.killed, "as_named": self.as_named}
        else:
            line |= {"accepted": self.is_right}
        return line | {
            "clause": self.clause,
            "slug": self.slug,
            "message": self.message,
            "seconds": round(self.seconds, 3),
        }


def judge(
    curriculum: Curriculum,
    cluster: Cluster,
    entries: Iterable[Entry],
    on_result: Callable[[EntryResult], None] | None = None,
    seed: int = SEED,
) -> list[EntryResult]:
    """Grade each entry as if a learner had written it; nothing is left on disk."""
    results = []
    with tempfile.TemporaryDirectory(prefix="distlab-mutants-") as folder:
        for entry in entries:
            unit = curriculum.units[entry.unit]
            solution = unit.solution(curriculum.root).read_text(encoding="utf-8")
            path = Path(folder) / f"{entry.id}_{unit.name}.py"
            path.write_text(entry.applied_to(solution), encoding="utf-8")
            task = curriculum.task(entry.task)
            if entry.limit_s:
                task = replace(task, time_limit_s=entry.limit_s)
            grader = Grader(curriculum, cluster, code=str(path), seed=seed)
            results.append(_result(entry, grader.grade([task]).tasks[0]))
            if on_result:
                on_result(results[-1])
    return results


def judge_set(
    curriculum: Curriculum,
    cluster: Cluster,
    solutions: Iterable[Foreign],
    seeds: Sequence[int] = (SEED,),
    on_verdicts: Callable[[Foreign, Sequence[TaskVerdict]], None] = lambda *_: None,
) -> list[tuple[Foreign, list[TaskVerdict]]]:
    """Grade each solution of a blind set once per seed."""
    results = []
    with tempfile.TemporaryDirectory(prefix="distlab-blind-") as folder:
        for number, solution in enumerate(solutions):
            task = curriculum.task(solution.task)
            path = Path(folder) / f"blind{number}_{task.unit}.py"
            path.write_text(solution.text, encoding="utf-8")
            graders = (
                Grader(curriculum, cluster, code=str(path), seed=seed) for seed in seeds
            )
            verdicts = [grader.grade([task]).tasks[0] for grader in graders]
            results.append((solution, verdicts))
            on_verdicts(solution, verdicts)
    return results


def _result(entry: Entry, verdict: TaskVerdict) -> EntryResult:
    failure = verdict.first_failure()
    return EntryResult(
        entry=entry,
        status=verdict.status,
        clause=failure.id if failure else "",
        slug=verdict.slug,
        message=verdict.message,
        seconds=verdict.seconds,
    )
