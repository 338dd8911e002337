"""The autograder against generated mutants, see generated_mutants.

Each must be rejected, or else stand in `tests/mutants/survivors.toml` with the reason
why it is as right as the solution:

    [[survivors]]
    task = "collectives.broadcast"
    why = "The source may come last: the order of its messages is its own."
    what = ["broadcast: … → …"]
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum, Task
from distlab.grading.catalogue import RECORDS, CatalogueError
from distlab.grading.clause import Check
from distlab.grading.generated_mutants import Mutation, mutations_of
from distlab.grading.grade import Grader
from distlab.grading.harness import PlayedRuns
from distlab.grading.mutants import SEED
from distlab.grading.verdict import ClauseVerdict, NotYetError
from distlab.runner import Cluster

SURVIVORS = "survivors.toml"
LIMIT_S = 3.0  # a run of a solution takes a tenth of a second


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the grader said about one slip; `why` is the reason for a survivor."""

    mutation: Mutation
    status: str
    clause: str
    slug: str
    message: str
    seconds: float
    why: str = ""

    @property
    def killed(self) -> bool:
        """Whether it was rejected."""
        return self.status == "fail"

    @property
    def is_right(self) -> bool:
        """Rejected without a reason to survive, or alive for a reason."""
        return self.status != "error" and self.killed != bool(self.why)

    def to_json(self) -> dict[str, Any]:
        """One line of the report."""
        return {
            "id": self.mutation.id,
            "task": self.mutation.task,
            "line": self.mutation.line,
            "what": self.mutation.what,
            "killed": self.killed,
            "clause": self.clause,
            "slug": self.slug,
            "seconds": round(self.seconds, 3),
            "why": self.why,
        }


class _UntilFailure(Grader):
    """Stops at the first clause that fails: whether it is rejected is settled then."""

    def _judge_clause(self, *values: Any) -> tuple[ClauseVerdict, bool]:
        clause, ended = super()._judge_clause(*values)
        return clause, ended or clause.status == "fail"

    def _whose_part(self, *_values: Any) -> str:
        return ""

    def _named(
        self, check: Check, runs: PlayedRuns, failure: NotYetError
    ) -> NotYetError:
        return failure


def judge_generated(
    curriculum: Curriculum,
    cluster: Cluster,
    mutations: Iterable[Mutation],
    reasons: dict[tuple[str, str], str],
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Grade each slip as if a learner had made it; nothing is left on disk."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="distlab-mutants-") as folder:
        for mutation in mutations:
            task = curriculum.task(mutation.task)
            path = Path(folder) / f"{mutation.id}_{task.unit}.py"
            text = _solution(curriculum, task)
            path.write_text(mutation.applied_to(text), encoding="utf-8")
            if task.time_limit_s <= 10:
                task = replace(task, time_limit_s=LIMIT_S)
            grader = _UntilFailure(curriculum, cluster, code=str(path), seed=SEED)
            verdict = grader.grade([task]).tasks[0]
            failure = verdict.first_failure()
            outcomes.append(
                Outcome(
                    mutation=mutation,
                    status=verdict.status,
                    clause=failure.id if failure else "",
                    slug=verdict.slug,
                    message=verdict.message,
                    seconds=verdict.seconds,
                    why=reasons.get((mutation.task, mutation.what), ""),
                )
            )
            if on_outcome:
                on_outcome(outcomes[-1])
    return outcomes


def generate(curriculum: Curriculum, tasks: Sequence[Task]) -> list[Mutation]:
    """Every slip in every region of these tasks."""
    return [
        mutation
        for task in tasks
        for mutation in mutations_of(_solution(curriculum, task), task.id)
    ]


def read_reasons(
    curriculum: Curriculum, path: Path | None = None
) -> dict[tuple[str, str], str]:
    """Why a slip may survive, by its task and what it is.

    Raises:
        CatalogueError: the file is not usable, or names a slip that is not made.
    """
    path = path or curriculum.root / RECORDS / SURVIVORS
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["survivors"]
        found = {
            (row["task"], what): row["why"] for row in rows for what in row["what"]
        }
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CatalogueError(f"{path.name}: {error}") from error
    tasks = {task for task, _ in found}
    known = generate(curriculum, [t for t in curriculum.tasks if t.id in tasks])
    made = {(mutation.task, mutation.what) for mutation in known}
    for task, what in found:
        if (task, what) not in made:
            raise CatalogueError(f"{path.name}: {task} has no slip like this: {what}")
        if not found[task, what].strip():
            raise CatalogueError(f"{path.name}: no reason is given for {what}")
    return found


def _solution(curriculum: Curriculum, task: Task) -> str:
    unit = curriculum.units[task.unit]
    return unit.solution(curriculum.root).read_text(encoding="utf-8")
